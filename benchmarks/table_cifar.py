"""CIFAR-10 on a CPU: one model, DDM, mixed objectives and time intervals at equal training FLOPs.

    python -m benchmarks.cifar_cnn        # first: the data as arrays, and the network that measures
    python -m benchmarks.table_cifar

20,000 of the training images, cut by k-means of their pixels; every way to train sees 256,000
images in all: the monolith 2,000 steps of batch 128, four experts 2,000 of 32, eight experts 2,000
of 16, three time intervals 667 of 128 each. Class-conditional, width 64, depth 4, patches of 4,
mirrored half of the time, routers 600 steps of 128, two seeds. Distances are Frechet's in the 128
penultimate features of the small CNN (80 % right), of 500 samples (25 Euler steps) to the 5,000
images that neither CNN nor experts have seen; diversity is the mean distance of two samples of one
class in these features.

Budget: two hours of training on one core, and 20 minutes of sampling; it goes on where it was
stopped. `--seed 0` and `--seed 1` at the same time use two cores; without --seed, what is missing
of both is made, and the table is written.
Writes benchmarks/results/cifar.json, cifar.png and cifar_samples.png.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from benchmarks import trials
from benchmarks.cifar_cnn import WEIGHTS, features, frechet, moments
from benchmarks.trials import RESULTS, dot_chart, draw, gather, train_experts, write_table
from ddm_min import data, figures
from ddm_min.dit import PRESETS
from ddm_min.expert import replacing
from ddm_min.fid import FeatureStats

HOME = Path("runs/table_cifar")
PRESETS["tiny/4"] = PRESETS["tiny"] | {"patch_size": 4}
NUM_SAMPLES, NUM_TRAIN, STEPS = 500, 20_000, 2000
HOW = ["--model", "tiny/4", "--lr", "4e-3", "--flip"]
PARTS = (  # RUN, cluster, batch size, steps, further options
    ("monolith", "all", 128, STEPS, []),
    *(("k4", k, 32, STEPS, []) for k in range(4)),
    *(("ddpm", k, 32, STEPS, ["--objective", "ddpm"]) for k in (0, 2)),
    *(
        ("intervals", "all", 128, round(STEPS / 3), ["--time-interval", a, b])
        for a, b in (("0", "0.333"), ("0.333", "0.667"), ("0.667", "1"))
    ),
    *(("k8", k, 16, STEPS, []) for k in range(8)),
)
SEEDS = (0, 1)
ROWS = (  # name, RUN, strategy, router
    ("monolith", "monolith", "full", "prior"),
    ("3 intervals (MDM)", "intervals", "full", "prior"),
    *(
        (f"{title}: {strategy}{' + prior' if router == 'prior' else ''}", run, strategy, router)
        for title, run in (("K = 4", "k4"), ("2 DDPM : 2 flow", "mixed"), ("K = 8", "k8"))
        for strategy, router in (
            ("coupled", "prior"),
            ("coupled", "learned"),
            ("top-1", "learned"),
            ("top-2", "learned"),
            ("full", "learned"),
        )
    ),
)


def train_all(home: Path, source: str, seed: int) -> float:
    """Train what is missing in `home`; returns the core-minutes of all its experts."""
    for run, k in (("k4", 4), ("k8", 8)):
        trials.split_run(home / run, source, k, "pixels", "--fine", "64")
    gather(home / "ddpm", {"partition.safetensors": home / "k4" / "partition.safetensors"})
    clocks = {}
    for run, cluster, batch_size, steps, options in PARTS:
        clocks[run] = train_experts(
            home / run, source, [cluster], seed, *HOW, *options, steps=steps, batch_size=batch_size
        )
    for run in ("k4", "k8"):
        trials.train_the_router(home / run, source, seed, "--steps", "600")
    names = ("partition", "router", "expert_1", "expert_3")
    files = {f"{name}.safetensors": home / "k4" / f"{name}.safetensors" for name in names}
    files |= {f"expert_{k}.safetensors": home / "ddpm" / f"expert_{k}.safetensors" for k in (0, 2)}
    gather(home / "mixed", files)
    return sum(sum(seconds.values()) for seconds in clocks.values()) / 60


def within_class(images: Tensor, labels: Tensor) -> float:
    """Mean distance of two images of one class in the CNN's features, averaged over classes."""
    points = features(images)
    spreads = []
    for label in labels.unique():
        rows = points[labels == label]
        spreads.append(torch.cdist(rows, rows).sum() / (len(rows) * (len(rows) - 1)))
    return torch.stack(spreads).mean().item()


