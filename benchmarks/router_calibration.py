"""How far is each router from the best there can be? Cross-entropy over t, with and without label.

    python benchmarks/router_calibration.py
    python benchmarks/router_calibration.py --models router tiny --steps 8000

The digits in four clusters, 1,437 images to train on and 360 held out. Trained through the command
lines into --out (finished parts are kept): four experts, a router on the pooled images for each of
--models, and one with --from-experts, which sees no image. They are compared with the closed-form
Gaussian, its simplifications (isotropic around class means; around one mean per shard), the prior,
and the exact posterior of the training images.

On x_t of training images, drawn as in training, the exact posterior is the best achievable: of all
q(k | x_t, t, label), the true conditional distribution of the cluster minimises the cross-entropy
(Gibbs), and for finitely many images it is known in closed form. The gap is E KL(exact || q). Here
the cluster of a noisy image is averaged over the exact posterior, which has the same mean as
drawing it and less noise. On held-out images nobody knows the best: the exact posterior of other
images is then one more guess, and an overconfident one. One of the 360 lies in a cluster where
training has no image of its class: asked with the label, exact, Gaussian and prior call that
impossible, which is counted as 88 nats, .24 in the mean.

Prints markdown tables; writes calibration.json and calibration.png into --out.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch

import train_expert
import train_router
from ddm_min import data
from ddm_min.analytic import exact_router
from ddm_min.data import Dataset, to_float
from ddm_min.dit import PRESETS
from ddm_min.expert import load_router
from ddm_min.partition import Partition, partition
from ddm_min.router import ShardStats, gaussian_router, prior_router
from ddm_min.schedule import Linear, add_noise

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NUM_CLUSTERS = 4
TIMES = [(i + 0.5) / 20 for i in range(20)]
OBJECTIVES = ("ddpm", "flow", "ddpm", "flow")  # of the experts, as in the demo


def split_digits() -> tuple[Dataset, Dataset, torch.Tensor, torch.Tensor]:
    """(training, held out, their clusters): one partition of all, so that both mean the same."""
    digits = data.load("digits")
    assignment = partition(digits, NUM_CLUSTERS, "pixels", None, 0).assignment
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(digits)))
    kept, held = rows[:1437], rows[1437:]
    return digits.subset(kept), digits.subset(held), assignment[kept], assignment[held]


def prepare(out: Path, train: Dataset, clusters: torch.Tensor, args: argparse.Namespace) -> dict:
    """Train what is not trained yet. {name: (router file, seconds of this call)}."""
    experts, name = out / "experts", f"npz:{out / 'train.npz'}"
    experts.mkdir(parents=True, exist_ok=True)
    images = train.images.permute(0, 2, 3, 1).numpy()
    np.savez(out / "train.npz", arr_0=images, arr_1=train.labels.numpy())
    cells = clusters * train.num_classes + train.labels
    counts = cells.bincount(minlength=NUM_CLUSTERS * train.num_classes)
    counts = counts.reshape(NUM_CLUSTERS, train.num_classes)
    made = Partition(clusters, counts, train.class_names, train.fingerprint(), "pixels", 0)
    made.save(experts / "partition.safetensors")
    common = ["--data", name, "--device", "cpu"]
    for k, objective in enumerate(OBJECTIVES):
        what = ["--cluster", str(k), "--objective", objective, "--steps", str(args.expert_steps)]
        train_expert.main([*common, "--run", str(experts), *what])
    files = {}
    for model in args.models:
        run = out / f"pooled_{model}"
        run.mkdir(exist_ok=True)
        shutil.copy(experts / "partition.safetensors", run)
        start = time.perf_counter()
        train_router.main([*common, "--run", str(run), "--model", model, *steps(args)])
        files[f"learned ({model})"] = run / "router.safetensors", time.perf_counter() - start
    private = out / "private"
    private.mkdir(exist_ok=True)
    for k in range(NUM_CLUSTERS):
        shutil.copy(experts / f"expert_{k}.safetensors", private)
    start = time.perf_counter()
    words = ["--run", str(private), "--from-experts", "--device", "cpu", *steps(args)]
    train_router.main([*words, "--model", args.models[0]])
    files["from experts"] = private / "router.safetensors", time.perf_counter() - start
    return files


def steps(args: argparse.Namespace) -> list[str]:
    return ["--steps", str(args.steps)] if args.steps else []


def closed_forms(train: Dataset, clusters: torch.Tensor) -> dict:
    """The routers that need no training; the exact one first."""
    images, num_classes = to_float(train.images), train.num_classes
    shards = [images[clusters == k] for k in range(NUM_CLUSTERS)]
    labels = [train.labels[clusters == k] for k in range(NUM_CLUSTERS)]
    stats = [ShardStats.measure(*pair, num_classes) for pair in zip(shards, labels, strict=True)]
    counts = torch.stack([s.counts for s in stats])

    def isotropic(s: ShardStats) -> ShardStats:
        rest = (s.variances.sum() + s.rest * (len(s.basis) - len(s.variances))) / len(s.basis)
        return ShardStats(s.counts, s.means, s.basis[:, :0], s.variances[:0], rest, s.value_range)

    one_class = [ShardStats.measure(shard, torch.zeros(len(shard), dtype=torch.long), 1)
                 for shard in shards]  # fmt: skip

    def one_mean(x_t, t, labels):
        """The prior of the label, and the distance to one mean per shard."""
        null = torch.ones_like(labels)
        evidence = gaussian_router([isotropic(s) for s in one_class], 1)(x_t, t, null)
        evidence = evidence - (counts.sum(1) / counts.sum()).log()
        return (evidence + prior_router(counts, num_classes)(x_t, t, labels)).log_softmax(1)

    return {
        "exact": exact_router(shards, Linear(), labels, num_classes),
        "Gaussian": gaussian_router(stats, num_classes),
        "class means": gaussian_router([isotropic(s) for s in stats], num_classes),
        "one mean": one_mean,
        "prior": prior_router(counts, num_classes),
    }


@torch.no_grad()
def cross_entropies(routers: dict, images, labels, clusters, null_label: int, soft: bool) -> dict:
    """{"with label" | "without label": {router: [one value per t]}}, on the same x_t for all.

    soft: the cluster is averaged over the posterior of the first router, not the image's own.
    """
    rng = np.random.default_rng(1)
    found = {how: {name: [] for name in routers} for how in ("with label", "without label")}
    for level in TIMES:
        eps = torch.from_numpy(rng.standard_normal(images.shape, dtype=np.float32))
        t = torch.full((len(images),), level)
        x_t = add_noise(images, eps, t, Linear())
        for how, asked in (
            ("with label", labels), ("without label", torch.full_like(labels, null_label)),
        ):  # fmt: skip
            probs = torch.nn.functional.one_hot(clusters, NUM_CLUSTERS).float()
            for name, router in routers.items():
                # A cluster that has no image of the label: -inf in log_probs, and 0 in the truth.
                # Impossible by underflow: at most 88 nats, where float32 ends.
                log_probs = router(x_t, t, asked).clamp(min=-88)
                if soft and name == "exact":
                    probs = log_probs.softmax(1)
                loss = -(probs * log_probs).sum(1).mean()
                found[how][name].append(loss.item())
    return found


def print_table(title: str, curves: dict, gaps: bool) -> None:
    names = list(curves)
    print(f"\n{title}\n\n| t | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for i, t in enumerate(TIMES):
        if i % 2:
            cells = " | ".join(f"{curves[name][i]:.3f}" for name in names)
            print(f"| {t:.3f} | {cells} |")
    if gaps:
        difference = {name: np.array(curves[name]) - curves["exact"] for name in names}
        for what, of in (("max gap", np.max), ("mean gap", np.mean)):
            print(f"| {what} | " + " | ".join(f"{of(difference[n]):.3f}" for n in names) + " |")
    else:
        print("| mean | " + " | ".join(f"{np.mean(curves[n]):.3f}" for n in names) + " |")


def draw(results: dict, file: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex=True)
    for row, (split, found) in zip(axes, results.items(), strict=True):
        for axis, (how, curves) in zip(row, found.items(), strict=True):
            for name, values in curves.items():
                style = dict(color="black", lw=2.5, ls="--") if name == "exact" else dict(lw=1.5)
                axis.plot(TIMES, values, label=name, **style)
            axis.set_title(f"{split} images, {how}")
            axis.set_ylim(0, 1.5 if how == "without label" else 0.8)
            axis.set_ylabel("cross-entropy, nats")
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("t (0 = data, 1 = noise)")
    axes[0, 0].legend(fontsize=9, loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/router_calibration"))
    parser.add_argument("--models", nargs="+", default=["router"], choices=PRESETS)
    parser.add_argument("--steps", type=int, help="of the routers; default: train_router.py's")
    parser.add_argument("--expert-steps", type=int, default=2500)
    args = parser.parse_args(argv)

    train, held_out, clusters, held_clusters = split_digits()
    files = prepare(args.out, train, clusters, args)
    routers = closed_forms(train, clusters)
    routers |= {name: load_router(file)[0] for name, (file, _) in files.items()}
    results = {
        "training": cross_entropies(
            routers, to_float(train.images), train.labels, clusters, train.num_classes, True
        ),
        "held-out": cross_entropies(
            routers, to_float(held_out.images).repeat(4, 1, 1, 1), held_out.labels.repeat(4),
            held_clusters.repeat(4), train.num_classes, False,
        ),
    }  # fmt: skip
    for split, found in results.items():
        for how, curves in found.items():
            print_table(f"Cross-entropy on {split} images, {how}", curves, split == "training")
    for name, (_, seconds) in files.items():
        print(f"{name}: {seconds:.0f} s in this call")
    seconds = {name: seconds for name, (_, seconds) in files.items()}
    (args.out / "calibration.json").write_text(
        json.dumps({"times": TIMES, "seconds": seconds, **results}, indent=1)
    )
    draw(results, args.out / "calibration.png")
    print(f"wrote {args.out / 'calibration.json'} and {args.out / 'calibration.png'}")


if __name__ == "__main__":
    main()
