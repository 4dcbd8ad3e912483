"""What lies in a RUN folder: experts that belong together, a router for them, and samples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm_min.data import to_uint8, write_image
from ddm_min.expert import Expert, check_writable, load_router, replacing
from ddm_min.router import gaussian_router, prior_router

MUST_AGREE = ("image_shape", "class_names", "latents")


@dataclass
class Run:
    """experts: all of the folder. counts [K, C]: images per cluster and class, by the router's file
    or else by the experts' own statistics. router_name: learned, gaussian or prior."""

    experts: list[Expert]
    router: Callable
    router_name: str
    counts: Tensor

    @property
    def class_names(self) -> list[str]:
        """The same for all experts; empty without classes."""
        return self.experts[0].class_names


def load_run(folder: Path, router_name: str | None, device: str) -> Run:
    """Read RUN. router_name None: learned where there is a router file, else gaussian.

    Raises ValueError for files that do not belong together, naming two and how they differ.
    """
    files = sorted(folder.glob("expert_*.safetensors"))
    if not files:
        raise ValueError(
            f"there are no expert files in {folder.resolve()}: check the path, or train some"
        )
    experts = [Expert.load(file, device) for file in files]
    for file, expert in zip(files, experts, strict=True):
        for name in MUST_AGREE:
            a, b = getattr(experts[0], name), getattr(expert, name)
            if a != b:
                raise ValueError(f"{files[0]} and {file} differ in {name}: {a} and {b}")
    prints = {expert.fingerprint: file for file, expert in zip(files, experts, strict=True)}
    prints.pop("", None)  # an expert for all clusters knows no partition
    if len(prints) > 1:
        raise ValueError(
            f"{' and '.join(map(str, prints.values()))} come from different partitions"
        )

    num_classes = len(experts[0].class_names)
    shards = shard_stats(experts)
    # A cluster that nobody tells about may hold anything: 1, so that a hole counts as missing.
    counts = torch.stack([s.counts if s else torch.ones(max(num_classes, 1)) for s in shards])
    router_file = folder / "router.safetensors"
    if router_name is None:
        router_name = "gaussian" if any(shards) else "prior"
        router_name = "learned" if router_file.exists() and prints else router_name
    match router_name:
        case "learned":
            router, counts, metadata = load_router(router_file, device)
            if prints and metadata["fingerprint"] not in prints:
                raise ValueError(
                    f"{router_file} was trained for another partition than the experts"
                )
            if len(counts) < len(shards):
                raise ValueError(
                    f"{router_file} knows {len(counts)} clusters and there is an expert for "
                    f"cluster {len(shards) - 1}: train the router again, or use --router gaussian"
                )
        case "gaussian":
            router = gaussian_router(shards, num_classes)
        case "prior":
            router = prior_router(counts.to(device), num_classes)
    return Run(experts, router, router_name, counts.to(device))


def shard_stats(experts: list[Expert]) -> list:
    """Statistics of cluster 0, 1, ...; None where no expert has them; one entry for "all"."""
    by_cluster = {expert.cluster: expert.stats for expert in experts if expert.cluster != "all"}
    by_cluster = by_cluster or {0: experts[0].stats}
    return [by_cluster.get(k) for k in range(max(by_cluster) + 1)]


def choose_labels(
    label: str | None, num: int, class_names: list[str], counts: Tensor | None = None
) -> Tensor:
    """The class of each image, sorted: one class, or all in equal shares (None), [num].

    counts [K, C]: classes without a single image get no share. "none" is the null class. Raises
    ValueError, with the valid names, for an unknown class.
    """
    null_label = len(class_names)
    if label == "none" or (label is None and not class_names):
        return torch.full((num,), null_label)
    if label is None:
        known = torch.arange(null_label)
        if counts is not None:
            known = counts.sum(0).nonzero()[:, 0].cpu()
        return known[torch.arange(num) % len(known)].sort().values
    if label in class_names:
        index = class_names.index(label)
    elif label.isdecimal() and int(label) < null_label:
        index = int(label)
    else:
        raise ValueError(
            f"there is no class {label!r}: the experts know {', '.join(class_names) or 'none'}"
        )
    print(f"label {index} is class {class_names[index]!r}")
    return torch.full((num,), index)


def check_out(out: Path, latents: bool) -> None:
    """Raise ValueError or OSError now, and not after sampling, if `out` cannot hold the samples."""
    if latents and out.suffix != ".npz":
        raise ValueError(
            f"the experts draw latents, not pictures: use --out samples.npz, not {out}"
        )
    if out.suffix not in ("", ".png", ".npz"):
        raise ValueError(f"--out {out}: use a .png file, an .npz file, or a folder without suffix")
    if out.suffix and out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file, or a folder without suffix")
    if not out.suffix and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out.resolve()} is not empty: use a new folder")
    check_writable(out.parent if out.suffix else out)


def write_samples(
    out: Path, x: Tensor, labels: Tensor, class_names: list[str], latents: bool
) -> None:
    """Write x [N, C, H, W] as a .png grid, as .npz (arr_0, arr_1), or into a folder of pictures."""
    images = x if latents else to_uint8(x)
    names = [*class_names, "any class"] if class_names else ["" for _ in range(1)]
    if out.suffix == ".npz":
        arrays = {"arr_0": images.numpy() if latents else images.permute(0, 2, 3, 1).numpy()}
        if class_names:
            arrays["arr_1"] = labels.numpy()
        with replacing(out) as temporary:
            np.savez(temporary, **arrays)
    elif out.suffix == ".png":
        from ddm_min.figures import sample_grid  # here, because matplotlib takes half a second

        sample_grid(images, labels, names, out)
    else:
        for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            write_image(image, out / names[label] / f"{index:06d}.png")
    print(f"wrote {len(images)} images to {out}")
