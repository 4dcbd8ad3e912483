"""Every picture of this project: sample grids, clusters, routing, loss curves, the 2-D theorem.

python -m ddm_min.figures theorem --out theorem.png
python -m ddm_min.figures losses  --run runs/digits
python -m ddm_min.figures routing --run runs/digits --data digits
"""

import argparse
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import torch
from einops import rearrange
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.cli import one_sentence_errors
from ddm_min.data import Dataset, to_float, to_uint8
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert, load_router, read_file, replacing
from ddm_min.objectives import Objective
from ddm_min.partition import Partition
from ddm_min.sampler import sample, start_noise
from ddm_min.schedule import Betas, Cosine, Linear, add_noise


def save(figure: Figure, file: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=150, bbox_inches="tight")
    plt.close(figure)


def strip(images: Tensor, gap: int = 1) -> np.ndarray:
    """Lay uint8 images [rows, columns, C, H, W] out as one array for imshow, white between them."""
    height, width = images.shape[-2:]
    padded = images.new_full((*images.shape[:3], height + gap, width + gap), 255)
    padded[..., :height, :width] = images
    tiled = rearrange(padded, "r n c h w -> (r h) (n w) c")[:-gap, :-gap]
    return (tiled if tiled.shape[2] != 1 else tiled.expand(-1, -1, 3)).numpy()


