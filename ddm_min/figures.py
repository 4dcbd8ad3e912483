"""Every picture of this project: sample grids, clusters, routing, loss curves, the 2-D theorem.

python -m ddm_min.figures theorem --out theorem.png
python -m ddm_min.figures losses  --run runs/digits
python -m ddm_min.figures routing --run runs/digits --data digits
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow, exact_router, pinwheel
from ddm_min.cli import data_arguments, one_sentence_errors
from ddm_min.data import Dataset, to_float, to_uint8
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert, load_router, read_file, replacing
from ddm_min.objectives import Objective
from ddm_min.partition import Partition
from ddm_min.sampler import sample, start_noise
from ddm_min.schedule import Betas, Cosine, Linear, add_noise


def panels(rows: int, columns: int, size: tuple[float, float], **style):
    """(figure of this size in inches, its axes). style: of matplotlib's `Figure.subplots`."""
    from matplotlib.figure import Figure  # here, because it takes half a second

    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(rows, columns, **style)


def save(figure, file: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=150, bbox_inches="tight")


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
    axes.set(xticks=[], frame_on=False)
    axes.tick_params(length=0)


def heat(axes, shares: Tensor, **style):
    """Draw numbers from 0 to 1, [rows, columns]; row k belongs to expert or cluster k."""
    axes.set_yticks(range(len(shares)))
    return axes.imshow(shares.numpy(), vmin=0, vmax=1, aspect="auto", **style)


def sample_grid(images: Tensor, labels: Tensor, names: list[str], file: Path) -> None:
    """A row per class if classes are equally frequent, else a square; uint8 [N, C, H, W]."""
    present, counts = labels.unique(return_counts=True)
    title, row_names, columns = "", [names[y] for y in present.tolist()], int(counts[0])
    if len(present) > 1 and (counts == counts[0]).all():
        images = images[labels.argsort(stable=True)]
    else:
        title, columns = row_names[0] * (len(present) == 1), int(np.ceil(np.sqrt(len(images))))
        row_names = [""] * -(-len(images) // columns)
    shape = (len(row_names), columns, *images.shape[1:])
    blanks = images.new_full((shape[0] * columns - len(images), *shape[2:]), 255)
    figure, axes = panels(1, 1, (0.55 * columns + 1, 0.55 * len(row_names) + 0.5))
    show_rows(axes, torch.cat([images, blanks]).reshape(shape), row_names)
    axes.set_title(title)
    save(figure, file)


def clusters(dataset: Dataset, partition: Partition, file: Path, columns: int = 16) -> None:
    """Random images of each cluster, and how the classes are shared out between the clusters."""
    rng, chosen, names = np.random.default_rng(0), [], []
    for k in range(partition.num_clusters):
        rows = (partition.assignment == k).nonzero()[:, 0].numpy()
        chosen.append(rng.choice(rows, columns, replace=len(rows) < columns))
        names.append(f"cluster {k}\n{len(rows)} images")
    images = dataset.images[torch.from_numpy(np.stack(chosen))]
    images = images if images.dtype == torch.uint8 else to_uint8(images[:, :, :3])
    figure, axes = panels(1, 2, (12, 0.6 * len(names) + 1.2), width_ratios=(3, 2))
    show_rows(axes[0], images, names)
    axes[0].set_title("random images of each cluster")
    shares = partition.counts / partition.counts.sum(0).clamp(min=1)
    figure.colorbar(heat(axes[1], shares, cmap="Blues"), ax=axes[1])
    axes[1].set(xlabel="class", ylabel="cluster", title="share of each class")
    if shares.shape[1] <= 50:  # the names of more would lie on top of each other
        turned = 90 * (shares.shape[1] > 10 or max(map(len, dataset.class_names), default=0) > 4)
        axes[1].set_xticks(range(shares.shape[1]), dataset.class_names or ["all"], rotation=turned)
    save(figure, file)


@torch.no_grad()
def routing(run: Path, dataset: Dataset, file: Path, num_times=33, num_images=1024) -> None:
    """Mean p(cluster | x_t, t) against t, one panel for the images of each cluster.

    At t = 0 every image knows its cluster; at t = 1 all that is left is the prior n_k / N.
    """
    partition = Partition.load(run / "partition.safetensors", dataset)
    router, _, _ = load_router(run / "router.safetensors")
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(dataset))[:num_images])
    images, home = to_float(dataset.images[rows]), partition.assignment[rows]
    null, k = torch.full((len(rows),), dataset.num_classes), partition.num_clusters
    noise = start_noise(images.shape[1:], [(0, index) for index in range(len(rows))])
    means = []  # num_times of [K of the image, K of the router]
    for t in torch.linspace(0, 1, num_times).expand(len(rows), -1).T:
        probs = router(add_noise(images, noise, t, Linear()), t, null).exp()
        means.append(torch.stack([probs[home == cluster].mean(0) for cluster in range(k)]))
    figure, axes = panels(1, k, (3 * k + 1, 2.8), sharey=True, squeeze=False)
    for cluster, shares in enumerate(torch.stack(means, dim=2)):
        drawn = heat(axes[0, cluster], shares, origin="lower", extent=(0, 1, -0.5, k - 0.5))
        axes[0, cluster].set(title=f"images of cluster {cluster}", xlabel="t (0 = data, 1 = noise)")
    axes[0, 0].set_ylabel("expert")
    figure.colorbar(drawn, ax=axes, label="mean p(expert | $x_t$, t)")
    save(figure, file)


