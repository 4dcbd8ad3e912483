"""What lies in a RUN folder: experts that belong together, a router for them, and samples."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm_min.data import to_uint8, write_image
from ddm_min.ensemble import what_is_lost, whole_clusters
from ddm_min.expert import Expert, check_writable, load_router, replacing
from ddm_min.figures import sample_grid
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

    @property
    def drawable_counts(self) -> Tensor:
        """counts, but zero for clusters that no expert here can draw."""
        whole = whole_clusters(self.experts, len(self.counts))
        return self.counts * torch.tensor(whole, device=self.counts.device)[:, None]


def load_experts(folder: Path, device: str) -> tuple[list[Path], list[Expert]]:
    """All expert files of RUN, which must agree on shape and classes; raises ValueError."""
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
    return files, experts


def load_run(folder: Path, router_name: str | None, device: str) -> Run:
    """Read RUN. router_name None: learned where there is a router file, else gaussian.

    With gaussian or prior, the experts in RUN are the population: one leaves when its file goes,
    and one of another partition joins under a file name that is free, such as
    RUN/expert_new.safetensors, if gaussian or prior is asked for by name. Its cluster gets the next
    number. A learned router knows its K clusters, and what is missing of them is printed.
    Raises ValueError for files that do not belong together, naming two and how they differ.
    """
    files, experts = load_experts(folder, device)
    prints = {expert.fingerprint: file for file, expert in zip(files, experts, strict=True)}
    prints.pop("", None)  # an expert for all clusters knows no partition
    if len(prints) > 1:
        differ = f"{' and '.join(map(str, prints.values()))} come from different partitions"
        if router_name not in ("gaussian", "prior"):
            raise ValueError(f"{differ}, which only --router gaussian or prior can join")
        print(f"warning: {differ}: an image in both counts twice", file=sys.stderr)
        number_guests(experts)

    num_classes = len(experts[0].class_names)
    # What the experts tell about their clusters; experts for all of them are one cluster.
    told = {e.cluster: e.stats for e in experts if e.cluster != "all"} or {0: experts[0].stats}
    router_file = folder / "router.safetensors"
    if router_name is None:
        router_name = "gaussian" if any(told.values()) else "prior"
        router_name = "learned" if router_file.exists() and prints else router_name
    if router_name == "learned":
        router, counts, metadata = load_router(router_file, device)
        if prints and metadata["fingerprint"] not in prints:
            raise ValueError(f"{router_file} was trained for another partition than the experts")
        if len(counts) <= max(told):
            raise ValueError(
                f"{router_file} knows {len(counts)} clusters and there is an expert for cluster "
                f"{max(told)}: train the router again, or use --router gaussian"
            )
        lost = what_is_lost(experts, counts, experts[0].class_names)
        if lost:
            print(f"{lost} (--allow-missing draws the rest, and so does --router gaussian)")
        return Run(experts, router, router_name, counts)

    silent = [str(k) for k, stats in told.items() if stats is None]
    if silent and (len(told) > 1 or router_name == "gaussian"):
        which = f"the expert of cluster {', '.join(silent)} has no statistics of its data"
        raise ValueError(f"{which}, which --router {router_name} needs")
    # A cluster without an expert holds no images here, so that nothing is missing.
    counts = torch.zeros(max(told) + 1, max(num_classes, 1), dtype=torch.long, device=device)
    for k, stats in told.items():
        if stats and len(stats.counts) != counts.shape[1]:
            raise ValueError(f"the expert of cluster {k} counts {len(stats.counts)} classes")
        counts[k] = stats.counts if stats else 1
    if prints:
        here = ", ".join(map(str, sorted(told)))
        print(f"clusters {here} by their expert files: {int(counts.sum()):,} images")
    shards = [told.get(k) for k in range(len(counts))]
    gaussian = router_name == "gaussian"
    router = gaussian_router(shards, num_classes) if gaussian else prior_router(counts, num_classes)
    return Run(experts, router, router_name, counts)


def number_guests(experts: list[Expert]) -> None:
    """Clusters of other partitions than the first expert's get the numbers after its clusters."""
    named = [expert for expert in experts if expert.cluster != "all"]
    home = named[0].fingerprint
    guests = [expert for expert in named if expert.fingerprint != home]
    numbers = list(dict.fromkeys((guest.fingerprint, guest.cluster) for guest in guests))
    first = 1 + max(expert.cluster for expert in named if expert.fingerprint == home)
    for guest in guests:
        guest.cluster = first + numbers.index((guest.fingerprint, guest.cluster))


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
        known = ", ".join(class_names) or "none"
        raise ValueError(f"there is no class {label!r}: the experts know {known}")
    print(f"label {index} is class {class_names[index]!r}")
    return torch.full((num,), index)


def check_out(out: Path, latents: bool) -> None:
    """Raise ValueError or OSError now, and not after sampling, if `out` cannot hold the samples."""
    if latents and out.suffix != ".npz":
        raise ValueError(f"the experts draw latents, no pictures: use --out x.npz, not {out}")
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
    names = [*class_names, "any class"] if class_names else [""]
    if out.suffix == ".npz":
        arrays = {"arr_0": images.numpy() if latents else images.permute(0, 2, 3, 1).numpy()}
        if class_names:
            arrays["arr_1"] = labels.numpy()
        with replacing(out) as temporary:
            np.savez(temporary, **arrays)
    elif out.suffix == ".png":
        sample_grid(images, labels, names, out)
    else:
        for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            write_image(image, out / names[label] / f"{index:06d}.png")
    print(f"wrote {len(images)} images to {out}")
