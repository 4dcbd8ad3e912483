"""From the name of a dataset to images and labels; everything else in the repository reads this.

    digits            1,797 real handwritten digits, 8 x 8, shipped inside scikit-learn
    cifar10[:DIR]     CIFAR-10 through torchvision, downloaded to DIR if it is not there
    folder:DIR        pictures in class folders, or directly in DIR (then without classes)
    npz:FILE          arr_0 uint8 [N, H, W, C] or float32 latents [N, C, H, W], arr_1 labels [N]

Images are uint8 [N, C, H, W] and become floats in [-1, 1] batch by batch; latents stay as they are.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

NAMES = "digits, cifar10[:DIR], folder:DIR or npz:FILE"
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
MOST_CLASSES = 100_000  # a label beyond this is no label but damage


@dataclass
class Dataset:
    """images uint8 or float32 [N, C, H, W]; labels int64 [N]; class_names, empty if none."""

    images: Tensor
    labels: Tensor
    class_names: list[str]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """0 means unconditional; the null class is num_classes."""
        return len(self.class_names)

    def subset(self, rows: Tensor) -> "Dataset":
        """The same classes, fewer images."""
        return Dataset(self.images[rows], self.labels[rows], self.class_names)

    def to(self, device: str) -> "Dataset":
        """The same, on a device: a batch is then one gather there."""
        return Dataset(self.images.to(device), self.labels.to(device), self.class_names)

    def fingerprint(self) -> str:
        """SHA-256 of shape, labels and 256 images at fixed places: tells datasets apart."""
        rows = torch.linspace(0, len(self) - 1, min(256, len(self))).long()
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.labels.numpy().tobytes())
        digest.update(self.images[rows].contiguous().numpy().tobytes())
        return digest.hexdigest()


def to_float(images: Tensor) -> Tensor:
    """uint8 0..255 -> [-1, 1]; floats (latents) pass through."""
    return images / 127.5 - 1 if images.dtype == torch.uint8 else images


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] -> uint8 0..255, rounded, with anything outside clamped."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def load(name: str) -> Dataset:
    """Read the dataset called `name`. Raises ValueError or OSError with one sentence that helps."""
    kind, _, place = name.partition(":")
    match kind:
        case "digits" if not place:
            return load_digits()
        case "cifar10":
            return load_cifar10(Path(place or "data"))
        case "folder" if place:
            return load_folder(Path(place))
        case "npz" if place:
            return load_npz(Path(place))
    raise ValueError(f"unknown dataset {name!r}: use {NAMES}")


def load_digits() -> Dataset:
    """scikit-learn's digits: gray levels 0..16 become 0..255; [1797, 1, 8, 8]."""
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return Dataset(
        torch.from_numpy(images), torch.from_numpy(digits.target).long(), list("0123456789")
    )


def load_cifar10(root: Path) -> Dataset:
    """The 50,000 training images, [50000, 3, 32, 32]."""
    from torchvision.datasets import CIFAR10

    try:
        cifar = CIFAR10(root, train=True, download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"CIFAR-10 is not complete in {root.resolve()} and cannot be downloaded ({error}): put "
            f"cifar-10-python.tar.gz there yourself (torchvision unpacks it), or use folder:DIR"
        ) from None
    images = torch.from_numpy(cifar.data).permute(0, 3, 1, 2).contiguous()
    return Dataset(images, torch.tensor(cifar.targets), cifar.classes)


def load_npz(file: Path) -> Dataset:
    """The layout of the common evaluation suites; what `sample.py --out samples.npz` writes."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise ValueError(f"there is no file {file.resolve()}") from None
    except Exception as error:  # zipfile, zlib, struct and numpy all raise their own
        raise ValueError(f"{file} is not a complete npz file ({error})") from None
    images = arrays.get("arr_0")
    if (
        images is None
        or images.ndim != 4
        or images.dtype not in (np.uint8, np.float32)
        or not images.size
        or not np.isfinite(images).all()
    ):
        raise ValueError(f"{file}: arr_0 must be uint8 [N, H, W, C] or finite float32 [N, C, H, W]")
    if images.dtype == np.uint8:
        if images.shape[3] not in (1, 3):
            raise ValueError(f"{file}: arr_0 has {images.shape[3]} channels: pictures have 1 or 3")
        images = images.transpose(0, 3, 1, 2)
    labels = arrays.get("arr_1", np.zeros(len(images), dtype=np.int64))
    whole = labels.shape == (len(images),) and labels.dtype.kind in "iu"
    if not whole or not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
        raise ValueError(
            f"{file}: arr_1 must hold {len(images)} labels, integers from 0 to {MOST_CLASSES - 1}"
        )
    num_classes = int(labels.max()) + 1 if "arr_1" in arrays else 0
    names = [str(label) for label in range(num_classes)]
    return Dataset(
        torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels).long(), names
    )


def read_image(file: Path) -> np.ndarray:
    """One picture as uint8 [3, H, W]: EXIF rotation applied, any mode made RGB, alpha dropped."""
    with Image.open(file) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits per pixel: convert() would clip at 255, not scale
            image = Image.fromarray(
                (np.asarray(image, dtype=np.int64) // 257).clip(0, 255).astype(np.uint8)
            )
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def write_image(image: Tensor, file: Path) -> None:
    """One picture, uint8 [1 or 3, H, W], in a folder that is made if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(file)


def load_folder(root: Path) -> Dataset:
    """Pictures of one size below `root`; a class per folder, labels in the names' sorted order.

    Hidden files and folders and files that are no pictures are passed over. Every picture is read
    before anything else happens: one that cannot be read stops here, by name.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root.resolve()}")
    folders = sorted(d for d in root.iterdir() if d.is_dir() and not d.name.startswith("."))
    files, labels = [], []
    for label, folder in enumerate(folders or [root]):
        found = sorted(
            file
            for file in folder.rglob("*")
            if file.suffix.lower() in SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
        )
        if not found:
            raise ValueError(f"there are no pictures in {folder.resolve()}")
        files += found
        labels += [label] * len(found)

    def read(file: Path):
        try:
            return read_image(file)
        except Exception as error:  # a damaged file can make Pillow raise nearly anything
            return f"{file} ({error or type(error).__name__})"

    with ThreadPoolExecutor() as pool:
        images = list(pool.map(read, files))
    bad = [image for image in images if isinstance(image, str)]
    if bad:
        raise ValueError(f"cannot read {len(bad)} of {len(files)} pictures: " + "; ".join(bad[:5]))
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"{file} is {image.shape[2]} x {image.shape[1]} and {files[0]} is "
                f"{images[0].shape[2]} x {images[0].shape[1]}: make all pictures one size"
            )
    names = [folder.name for folder in folders]
    return Dataset(torch.from_numpy(np.stack(images)), torch.tensor(labels), names)
