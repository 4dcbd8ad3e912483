"""What the tables share: resumable trainings through the command lines, samples, and how they are
measured. All of it lies in runs/tables (CIFAR's in runs/table_cifar), and is not made twice.

Digits are split once, by a fixed permutation, into 1,347 to train on and 450 held out. Training is
one call of train_expert.py or train_router.py in this process, on one thread, so a killed table
goes on where it was. A measurement is a line of JSON beside the run, keyed by what was asked.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import train_expert
import train_router
from ddm_min import data, partition
from ddm_min.data import Dataset, to_float
from ddm_min.dit import PRESETS
from ddm_min.ensemble import Ensemble
from ddm_min.expert import replacing
from ddm_min.features import distance, moments
from ddm_min.run import choose_labels, load_run
from ddm_min.sampler import sample, start_noise

HOME = Path("runs/tables")
RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
STEPS = 1500
NUM_SAMPLES = 500
PRESETS |= {  # the widths of DDM's figure 4, at our scale; `tiny` is width 64, depth 4
    "width16": dict(width=16, depth=3, heads=2, patch_size=2),
    "width32": dict(width=32, depth=3, heads=4, patch_size=2),
    "width96": dict(width=96, depth=4, heads=4, patch_size=2),
}


def digits_split() -> tuple[str, Dataset, Dataset]:
    """(name of the training part for --data, training part, held-out part) of the digits."""
    files = [HOME / "train.npz", HOME / "heldout.npz"]
    if not all(file.exists() for file in files):
        HOME.mkdir(parents=True, exist_ok=True)
        digits = data.load("digits")
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(digits)))
        for file, rows in zip(files, (order[450:], order[:450]), strict=True):
            pixels = digits.images[rows].permute(0, 2, 3, 1).numpy()
            np.savez(file, arr_0=pixels, arr_1=digits.labels[rows].numpy())
    return f"npz:{files[0]}", *(data.load(f"npz:{file}") for file in files)


def split_run(run: Path, source: str, clusters: int, features: str = "pixels", *options) -> Path:
    """A RUN with a partition of the training part; the split has seed 0 for every training seed."""
    if not (run / "partition.safetensors").exists():
        partition.main(
            f"--data {source} --clusters {clusters} --features {features} --run {run}".split()
            + list(options)
        )
    return run


def train_experts(
    run: Path, source: str, clusters, seed: int, *options: str,
    steps: int = STEPS, batch_size: int = 32,
) -> dict[str, float]:  # fmt: skip
    """Train what is missing of these clusters ("all" is a monolith).

    options: further arguments of train_expert.py. Returns seconds.json of the run, "CLUSTER
    OPTIONS" -> processor seconds.
    """
    run.mkdir(parents=True, exist_ok=True)
    clock = run / "seconds.json"
    for cluster in clusters:
        name = f"{cluster} {' '.join(options)}"
        seconds = json.loads(clock.read_text()) if clock.exists() else {}
        if name in seconds:
            continue
        key = unfinished = f"{name}, unfinished"
        start, before = time.process_time(), seconds.pop(unfinished, 0.0)
        try:
            train_expert.main(
                f"--data {source} --run {run} --cluster {cluster} --seed {seed} --steps {steps} "
                f"--batch-size {batch_size}".split()
                + list(options)
            )
            key = name
        finally:  # also if it was stopped by a signal, and goes on another time
            seconds[key] = before + time.process_time() - start
            clock.write_text(json.dumps(seconds))
    return json.loads(clock.read_text())


def train_the_router(run: Path, source: str, seed: int, *options: str) -> None:
    """A router on this run's partition, if it is not there; options: of train_router.py.

    The experts do not matter to it: runs of one partition and seed share a router.
    """
    fingerprint = load_run(run, "prior", "cpu").experts[0].fingerprint
    shared = HOME / f"router_{fingerprint[:12]}_s{seed}"
    if not (shared / "router.safetensors").exists():
        gather(shared, {"partition.safetensors": run / "partition.safetensors"})
        train_router.main(f"--data {source} --run {shared} --seed {seed}".split() + list(options))
    gather(run, {"router.safetensors": shared / "router.safetensors"})


def gather(run: Path, files: dict[str, Path]) -> Path:
    """A RUN made of finished files of other runs: name in the new run -> file."""
    run.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        shutil.copyfile(file, run / name)
    return run


def draw(
    run: Path, strategy: str, router: str | None = None, label: str | None = None, seed: int = 0,
    num: int = NUM_SAMPLES, reading: str = "aligned", reread=None, num_steps: int = 50,
) -> tuple[Tensor, Tensor, dict]:  # fmt: skip
    """(images uint8 [N, C, H, W], labels [N], costs): what sample.py does, without the file.

    reading: "naive" in it asks at the same (x_t, t); reread(experts, reading) may exchange experts.
    """
    loaded = load_run(run, router, "cpu")
    labels = choose_labels(label, num, loaded.class_names, loaded.counts)
    experts = reread(loaded.experts, reading) if reread else loaded.experts
    ensemble = Ensemble(
        experts, loaded.router, num_clusters=len(loaded.counts),
        counts=loaded.counts, num_classes=len(loaded.class_names), align="naive" not in reading,
    )  # fmt: skip
    start, images, forwards, switches = time.process_time(), [], 0, 0
    for rows in tqdm(torch.arange(num).split(300), desc=f"{run.name} {strategy}", leave=False):
        keys = [(seed, index) for index in rows.tolist()]
        field = ensemble.field(labels[rows], strategy, seeds=keys)
        noise = start_noise(loaded.experts[0].image_shape, keys)
        images.append(sample(field, noise, num_steps))
        forwards, switches = forwards + field.forwards, switches + field.switches
    costs = {
        "forwards": forwards / num / num_steps,
        "switches": switches / num,
        "seconds": time.process_time() - start,
    }
    return data.to_uint8(torch.cat(images)), labels, costs


def nearest_distance(images: Tensor, others: Tensor) -> float:
    """Mean distance of each image to the nearest of others, in [-1, 1] per pixel (root mean)."""
    a, b = to_float(images).flatten(1), to_float(others).flatten(1)
    return (torch.cdist(a, b).min(1).values / a.shape[1] ** 0.5).mean().item()


def diversity(images: Tensor, labels: Tensor) -> float:
    """Mean distance of two images of one class, averaged over classes; per pixel (root mean)."""
    flat = to_float(images).flatten(1)
    spreads = []
    for label in labels.unique():
        rows = flat[labels == label]
        total = torch.cdist(rows, rows).sum() / (len(rows) * (len(rows) - 1))
        spreads.append(total / flat.shape[1] ** 0.5)
    return torch.stack(spreads).mean().item()


class Judge:
    """What samples are measured against: both parts of the digits, and a classifier of them."""

    def __init__(self, train: Dataset, heldout: Dataset):
        from sklearn.svm import SVC

        self.train, self.heldout = train, heldout
        self.stats = [moments(part.images, "pixels") for part in (train, heldout)]
        self.classifier = SVC(gamma="scale").fit(to_float(train.images).flatten(1), train.labels)
        self.shares = train.labels.bincount() / len(train)

    def __call__(self, images: Tensor, labels: Tensor) -> dict:
        """Distances to both parts, classes seen in the samples, nearest neighbours, diversity."""
        seen = torch.from_numpy(self.classifier.predict(to_float(images).flatten(1)))
        stats = moments(images, "pixels")
        asked = labels < self.train.num_classes
        shares = seen.bincount(minlength=self.train.num_classes) / len(seen)
        return {
            "to_train": distance(stats, self.stats[0]),
            "to_heldout": distance(stats, self.stats[1]),
            "class_shares": shares.tolist(),
            "class_shares_off": float((shares - self.shares).abs().sum() / 2),  # total variation
            "as_asked": float((seen == labels)[asked].float().mean()) if asked.any() else None,
            "nearest": nearest_distance(images, self.train.images),
            "diversity": diversity(images, seen),
        }

    def floor(self) -> dict:
        """The held-out digits in the place of samples: what a perfect model would show."""
        return self(self.heldout.images, self.heldout.labels)


def measured(run: Path, judge: Judge, reread=None, **how) -> dict:
    """Draw and judge, or read what an earlier call with the same arguments found."""
    file, key = run / "measured.json", json.dumps(how, sort_keys=True)
    known = json.loads(file.read_text()) if file.exists() else {}
    if key not in known:
        images, labels, costs = draw(run, reread=reread, **how)
        found = judge(images, labels) | costs
        known = json.loads(file.read_text()) if file.exists() else {}  # another table may add too
        known[key] = found
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(known, indent=1))
    return known[key]


def mean_and_spread(values: list[float]) -> str:
    """ ".412 +- .013": mean and standard deviation over training seeds."""
    text = f"{np.mean(values):.3f}"
    return text + (f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else "")


def write_table(name: str, title: str, columns: list[str], rows: list[dict], note: str) -> None:
    """Print a table as markdown and write RESULTS/name.json; rows hold lists, a value per seed."""
    print(f"\n{title}\n\n| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for row in rows:
        cells = [mean_and_spread(row[c]) if row.get(c) else "" for c in columns]
        print(f"| {row['name']} | " + " | ".join(cells) + " |")
    print(f"\n{note}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"title": title, "note": note, "rows": rows}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def row(name: str, run: str, judge: Judge, columns: dict[str, str], seeds=SEEDS, **how) -> dict:
    """A table's row: {"name", column: a value per seed}, `measured` in HOME/run_s0, run_s1, ...

    columns: name in the table -> key of a measurement. how: the arguments of `draw`.
    """
    results = [measured(HOME / f"{run}_s{seed}", judge, **how) for seed in seeds]
    return {"name": name} | {
        column: [float(result[key]) for result in results]
        for column, key in columns.items()
        if all(result[key] is not None for result in results)
    }


def dot_chart(name: str, title: str, xlabel: str, groups: dict[str, list[dict]], columns: list[str],
              lines: dict[str, float]) -> None:  # fmt: skip
    """One panel per group: a row per method, a dot per seed and column; lines: values to compare
    with. Writes RESULTS/name.png."""
    from matplotlib import pyplot as plt

    most, across = max(len(rows) for rows in groups.values()), min(len(groups), 2)
    down = -(-len(groups) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(5 * across + 1, (0.36 * most + 1.2) * down + 0.6),
        layout="constrained", sharex=True, squeeze=False,
    )  # fmt: skip
    colors = ["#0072B2", "#D55E00", "#008C64", "#CC79A7"]
    for axis, (group, rows) in zip(panels.flat, groups.items(), strict=True):
        for place, row in enumerate(rows):
            for column, color in zip(columns, colors, strict=False):
                values = row.get(column, [])
                axis.scatter(values, [place] * len(values), color=color, s=14, alpha=0.7)
                if values:
                    axis.plot([np.mean(values)], [place], "|", color=color, ms=13, mew=2)
        for (text, value), style in zip(lines.items(), ("--", ":"), strict=False):
            label = text if axis is panels[0, 0] else None  # once in the legend
            axis.axvline(value, color="0.4", ls=style, lw=1, label=label)
        axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axis.set(title=group, xscale="log")
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.grid(alpha=0.3, axis="x", which="both")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="x", which="both", labelsize=7, rotation=45)
    for axis in panels[-1]:
        axis.set_xlabel(xlabel)
    for column, color in zip(columns, colors, strict=False):
        panels[0, 0].scatter([], [], color=color, s=14, label=column)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(title)
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", dpi=130)
    plt.close(figure)


def distance_chart(name: str, title: str, panels: dict[str, list[dict]], judge: Judge) -> None:
    """`dot_chart` of the distances to both parts of the digits, beside what real digits reach."""
    lines = {"held-out digits to train": judge.floor()["to_train"]}
    dot_chart(name, title, "pixel Frechet distance", panels, ["to train", "to held-out"], lines)


def start(description: str) -> tuple[str, Judge]:
    """What every table on the digits begins with: --help, one thread, data to train on, judge."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=description, formatter_class=form).parse_args()
    torch.set_num_threads(1)
    source, train, heldout = digits_split()
    return source, Judge(train, heldout)
