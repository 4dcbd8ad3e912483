"""Image features, for the partition and for the Frechet distance, and `python -m ddm_min.fid`.

    pixels      the values in [-1, 1], D = C H W
    inception   the 2,048 of FID's InceptionV3, through torch-fidelity, which resizes to 299 x 299
    dinov2      the class token of DINOv2 ViT-B/14, D = 768, through torch.hub, which runs its code
    resnet18    the 512 before the classifier of torchvision's ResNet-18, trained on ImageNet

Networks take pictures of any size and one or three channels. Their weights are downloaded once.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_min import data
from ddm_min.cli import one_sentence_errors, positive
from ddm_min.expert import replacing
from ddm_min.fid import FeatureStats, distance

WEIGHTS = {  # as their downloads are called in torch.hub's folder
    "inception": "weights-inception-2015-12-05-6726825d.pth",
    "dinov2": "dinov2_vitb14_pretrain.pth",
    "resnet18": "resnet18-f37072fd.pth",
}
NAMES = ", ".join(("pixels", *WEIGHTS))


def extract(images: Tensor | data.Rows, name: str, batch_size: int = 256) -> Iterator[Tensor]:
    """Features of images [N, C, H, W] in batches of float [B, D], on the CPU.

    Raises ValueError if the name is unknown, its weights cannot be had, or these are no pictures.
    """
    if name not in ("pixels", *WEIGHTS):
        raise ValueError(f"unknown features {name!r}: use {NAMES}")
    if name != "pixels":
        from torchvision.transforms.functional import normalize

        if images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
            raise ValueError(f"{name} features need pictures, not latents: use pixels")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        network = load_network(name).to(device).eval().requires_grad_(False)
    for rows in torch.arange(len(images)).split(batch_size):
        if name == "pixels":
            yield data.to_float(images[rows]).flatten(1)
            continue
        x = images[rows].to(device).expand(-1, 3, -1, -1)
        if name != "inception":  # which does all this itself
            x = F.interpolate(x / 255, (224, 224), mode="bicubic", antialias=True).clamp(0, 1)
            x = normalize(x, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        found = network(x)
        yield (found[0] if name == "inception" else found).cpu()


def load_network(name: str) -> nn.Module:
    """A network with its weights. Raises ValueError, with what would help, without them."""
    try:
        match name:
            case "inception":
                from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

                return FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
            case "dinov2":
                return torch.hub.load("facebookresearch/dinov2", "dinov2_vitb14", trust_repo=True)
            case "resnet18":
                from torchvision import models

                network = models.resnet18(weights="IMAGENET1K_V1")
                network.fc = nn.Identity()
                return network
    except ModuleNotFoundError as error:
        problem = f"{name} features need {error.name}: pip install it (or .[inception])"
    except Exception as error:  # whatever the download or a damaged cache raises
        problem = (
            f"the {name.capitalize()} weights cannot be had ({' '.join(str(error).split())}): put "
            f"{WEIGHTS[name]} into {torch.hub.get_dir()}/checkpoints"
        )
    raise ValueError(f"{problem}, or use pixels")


def moments(images: Tensor | data.Rows, name: str) -> FeatureStats:
    """Mean and covariance of the features of images [N, C, H, W], in one pass."""
    return FeatureStats.of(extract(images, name))


def read(name: str, image_size: int | None):
    """The images called `name`; or, where it is an .npz file of pytorch-fid's, its mean and cov."""
    if name.endswith(".npz") and ":" not in name:
        with suppress(Exception), np.load(name) as stored:  # data.load says what is wrong with it
            mean, cov = (torch.from_numpy(stored[key]).double() for key in ("mu", "sigma"))
            if cov.shape == 2 * mean.shape and cov.isfinite().all() and mean.isfinite().all():
                return SimpleNamespace(mean=mean, cov=cov, count=None)
        name = f"npz:{name}"
    return data.load(name, image_size if name.startswith("folder:") else None).images


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Print the Frechet distance of A to B, and its floor: one half of B against the other."""
    parser = argparse.ArgumentParser(prog="python -m ddm_min.fid", description=main.__doc__)
    add = parser.add_argument
    add("a", help=f"samples: an .npz file (images, or mu and sigma), or {data.NAMES}")
    add("b", help="the real data, named the same way")
    add("--features", default="pixels", help=f"one of {NAMES}")
    add("--image-size", type=positive, help="what the pictures of folder:DIR are resized to")
    add("--out", type=Path, help="also write the numbers to this JSON file")
    add("--save-stats", type=Path, help="also write mu and sigma of B, as pytorch-fid does")
    args = parser.parse_args(argv)

    a, b = found = [read(name, args.image_size) for name in (args.a, args.b)]
    shapes = ["x".join(map(str, x.shape[1:])) for x in found if hasattr(x, "shape")]
    if args.features == "pixels" and len({*shapes}) == 2:
        raise ValueError(f"{args.a} and {args.b} differ in shape: {' and '.join(shapes)}")
    floor, samples = None, []
    if hasattr(b, "shape"):
        if len(b) < 2:
            raise ValueError(f"{args.b} has a single image: two halves need at least 2 images")
        shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(b)))
        samples = [moments(data.Rows(b, rows), args.features) for rows in shuffled.chunk(2)]
        b, floor = samples[0] + samples[1], distance(*samples)
    if hasattr(a, "shape"):
        a = moments(a, args.features)
        samples.append(a)
    if len(a.mean) != len(b.mean):
        raise ValueError(f"{args.a} has {len(a.mean)} features and {args.b} has {len(b.mean)}")
    result = dict(features=args.features, num_a=a.count, num_b=b.count)
    result |= dict(frechet_distance=distance(a, b), floor=floor)
    sizes = f"{a.count or 'unknown'} and {b.count or 'unknown'} images"
    if any(x.count <= len(a.mean) for x in samples):
        few = f"{sizes} are few for {len(a.mean)} features: the distance is biased upwards"
        print(f"warning: {few}", file=sys.stderr)
    print(f"Frechet distance in {args.features}: {result['frechet_distance']:.3f} ({sizes})")
    if floor is not None:
        print(f"floor, one half of {args.b} against the other: {floor:.3f}")
    if args.features != "inception":
        print("(the features are not Inception's: do not compare this with published FIDs)")
    if args.save_stats:
        with replacing(args.save_stats) as temporary, open(temporary, "wb") as file:
            np.savez(file, mu=b.mean.numpy(), sigma=b.cov.numpy())
    if args.out:
        with replacing(args.out) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")
