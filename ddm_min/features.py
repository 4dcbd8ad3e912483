"""Image features, for the partition and for the Frechet distance, and `python -m ddm_min.fid`."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm_min import data
from ddm_min.cli import one_sentence_errors
from ddm_min.fid import FeatureStats, frechet_distance

FEATURES = ("pixels", "inception")


def extract(images: Tensor, name: str, batch_size: int = 256) -> Iterator[Tensor]:
    """Features of images [N, C, H, W] in batches of float [B, D].

    pixels: the values in [-1, 1], D = C H W. inception: the 2,048 of FID's InceptionV3, through
    torch-fidelity. Raises ValueError if the name is unknown or its weights cannot be had.
    """
    if name == "pixels":
        network = None
    elif name == "inception":
        network = inception()
    else:
        raise ValueError(f"unknown features {name!r}: use {' or '.join(FEATURES)}")
    for batch in images.split(batch_size):
        if network is None:
            yield data.to_float(batch).flatten(1)
        else:
            rgb = batch.expand(-1, 3, -1, -1) if batch.shape[1] == 1 else batch
            with torch.no_grad():
                yield network(rgb)[0]


def inception():
    """FID's network, uint8 [B, 3, H, W] -> ([B, 2048],); it resizes to 299 x 299 itself."""
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError:
        raise ValueError(
            "inception features need torch-fidelity: pip install '.[inception]', or use pixels"
        ) from None
    try:
        return FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    except Exception as error:  # whatever the download or a damaged cache raises
        raise ValueError(
            f"the Inception weights cannot be had ({error}): torch-fidelity downloads "
            f"weights-inception-2015-12-05-6726825d.pth to {torch.hub.get_dir()}/checkpoints; put "
            f"the file there, or use pixels"
        ) from None


def moments(images: Tensor, name: str) -> FeatureStats:
    """Mean and covariance of the features of images [N, C, H, W]."""
    stats = None
    for batch in extract(images, name):
        stats = (stats or FeatureStats(batch.shape[1])).update(batch)
    return stats


def distance(a: FeatureStats, b: FeatureStats) -> float:
    """Frechet distance of two sets of features."""
    return frechet_distance(a.mean, a.cov, b.mean, b.cov)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Print the Frechet distance of A to B, and its floor: one half of B against the other."""
    parser = argparse.ArgumentParser(prog="python -m ddm_min.fid", description=main.__doc__)
    parser.add_argument("a", help=f"samples: an .npz file, or {data.NAMES}")
    parser.add_argument("b", help="the real data, named the same way")
    parser.add_argument("--features", default="pixels", help=f"one of {', '.join(FEATURES)}")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    args = parser.parse_args(argv)

    images = []
    for name in (args.a, args.b):
        images.append(
            data.load(f"npz:{name}" if name.endswith(".npz") and ":" not in name else name).images
        )
    if images[0].shape[1:] != images[1].shape[1:]:
        sizes = " and ".join("x".join(map(str, x.shape[1:])) for x in images)
        raise ValueError(f"the images of {args.a} and {args.b} differ in shape: {sizes}")
    if len(images[1]) < 2:
        raise ValueError(f"{args.b} has a single image: two halves of it need at least 2 images")
    a, b = (moments(x, args.features) for x in images)
    shuffled = images[1][torch.from_numpy(np.random.default_rng(0).permutation(len(images[1])))]
    half_a, half_b = (moments(half, args.features) for half in shuffled.chunk(2))
    result = {
        "features": args.features,
        "num_a": a.count,
        "num_b": b.count,
        "frechet_distance": distance(a, b),
        "floor": distance(half_a, half_b),
    }
    if min(half_a.count, a.count) <= len(a.mean):
        print(
            f"warning: {a.count} and {b.count} images are few for {len(a.mean)} features: the "
            "distance is biased upwards",
            file=sys.stderr,
        )
    print(
        f"Frechet distance in {args.features}: {result['frechet_distance']:.3f} "
        f"({a.count} against {b.count} images)"
    )
    print(f"floor, one half of {args.b} against the other: {result['floor']:.3f}")
    if args.features != "inception":
        print("(the features are not Inception's: do not compare this with published FIDs)")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