def sample_all(home: Path, seed: int, target: FeatureStats) -> dict[str, dict]:
    """Draw and measure what is missing in `home`: name of the row -> what was measured.

    target: moments of the held-out images.
    """
    record = home / "measured.json"
    measured = json.loads(record.read_text()) if record.exists() else {}
    for name, run, strategy, router in ROWS:
        if name in measured:
            continue
        how = dict(seed=seed, num=NUM_SAMPLES, num_steps=25)
        images, labels, costs = draw(home / run, strategy, router, **how)
        pixels = images.permute(0, 2, 3, 1).numpy()
        np.savez(samples_file(home, run, strategy, router), arr_0=pixels, arr_1=labels.numpy())
        measured[name] = costs | {
            "to held-out": frechet(images, target),
            "diversity": within_class(images, labels),
        }
        with replacing(record) as temporary:
            temporary.write_text(json.dumps(measured, indent=1))
    return measured


def samples_file(home: Path, run: str, strategy: str, router: str) -> Path:
    """Where the samples of a row lie."""
    return home / run / f"samples_{strategy}_{router}.npz"


def sample_strips(home: Path, train: data.Dataset) -> None:
    """cifar_samples.png: 6 cars and 6 ships of each way to train, under real ones."""
    kept = [("CIFAR-10", train.images[:NUM_SAMPLES], train.labels[:NUM_SAMPLES])]
    for name, run, strategy, router in ROWS:
        if run in ("monolith", "intervals") or (strategy, router) == ("coupled", "learned"):
            drawn = data.load(f"npz:{samples_file(home, run, strategy, router)}")
            kept.append((name, drawn.images, drawn.labels))
    strips = [torch.cat([x[y == label][:6] for label in (1, 8)]) for _, x, y in kept]
    places = torch.arange(len(kept)).repeat_interleave(12)
    file = RESULTS / "cifar_samples.png"
    figures.sample_grid(torch.cat(strips), places, [name for name, *_ in kept], file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only = "train and sample this seed and stop: two of them can run at the same time"
    parser.add_argument("--seed", type=int, choices=SEEDS, help=only)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not WEIGHTS.exists():
        raise SystemExit(f"there is no {WEIGHTS}: run python -m benchmarks.cifar_cnn first")
    file = HOME / "train.npz"
    HOME.mkdir(parents=True, exist_ok=True)
    with FileLock(HOME / "lock"):  # two seeds may start together
        if not file.exists():
            whole = np.load(WEIGHTS.parent / "train.npz")
            rows = np.random.default_rng(0).permutation(len(whole["arr_0"]))[:NUM_TRAIN]
            with replacing(file) as temporary:
                np.savez(temporary, arr_0=whole["arr_0"][rows], arr_1=whole["arr_1"][rows])
    target = moments(data.load(f"npz:{WEIGHTS.parent / 'held.npz'}").images)
    minutes, measured = 0.0, []
    for seed in SEEDS if args.seed is None else (args.seed,):
        minutes += train_all(HOME / f"s{seed}", f"npz:{file}", seed)
        measured.append(sample_all(HOME / f"s{seed}", seed, target))
    if args.seed is not None:
        return

    columns = ["to held-out", "diversity", "forwards", "switches", "seconds"]
    rows = [
        {"name": name} | {column: [found[name][column] for found in measured] for column in columns}
        for name, *_ in ROWS
    ]
    train = data.load(f"npz:{file}")
    real, labels = train.images[:NUM_SAMPLES], train.labels[:NUM_SAMPLES]
    floor, spread = frechet(real, target), within_class(real, labels)
    note = (
        f"{NUM_SAMPLES} training images in their place: {floor:.3f}, diversity {spread:.3f}; "
        f"{minutes:.0f} core-minutes of training experts, {len(SEEDS)} seeds"
    )
    write_table("cifar", "CIFAR-10, 256,000 images seen by each", columns, rows, note)
    title = f"CIFAR-10, equal training FLOPs (training images in their place: {floor:.2f})"
    dot_chart("cifar", title, "Frechet distance, small CNN", {"": rows}, ["to held-out"], {})
    sample_strips(HOME / f"s{SEEDS[0]}", train)


if __name__ == "__main__":
    main()