def show_rows(axes, images: Tensor, names: list[str]) -> None:
    """Draw images [rows, columns, C, H, W] with a name at the left of each row."""
    axes.imshow(strip(images), interpolation="nearest")
    height = images.shape[-2] + 1
    axes.set_yticks([row * height + height / 2 - 1 for row in range(len(images))], names)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def sample_grid(
    images: Tensor, labels: Tensor, names: list[str], file: Path, title: str = ""
) -> None:
    """A row per class if classes are equally frequent, else a square; uint8 [N, C, H, W]."""
    present, counts = labels.unique(return_counts=True)
    if len(present) > 1 and (counts == counts[0]).all():
        order, row_names = labels.argsort(stable=True), [names[y] for y in present.tolist()]
        columns = int(counts[0])
    else:
        columns = int(np.ceil(np.sqrt(len(images))))
        order, row_names = torch.arange(len(images)), [""] * -(-len(images) // columns)
        if len(present) == 1:
            title = title or names[int(present[0])]
    blanks = len(row_names) * columns - len(images)
    filled = torch.cat([images[order], images.new_full((blanks, *images.shape[1:]), 255)])
    rows = filled.reshape(len(row_names), columns, *images.shape[1:])
    figure, axes = plt.subplots(figsize=(0.55 * columns + 1, 0.55 * len(row_names) + 0.5))
    show_rows(axes, rows, row_names)
    axes.set_title(title)
    save(figure, file)


def clusters(dataset: Dataset, partition: Partition, file: Path, columns: int = 16) -> None:
    """Random images of each cluster, and how the classes are shared out between the clusters."""
    rng = np.random.default_rng(0)
    members = [
        (partition.assignment == k).nonzero()[:, 0].numpy() for k in range(partition.num_clusters)
    ]
    chosen = [rng.choice(rows, columns, replace=len(rows) < columns) for rows in members]
    images = torch.stack([dataset.images[torch.from_numpy(rows)] for rows in chosen])
    images = images if images.dtype == torch.uint8 else to_uint8(images[:, :, :3])
    names = [f"cluster {k}\n{len(rows)} images" for k, rows in enumerate(members)]
    figure, axes = plt.subplots(
        1, 2, figsize=(12, 0.6 * len(names) + 1.2), layout="constrained", width_ratios=(3, 2)
    )
    show_rows(axes[0], images, names)
    axes[0].set_title("random images of each cluster")
    shares = partition.counts / partition.counts.sum(0).clamp(min=1)
    drawn = axes[1].imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes[1].set_xticks(
        range(shares.shape[1]),
        partition.class_names or ["all"],
        rotation=90 * (shares.shape[1] > 20),
    )
    axes[1].set_yticks(range(len(names)), [str(k) for k in range(len(names))])
    axes[1].set(xlabel="class", ylabel="cluster", title="share of each class")
    figure.colorbar(drawn, ax=axes[1])
    save(figure, file)


@torch.no_grad()
def routing(
    run: Path, dataset: Dataset, file: Path, num_times: int = 33, num_images: int = 1024
) -> None:
    """Mean p(cluster | x_t, t) against t, one panel for the images of each cluster.

    At t = 0 every image knows its cluster; at t = 1 all that is left is the prior n_k / N.
    """
    partition = Partition.load(run / "partition.safetensors", dataset)
    router, _, _ = load_router(run / "router.safetensors")
    rows = np.random.default_rng(0).permutation(len(dataset))[:num_images]
    images, home = to_float(dataset.images[rows]), partition.assignment[rows]
    null = torch.full((len(rows),), dataset.num_classes)
    noise = start_noise(images.shape[1:], [(0, index) for index in range(len(rows))])
    means = []  # num_times of [K of the image, K of the router]
    for t in torch.linspace(0, 1, num_times):
        t_batch = t.expand(len(rows))
        probs = router(add_noise(images, noise, t_batch, Linear()), t_batch, null).exp()
        means.append(torch.stack([probs[home == k].mean(0) for k in range(partition.num_clusters)]))
    panels = torch.stack(means, dim=2)  # home, router, time
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(3 * len(panels) + 1, 2.8),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for k, (axis, panel) in enumerate(zip(axes[0], panels, strict=True)):
        drawn = axis.imshow(
            panel.numpy(),
            vmin=0,
            vmax=1,
            cmap="viridis",
            aspect="auto",
            origin="lower",
            extent=(0, 1, -0.5, len(panels) - 0.5),
        )
        axis.set(
            title=f"images of cluster {k}",
            xlabel="t (0 = data, 1 = noise)",
            yticks=range(len(panels)),
        )
    axes[0, 0].set_ylabel("expert")
    figure.colorbar(drawn, ax=axes, label="mean p(expert | $x_t$, t)")
    save(figure, file)


def losses(run: Path, file: Path) -> None:
    """Loss against step: experts (squared error, each in its own space) and router (nats)."""
    curves = {}
    for resume in sorted((run / "resume").glob("*.safetensors")):
        tensors, metadata = read_file(resume, "resume")
        objective = metadata["arguments"].get("objective", "")
        curves[f"{resume.stem} {objective}".strip()] = tensors["losses"].numpy()
    if not curves:
        raise ValueError(f"there are no training records in {(run / 'resume').resolve()}")
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for name, curve in curves.items():
        window = max(len(curve) // 60, 1)
        smooth = np.convolve(curve, np.ones(window) / window, mode="valid")
        axes[int(name == "router")].plot(np.arange(len(smooth)) + window / 2, smooth, label=name)
    axes[0].set(title="experts, each in isolation", ylabel="squared error per value", yscale="log")
    axes[1].set(title="router", ylabel="cross-entropy in nats")
    for axis in axes:
        axis.set_xlabel("step (running mean)")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    save(figure, file)


def pinwheel(k: int, num: int) -> Tensor:
    """One of three bent arms of points in the plane: float64 [num, 2, 1, 1]."""
    along = np.linspace(0.6, 3, num)
    bend = 0.55 * along + 0.09 * np.random.default_rng(k).standard_normal(num)
    angle = torch.from_numpy(2 * np.pi * k / 3 + bend)
    return torch.polar(torch.from_numpy(along), angle).view(torch.float64).reshape(num, 2, 1, 1)


@torch.no_grad()
def theorem(file: Path, time: float = 0.4, edge: float = 3.5) -> None:
    """DDM eq. 4 and HDDM in the plane, with exact experts: parts, router, their sum on the whole.

    Arrows show -velocity, the way sampling walks. The caption's errors are measured in float64.
    """
    path, shards = Linear(), [pinwheel(k, num) for k, num in enumerate((60, 90, 120))]
    exact, router = EmpiricalFlow(torch.cat(shards), path), exact_router(shards, path)
    colors, kinds = ["#0072B2", "#D55E00", "#008C64"], ["eps", "x0", "velocity"]
    kinds = [Objective(*kind) for kind in zip(kinds, [Cosine(), Betas.ddpm(), path], strict=True)]
    experts = [
        Expert(EmpiricalFlow(shards[k], path).expert(kinds[k]), kinds[k], k) for k in range(3)
    ]

    def mixed(chosen: list[Expert], x_t: Tensor, t: Tensor, align: bool = True) -> Tensor:
        ensemble = Ensemble(chosen, router, path, align=align, num_clusters=3, allow_missing=True)
        return ensemble.field(torch.zeros(len(t), dtype=torch.long), "full")(x_t, t)

    def grid(num: int) -> tuple[np.ndarray, Tensor, Tensor]:
        ticks = torch.linspace(-edge, edge, num, dtype=torch.float64)
        points = torch.cartesian_prod(ticks, ticks).flip(1)[..., None, None]  # rows of equal y
        return ticks.numpy(), points, torch.full((num**2,), time, dtype=torch.float64)

    def dots(axis, points: Tensor, color: str, size: float, **style) -> None:
        axis.scatter(*points.flatten(1).T, s=size, color=color, **style)

    figure, axes = plt.subplots(2, 3, figsize=(11.2, 8.4), layout="constrained")
    for axis in axes.flat:
        axis.set(xlim=(-edge, edge), ylim=(-edge, edge), xticks=[], yticks=[], aspect="equal")
    (ticks, points, t), rim = grid(60), dict(ec="white", lw=0.4, zorder=3)
    probs = router(points, t).exp().reshape(60, 60, 3).numpy()
    blend = probs @ np.array([matplotlib.colors.to_rgb(color) for color in colors])
    look = dict(origin="lower", interpolation="bilinear")
    axes[1, 0].imshow(1 - 0.55 * (1 - blend), extent=(-edge, edge) * 2, **look)
    for k, (shard, color) in enumerate(zip(shards, colors, strict=True)):
        way = -mixed([experts[k]], points, t).reshape(60, 60, 2).permute(2, 0, 1).numpy()
        axes[0, k].streamplot(ticks, ticks, *way, color=color, density=0.8, linewidth=0.8)
        dots(axes[0, k], exact.data, "0.8", 6)
        dots(axes[0, k], shard, color, 14, **rim)
        name = ("eps on cosine", "x0 on a beta table", "velocity on linear")[k]
        axes[0, k].set_title(f"expert {k} alone: {name}", color=color)
        lead = probs[..., k] - np.delete(probs, k, axis=2).max(axis=2)
        axes[1, 0].contour(ticks, ticks, lead, levels=[0], colors="white")
        noise = start_noise((2, 1, 1), [(k, index) for index in range(len(shard))]).double()
        dots(axes[1, 0], add_noise(shard, noise, t[:1], path), color, 14, **rim)
    axes[1, 0].set(title="router: p(expert | $x_t$, t)", xlabel="dots: the data, as noisy $x_t$")

    (_, points, t), errors = grid(19), []
    noise = start_noise((2, 1, 1), [(9, index) for index in range(24)]).double()
    whole = exact.velocity(points, t)
    for velocity, color, width, name in (
        (exact.velocity, "#F8B84E", 5, "exact flow"),
        (partial(mixed, experts), "black", 1, "experts"),
        (partial(mixed, experts, align=False), "#CC3377", 1, "experts, naive"),
    ):
        steps = [noise]
        for start in np.linspace(0.99, 0.03, 49):
            steps.append(sample(velocity, steps[-1], 1, t_start=start, t_end=start - 0.02))
        lines = torch.cat(steps, dim=3)[:, :, 0].permute(1, 2, 0)
        axes[1, 2].plot(*lines, color=color, lw=width, label=[name, *[None] * 23])
        part = velocity(points, t)
        error = (part - whole).norm(dim=1)
        errors += [error.norm() / whole.norm(), (error / whole.norm(dim=1)).max()]
        if "naive" not in name:
            way = -part / part.norm(dim=1, keepdim=True).sqrt()  # with true lengths most are dots
            style = dict(color=color, width=0.0025 * width, headwidth=3 + 2 / width, label=name)
            axes[1, 1].quiver(*points.flatten(1).T, *way.flatten(1).T, scale=42, **style)
    axes[1, 1].set_title("experts x router = exact flow")
    axes[1, 2].set_title("sampling from the same noise (dots)")
    dots(axes[1, 2], noise, "black", 16, zorder=3)
    for axis in axes[1, 1:]:
        dots(axis, exact.data, "0.8", 6, zorder=1)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, frameon=False, fontsize=8)
    figure.supxlabel(
        f"Flows and router at t = {time:g}; arrows point the way that sampling goes, to the data.\n"
        f"|experts - exact| / |exact| on the grid: {errors[2]:.0e} (at worst {errors[3]:.0e}) "
        f"aligned at equal log-SNR, {errors[4]:.0%} (at worst {errors[5]:.0%}) asked naively."
    )
    save(figure, file)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Draw a figure: the theorem needs no data, the others belong to a RUN."""
    parser = argparse.ArgumentParser(prog="python -m ddm_min.figures", description=main.__doc__)
    parser.add_argument("figure", choices=("theorem", "losses", "routing"))
    parser.add_argument(
        "--run", type=Path, help="folder of the ensemble; losses and routing need it"
    )
    parser.add_argument("--data", default="digits", help=data.NAMES)
    parser.add_argument("--out", type=Path, help="picture; default RUN/FIGURE.png or theorem.png")
    args = parser.parse_args(argv)
    if args.figure != "theorem" and args.run is None:
        parser.error(f"{args.figure} needs --run")
    file = args.out or (args.run or Path()) / f"{args.figure}.png"
    if args.figure == "theorem":
        theorem(file)
    elif args.figure == "losses":
        losses(args.run, file)
    else:
        routing(args.run, data.load(args.data), file)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
