"""One model or an ensemble, over the model's width (DDM figure 4), and what turns the result.

    python -m benchmarks.table_width

At each width K = 4 experts (batch 32 each) and one monolith (batch 128) train for 1,500 steps on
the same digits, class-conditional. Two measures take the loser apart, at 8 noise levels:

    error     mean |u - u_exact|^2 per pixel against the exact flow of the training digits: what is
              left to learn, or, read the other way, what has not been memorised
    loss      mean |u - (eps - x0)|^2 on held-out digits: what the theory minimises, on new data

and each is taken twice for the ensemble: with its learned router and with the exact one, so that
the router's share is seen apart from the experts'. Two further pairs train at half the learning
rate, because a batch of 32 is noisier than one of 128. Budget: 55 trainings that table_routing does
not share, 40 minutes on one core. Writes benchmarks/results/width.json and .png.
"""

import json

import torch

from benchmarks.trials import (
    HOME,
    NUM_SAMPLES,
    SEEDS,
    STEPS,
    distance_chart,
    row,
    split_run,
    start,
    train_experts,
    train_the_router,
    write_table,
)
from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.data import Dataset, to_float
from ddm_min.ensemble import Ensemble
from ddm_min.partition import Partition
from ddm_min.run import load_run
from ddm_min.sampler import start_noise
from ddm_min.schedule import Linear, add_noise

TIMES = [(i + 0.5) / 8 for i in range(8)]
NUM_IMAGES = 225
MODELS = {  # row -> (run of the ensemble, run of the monolith, options, seeds)
    "width 16, depth 3": ("width16_k4", "width16_mono4", ["--model", "width16"], SEEDS),
    "width 32, depth 3": ("width32_k4", "width32_mono4", ["--model", "width32"], SEEDS),
    "width 64, depth 4": ("k4", "mono4", [], SEEDS),
    "width 64, half the rate": ("lr4_k4", "lr4_mono4", ["--lr", "4e-3"], SEEDS[:1]),
}
COLUMNS = {
    "to train": "to_train",
    "to held-out": "to_heldout",
    "nearest": "nearest",
    "as asked": "as_asked",
}


@torch.no_grad()
def field_errors(ensemble: Ensemble, data: Dataset, exact: EmpiricalFlow) -> dict:
    """{"error", "loss"}: means over TIMES and the first images of `data`, each at its own x_t."""
    x0, labels = to_float(data.images[:NUM_IMAGES]), data.labels[:NUM_IMAGES]
    error, loss = [], []
    for index, time in enumerate(TIMES):
        keys = [(index, row) for row in range(len(x0))]
        eps, t = start_noise(x0.shape[1:], keys), torch.full((len(x0),), time)
        x_t = add_noise(x0, eps, t, Linear())
        velocity = ensemble.field(labels, "full", seeds=keys)(x_t, t)
        error.append((velocity - exact.velocity(x_t, t, labels)).square().mean().item())
        loss.append((velocity - (eps - x0)).square().mean().item())
    return {"error": sum(error) / len(TIMES), "loss": sum(loss) / len(TIMES)}


def taken_apart(run, train: Dataset, heldout: Dataset) -> dict:
    """Both measures on both parts, by the run's router and by the exact one; kept in the run."""
    file = run / "errors.json"
    if file.exists():
        return json.loads(file.read_text())
    loaded = load_run(run, None, "cpu")
    images, labels, null_label = to_float(train.images), train.labels, train.num_classes
    exact = EmpiricalFlow(images, Linear(), labels, null_label)
    routers = {"learned": loaded.router}
    if len(loaded.counts) > 1:
        home = Partition.load(run / "partition.safetensors", train).assignment
        rows = [home == k for k in range(len(loaded.counts))]
        shards = [images[r] for r in rows]
        routers["exact"] = exact_router(shards, Linear(), [labels[r] for r in rows], null_label)
    found = {}
    for name, router in routers.items():
        ensemble = Ensemble(
            loaded.experts, router, num_clusters=len(loaded.counts), num_classes=null_label
        )
        on_train = field_errors(ensemble, train, exact)
        on_heldout = field_errors(ensemble, heldout, exact)
        found[name] = {
            "error": on_train["error"],
            "loss, train": on_train["loss"],
            "loss, held-out": on_heldout["loss"],
        }
    file.write_text(json.dumps(found))
    return found


def main() -> None:
    source, judge = start(__doc__)
    panels, errors = {}, []
    for name, (many, one, options, seeds) in MODELS.items():
        for seed in seeds:
            run = split_run(HOME / f"{many}_s{seed}", source, 4)
            train_experts(run, source, range(4), seed, *options)
            train_the_router(run, source, seed)
            mono = HOME / f"{one}_s{seed}"
            train_experts(mono, source, ["all"], seed, *options, batch_size=128)
        rows = []
        for label, run, strategy, router in (
            ("monolith", one, "full", "prior"),
            ("full", many, "full", "learned"),
            ("coupled", many, "coupled", "learned"),
            ("prior + coupled", many, "coupled", "prior"),
        ):
            how = dict(strategy=strategy, router=router, label=None)
            rows.append(row(label, run, judge, COLUMNS, seeds, **how))
        panels[name] = rows
        write_table(f"width_{many}", name, list(COLUMNS), rows, f"seeds {list(seeds)}")
        for label, run, router in (
            ("monolith", one, "learned"),
            ("experts, learned router", many, "learned"),
            ("experts, exact router", many, "exact"),
        ):
            parts = [
                taken_apart(HOME / f"{run}_s{seed}", judge.train, judge.heldout) for seed in seeds
            ]
            values = {key: [part[router][key] for part in parts] for key in parts[0][router]}
            errors.append({"name": f"{name}: {label}"} | values)
    columns = ["error", "loss, train", "loss, held-out"]
    write_table("width_errors", "squared error per pixel, mean over t", columns, errors, "")
    title = (
        f"One model of batch 128 or four experts of batch 32 ({STEPS} steps, {NUM_SAMPLES} samples)"
    )
    distance_chart("width", title, panels, judge)


if __name__ == "__main__":
    main()
