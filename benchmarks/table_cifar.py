"""CIFAR-10 on a CPU: one model, DDM, mixed objectives and time intervals at equal training FLOPs.

    python -m benchmarks.cifar_cnn        # first: the data as arrays, and the network that measures
    python -m benchmarks.table_cifar

20,000 of the training images, cut by k-means of their pixels; every way to train sees 256,000
images in all: the monolith 2,000 steps of batch 128, four experts 2,000 of 32, eight experts 2,000
of 16, three time intervals 667 of 128 each. Class-conditional, width 64, depth 4, patches of 4,
mirrored half of the time, routers 600 steps of 128, one seed. Distances are Frechet's in the 128
penultimate features of the small CNN (80 % right), of 500 samples (25 Euler steps) to the 5,000
images that neither CNN nor experts have seen; diversity is the mean distance of two samples of one
class in these features.

Budget: 70 minutes of training on one core, and 10 of sampling; it goes on where it was stopped.
Writes benchmarks/results/cifar.json, cifar.png and cifar_samples.png.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import train_expert
from benchmarks import trials
from benchmarks.cifar_cnn import WEIGHTS, features, frechet, moments
from benchmarks.trials import RESULTS, dot_chart, draw, gather, split_run, write_table
from ddm_min import data, figures
from ddm_min.dit import PRESETS

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
RUNS = ("monolith", "k4", "ddpm", "intervals", "k8")
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


def train_all(source: str, runs: list[str]) -> float:
    """Train what is missing of these runs; returns the core-minutes of all experts."""
    for run, k in (("k4", 4), ("k8", 8)):
        if not (HOME / run / "partition.safetensors").exists():
            split_run(HOME / run, source, k, "pixels", "--fine", "64")
    gather(HOME / "ddpm", {"partition.safetensors": HOME / "k4" / "partition.safetensors"})
    for run, cluster, batch_size, steps, options in PARTS:
        if run not in runs:
            continue
        clock = HOME / run / "seconds.json"
        seconds = json.loads(clock.read_text()) if clock.exists() else {}
        name = f"{cluster} {' '.join(options)}"
        if name not in seconds:
            start = time.process_time()
            train_expert.main(
                f"--data {source} --run {HOME / run} --cluster {cluster} --steps {steps} "
                f"--batch-size {batch_size}".split()
                + HOW
                + options
            )
            clock.write_text(json.dumps(seconds | {name: time.process_time() - start}))
    if set(runs) != set(RUNS):
        return 0.0
    for run in ("k4", "k8"):
        trials.train_the_router(HOME / run, source, 0, "--steps", "600")
    names = ("partition", "router", "expert_1", "expert_3")
    files = {f"{name}.safetensors": HOME / "k4" / f"{name}.safetensors" for name in names}
    files |= {f"expert_{k}.safetensors": HOME / "ddpm" / f"expert_{k}.safetensors" for k in (0, 2)}
    gather(HOME / "mixed", files)
    clocks = [json.loads((HOME / run / "seconds.json").read_text()) for run in runs]
    return sum(sum(seconds.values()) for seconds in clocks) / 60


def within_class(images: Tensor, labels: Tensor) -> float:
    """Mean distance of two images of one class in the CNN's features, averaged over classes."""
    points = features(images)
    spreads = []
    for label in labels.unique():
        rows = points[labels == label]
        spreads.append(torch.cdist(rows, rows).sum() / (len(rows) * (len(rows) - 1)))
    return torch.stack(spreads).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only = "train these and stop: several of them can run at the same time"
    parser.add_argument("--only", nargs="+", choices=RUNS, help=only)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not WEIGHTS.exists():
        raise SystemExit(f"there is no {WEIGHTS}: run python -m benchmarks.cifar_cnn first")
    file = HOME / "train.npz"
    if not file.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        whole = np.load(WEIGHTS.parent / "train.npz")
        rows = np.random.default_rng(0).permutation(len(whole["arr_0"]))[:NUM_TRAIN]
        np.savez(file, arr_0=whole["arr_0"][rows], arr_1=whole["arr_1"][rows])
    minutes = train_all(f"npz:{file}", args.only or RUNS)
    if args.only:
        return

    held = data.load(f"npz:{WEIGHTS.parent / 'held.npz'}")
    train = data.load(f"npz:{file}")
    target, record = moments(held.images), HOME / "measured.json"
    measured = json.loads(record.read_text()) if record.exists() else {}
    shown = []
    for name, run, strategy, router in ROWS:
        keep = HOME / run / f"samples_{strategy}_{router}.npz"
        if not keep.exists():
            images, labels, costs = draw(
                HOME / run, strategy, router, num=NUM_SAMPLES, num_steps=25
            )
            pixels = images.permute(0, 2, 3, 1).numpy()
            np.savez(keep, arr_0=pixels, arr_1=labels.numpy())
            measured[name] = costs
        images, labels = (drawn := data.load(f"npz:{keep}")).images, drawn.labels
        if "to held-out" not in measured[name]:
            measured[name] |= {
                "to held-out": frechet(images, target),
                "diversity": within_class(images, labels),
            }
            record.write_text(json.dumps(measured, indent=1))
        if (strategy in ("full", "coupled") and router != "prior") or run in (
            "monolith",
            "intervals",
        ):
            shown.append((name, images[labels % 5 == 0][:: NUM_SAMPLES // 5 // 12][:12]))

    columns = ["to held-out", "diversity", "forwards", "switches", "seconds"]
    rows = [
        {"name": name} | {column: [measured[name][column]] for column in columns}
        for name, *_ in ROWS
    ]
    real, labels = train.images[:NUM_SAMPLES], train.labels[:NUM_SAMPLES]
    floor, spread = frechet(real, target), within_class(real, labels)
    note = (
        f"{NUM_SAMPLES} training images in their place: {floor:.3f}, diversity {spread:.3f}; "
        f"{minutes:.0f} core-minutes of training"
    )
    write_table("cifar", "CIFAR-10, 256,000 images seen by each", columns, rows, note)
    lines = {"training images": floor}
    title = "CIFAR-10 on one core, equal training FLOPs"
    dot_chart("cifar", title, "Frechet distance, small CNN", {"": rows}, ["to held-out"], lines)
    strips = torch.stack([images for _, images in shown])
    labels = torch.arange(len(shown)).repeat_interleave(12)
    names = [name for name, _ in shown]
    figures.sample_grid(strips.flatten(0, 1), labels, names, RESULTS / "cifar_samples.png")


if __name__ == "__main__":
    main()