def losses(run: Path, file: Path) -> None:
    """Loss against step: experts (squared error, each in its own space) and router (nats)."""
    figure, axes = panels(1, 2, (11, 3.8))
    for resume in sorted((run / "resume").glob("*.safetensors")):
        tensors, metadata = read_file(resume, "resume")
        curve, objective = tensors["losses"].numpy(), metadata["arguments"].get("objective", "")
        window = max(len(curve) // 60, 1)
        smooth = np.convolve(curve, np.ones(window) / window, mode="valid")
        steps, label = np.arange(len(smooth)) + window / 2, f"{resume.stem} {objective}".strip()
        axes[int(resume.stem == "router")].plot(steps, smooth, label=label)
    if not (axes[0].lines or axes[1].lines):
        raise ValueError(f"there are no training records in {(run / 'resume').resolve()}")
    axes[0].set(title="experts, each in isolation", ylabel="squared error per value", yscale="log")
    axes[1].set(title="router", ylabel="cross-entropy of cluster and class, nats")
    for axis in axes:
        axis.set_xlabel("step (running mean)")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    save(figure, file)


@torch.no_grad()
def theorem(file: Path, time: float = 0.4, edge: float = 3.5) -> None:
    """DDM eq. 4 and HDDM in the plane, with exact experts: parts, router, their sum on the whole.

    Arrows show -velocity, the way sampling walks. The caption's errors are measured in float64.
    """
    from matplotlib.colors import to_rgba_array

    path, shards = Linear(), [pinwheel(k, num) for k, num in enumerate((60, 90, 120))]
    exact, router = EmpiricalFlow(torch.cat(shards), path), exact_router(shards, path)
    kinds = [Objective("eps", Cosine()), Objective("x0", Betas.ddpm()), Objective("velocity", path)]
    colors, experts = ["#0072B2", "#D55E00", "#008C64"], []

    def mixed(chosen: list[Expert], x_t: Tensor, t: Tensor, align: bool = True) -> Tensor:
        """The ensemble's velocity at x_t [B, 2, 1, 1] of these experts and the exact router."""
        ensemble = Ensemble(chosen, router, path, align=align, num_clusters=3, allow_missing=True)
        return ensemble.field(torch.zeros(len(t), dtype=torch.long), "full")(x_t, t)

    def grid(num: int) -> tuple[np.ndarray, Tensor, Tensor]:
        """(ticks, the num^2 points of a square grid, the time at each)."""
        ticks = torch.linspace(-edge, edge, num, dtype=torch.float64)
        points = torch.cartesian_prod(ticks, ticks).flip(1)[..., None, None]  # rows of equal y
        return ticks.numpy(), points, torch.full((num**2,), time, dtype=torch.float64)

    def noise(seed: int, num: int) -> Tensor:
        """Start points in the plane, float64 [num, 2, 1, 1]."""
        return start_noise((2, 1, 1), [(seed, index) for index in range(num)]).double()

    def dots(axis, points: Tensor, color: str, size: float, **style) -> None:
        """Draw points [N, 2, 1, 1]."""
        axis.scatter(*points.flatten(1).T, s=size, color=color, **style)

    figure, axes = panels(2, 3, (11.2, 8.4))
    for axis in axes.flat:
        axis.set(xlim=(-edge, edge), ylim=(-edge, edge), xticks=[], yticks=[], aspect="equal")
    routed, fields, paths = axes[1]
    (ticks, points, t), rim = grid(60), dict(ec="white", lw=0.4, zorder=3)
    probs = router(points, t).exp().reshape(60, 60, 3).numpy()
    blend = 1 - 0.55 * (1 - probs @ to_rgba_array(colors)[:, :3])
    routed.imshow(blend, extent=(-edge, edge) * 2, origin="lower", interpolation="bilinear")
    titles = ("eps on cosine", "x0 on a beta table", "velocity on linear")
    for k, (shard, color, axis) in enumerate(zip(shards, colors, axes[0], strict=True)):
        experts.append(Expert(EmpiricalFlow(shard, path).expert(kinds[k]), kinds[k], k))
        way = -mixed([experts[k]], points, t).reshape(60, 60, 2).permute(2, 0, 1).numpy()
        axis.streamplot(ticks, ticks, *way, color=color, density=0.8, linewidth=0.8)
        dots(axis, exact.data, "0.8", 6)
        dots(axis, shard, color, 14, **rim)
        axis.set_title(f"expert {k} alone: {titles[k]}", color=color)
        lead = probs[..., k] - np.delete(probs, k, axis=2).max(axis=2)
        routed.contour(ticks, ticks, lead, levels=[0], colors="white")
        dots(routed, add_noise(shard, noise(k, len(shard)), t[:1], path), color, 14, **rim)
    routed.set(title="router: p(expert | $x_t$, t)", xlabel="dots: the data, as noisy $x_t$")

    (_, points, t), errors = grid(19), []
    whole = exact.velocity(points, t)
    for velocity, color, width, name in (
        (exact.velocity, "#F8B84E", 5, "exact flow"),
        (partial(mixed, experts), "black", 1, "experts"),
        (partial(mixed, experts, align=False), "#CC3377", 1, "experts, naive"),
    ):
        steps = [noise(9, 24)]
        for start in np.linspace(0.99, 0.03, 49):
            steps.append(sample(velocity, steps[-1], 1, t_start=start, t_end=start - 0.02))
        lines = torch.cat(steps, dim=3)[:, :, 0].permute(1, 2, 0)
        paths.plot(*lines, color=color, lw=width, label=[name, *[None] * 23])
        part = velocity(points, t)
        error = (part - whole).norm(dim=1)
        errors += [error.norm() / whole.norm(), (error / whole.norm(dim=1)).max()]
        if "naive" not in name:
            way = -part / part.norm(dim=1, keepdim=True).sqrt()  # with true lengths most are dots
            style = dict(color=color, width=0.0025 * width, headwidth=3 + 2 / width, label=name)
            fields.quiver(*points.flatten(1).T, *way.flatten(1).T, scale=42, **style)
    fields.set_title("experts x router = exact flow")
    paths.set_title("sampling from the same noise (dots)")
    dots(paths, noise(9, 24), "black", 16, zorder=3)
    for axis in (fields, paths):
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
    parser.add_argument("--run", type=Path, help="folder of the ensemble, for losses and routing")
    data_arguments(parser)
    parser.add_argument("--out", type=Path, help="picture; default RUN/FIGURE.png or theorem.png")
    args = parser.parse_args(argv)
    file = args.out or (args.run or Path()) / f"{args.figure}.png"
    if args.figure == "theorem":
        theorem(file)
    elif args.run is None:
        parser.error(f"{args.figure} needs --run")
    elif args.figure == "losses":
        losses(args.run, file)
    else:
        routing(args.run, data.load(args.data, args.image_size), file)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
