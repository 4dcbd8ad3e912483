"""From the name of a dataset to images and labels; everything else in the repository reads this.

    digits            1,797 real handwritten digits, 8 x 8, shipped inside scikit-learn
    cifar10[:DIR]     CIFAR-10 through torchvision, downloaded to DIR if it is not there
    imagenet64:DIR    the official downsampled ImageNet: train_data_batch_1 to 10, else val_data,
                      each a pickle or an .npz; imagenet32:DIR is the same at 32 x 32
    folder:DIR        pictures in class folders, or directly in DIR (then without classes)
    npz:FILE          arr_0 uint8 [N, H, W, C] or float32 latents [N, C, H, W], arr_1 labels [N]

Images are uint8 [N, C, H, W] and become floats in [-1, 1] batch by batch; latents stay as they are.

A folder or archives of more than LARGE bytes are converted once, and read memory-mapped from then
on: $DDM_MIN_CACHE (or ~/.cache/ddm_min)/NAME-KEY holds images.raw and about.npz, where KEY is the
SHA-256 of kind, image size, and name, size and modification time of every source file. Change one
of these, and the next `load` converts anew; delete the folder whenever you like.
"""

import hashlib
import io
import math
import mmap
import os
import pickle
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from ddm_min.expert import described_by, replacing

NAMES = "digits, cifar10[:DIR], imagenet64:DIR, imagenet32:DIR, folder:DIR or npz:FILE"
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
MOST_CLASSES = 100_000  # a label beyond this is no label but damage
LARGE = 2**28  # bytes: files beyond this are converted, images beyond this are not copied
ARRAYS = re.compile(  # what a pickle may name: enough to build arrays, not enough to run code
    r"numpy\.(ndarray|dtype)|numpy\._?core\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\._?core\.numeric\._frombuffer|_codecs\.encode"
)


class Rows:
    """Chosen rows of large images, which stay where they are: rows[indices] reads one batch.

    whole: Tensor or Rows [M, C, H, W]; index: int64 [N], rows of `whole`; device: where batches are
    brought; mapped: the memory-mapped file under `whole`, or None; channels: the first so many of
    C, or None for all. Only tensors index it.
    """

    def __init__(self, whole, index: Tensor, device="cpu", mapped=None, channels=None):
        self.whole, self.index, self.device, self.mapped = whole, index, device, mapped
        self.shape = torch.Size((len(index), channels or whole.shape[1], *whole.shape[2:]))
        self.dtype = whole.dtype

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Tensor) -> Tensor:
        index = self.index[rows.cpu()]
        if self.mapped and hasattr(mmap, "MADV_WILLNEED"):
            # Asked for all at once, and no more than that: a page that is missed when it is read
            # brings up to megabytes of its neighbours along, and the next image waits for them.
            size = math.prod(self.whole.shape[1:])  # bytes: what is mapped is uint8
            for start in (index.flatten() * size).tolist():
                page = start - start % mmap.PAGESIZE
                self.mapped.madvise(mmap.MADV_WILLNEED, page, start + size - page)
        return self.whole[index][..., : self.shape[1], :, :].to(self.device)


@dataclass
class Dataset:
    """images uint8 or float32 [N, C, H, W]; labels int64 [N]; class_names, empty if none."""

    images: Tensor | Rows
    labels: Tensor
    class_names: list[str]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """0 means unconditional; the null class is num_classes."""
        return len(self.class_names)

    @property
    def num_bytes(self) -> int:
        """What the images take in memory, if they are brought there."""
        return math.prod(self.images.shape) * self.images.dtype.itemsize

    def subset(self, rows: Tensor) -> "Dataset":
        """The same classes, fewer images (indices or a mask): a copy, or Rows if it is large."""
        index, copied = torch.arange(len(self))[rows], self.num_bytes <= LARGE
        images = self.images[index] if copied else Rows(self.images, index)
        return Dataset(images, self.labels[index], self.class_names)

    def to(self, device: str) -> "Dataset":
        """On a GPU: whole, if that takes a third of the free memory there, and then a batch is one
        gather; else batch by batch. On the CPU nothing is copied."""
        if torch.device(device).type == "cpu":
            return self
        images = Rows(self.images, torch.arange(len(self)), device)
        free = torch.cuda.mem_get_info(device)[0] if "cuda" in device else math.inf
        if self.num_bytes <= free / 3:
            images = torch.cat([images[rows] for rows in images.index.split(4096)])
        return Dataset(images, self.labels.to(device), self.class_names)

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


def load(name: str, image_size: int | None = None) -> Dataset:
    """Read the dataset called `name`. Raises ValueError or OSError with one sentence that helps.

    image_size: pictures of a folder are resized so that the short side fits, and cropped square.
    """
    kind, _, place = name.partition(":")
    if image_size and kind != "folder":
        raise ValueError(f"--image-size resizes folder:DIR only: {name} has a size of its own")
    match kind:
        case "digits" if not place:
            return load_digits()
        case "cifar10":
            return load_cifar10(Path(place or "data"))
        case "imagenet32" | "imagenet64" if place:
            return load_imagenet(Path(place), int(kind[-2:]))
        case "folder" if place:
            return load_folder(Path(place), image_size)
        case "npz" if place:
            return load_npz(Path(place))
    raise ValueError(f"unknown dataset {name!r}: use {NAMES}")


def load_digits() -> Dataset:
    """scikit-learn's digits: gray levels 0..16 become 0..255; [1797, 1, 8, 8]."""
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = torch.from_numpy(digits.target).long()
    return Dataset(torch.from_numpy(images), labels, list("0123456789"))


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
    images = arrays.get("arr_0", np.empty(0))
    picture = images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] in (1, 3)
    latent = images.dtype == np.float32 and images.ndim == 4 and np.isfinite(images).all()
    if not images.size or not (picture or latent):
        raise ValueError(f"{file}: use uint8 [N, H, W, 1 or 3] or finite float32 [N, C, H, W]")
    images = images.transpose(0, 3, 1, 2) if picture else images
    labels = arrays.get("arr_1", np.zeros(len(images), dtype=np.int64))
    whole = labels.shape == (len(images),) and labels.dtype.kind in "iu"
    if not whole or not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
        raise ValueError(f"{file}: arr_1 is not {len(images)} labels, from 0 to {MOST_CLASSES - 1}")
    names = [str(label) for label in range(int(labels.max()) + 1)] if "arr_1" in arrays else []
    images = torch.from_numpy(np.ascontiguousarray(images))
    return Dataset(images, torch.from_numpy(labels).long(), names)


def read_image(file: Path, image_size: int | None = None) -> np.ndarray:
    """One picture as uint8 [3, H, W]: EXIF rotation applied, any mode made RGB, alpha dropped.

    With image_size: its middle square, brought to this size by an antialiased bicubic filter.
    """
    with Image.open(file) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits per pixel: convert() would clip at 255, not scale
            gray = np.asarray(image, dtype=np.int64) // 257
            image = Image.fromarray(gray.clip(0, 255).astype(np.uint8))
        image = image.convert("RGB")
        if image_size:
            image = ImageOps.fit(image, (image_size, image_size))
        return np.asarray(image).transpose(2, 0, 1)


def write_image(image: Tensor, file: Path) -> None:
    """One picture, uint8 [1 or 3, H, W], in a folder that is made if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(file)


def load_folder(root: Path, image_size: int | None = None) -> Dataset:
    """Pictures below `root`; a class per folder, labels in the names' sorted order.

    Hidden files and folders and files that are no pictures are passed over. Without image_size
    the pictures must be of one size.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root.resolve()}")
    folders = sorted(d for d in root.iterdir() if d.is_dir() and not d.name.startswith("."))
    labels: dict[Path, int] = {}
    for label, folder in enumerate(folders or [root]):
        pictures = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
        found = sorted(x for x in pictures if "/." not in f"/{x.relative_to(root).as_posix()}")
        if not found:
            raise ValueError(f"there are no pictures in {folder.resolve()}")
        labels |= dict.fromkeys(found, label)

    def read(file: Path) -> tuple[np.ndarray, list[int]]:
        """One picture and its label, as `collect` wants them: [1, 3, H, W], [label]."""
        return read_image(file, image_size)[None], [labels[file]]

    return collect(root, list(labels), read, [x.name for x in folders], f"pictures at {image_size}")


class ArrayUnpickler(pickle.Unpickler):
    """Arrays and plain data only. Raises UnpicklingError for anything that could run code."""

    def find_class(self, module: str, name: str):
        """What a name in the pickle stands for, if it is one of ARRAYS."""
        if not ARRAYS.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} in it could run code")
        return super().find_class(module, name)


def read_archive(file: Path, size: int) -> tuple[np.ndarray, list[int]]:
    """(uint8 [N, 3, size, size], labels from 0) of one official archive, whose mean is ignored."""
    with open(file, "rb") as stream:
        pickled = file.suffix != ".npz"
        stored = ArrayUnpickler(stream, encoding="latin1").load() if pickled else np.load(stream)
        pixels, labels = stored["data"], np.asarray(stored["labels"])
    whole = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * size * size)
    if not whole or labels.dtype.kind not in "iu" or not 1 <= labels.min() <= labels.max() <= 1000:
        raise ValueError(f"data must be uint8 [N, {3 * size**2}] and labels whole, from 1 to 1000")
    return pixels.reshape(-1, 3, size, size), (labels.astype(int) - 1).tolist()


def load_imagenet(root: Path, size: int) -> Dataset:
    """The ten training archives of downsampled ImageNet, or else its validation archive."""
    train = [f"train_data_batch_{number}" for number in range(1, 11)]
    places = {stem: (root / stem, root / f"{stem}.npz") for stem in (*train, "val_data")}
    found = {stem: file for stem, pair in places.items() for file in pair if file.is_file()}
    stems = ["val_data"] if [*found] == ["val_data"] else train
    if missing := [stem for stem in stems if stem not in found]:
        raise ValueError(f"{root.resolve()} has no {', '.join(missing)}, as pickle or as .npz")
    files, names = [found[stem] for stem in stems], [str(label) for label in range(1000)]
    return collect(root, files, lambda x: read_archive(x, size), names, f"archives at {size}")


def read_all(files: list[Path], read: Callable, unit: str, sink) -> tuple[list, list]:
    """Write the images of all files to `sink`, in order; returns ([N, C, H, W], labels).

    Threads read, since Pillow, numpy and the disk release Python's lock: at most 256 files at a
    time, of at most 1 GiB together, or a single one (an archive of ImageNet-64 has 1.6 GB, and
    unpickling holds it twice). All files are read, then those that cannot be are named.
    """

    def attempt(file: Path):
        """`read`, or the reason why not as a text."""
        try:
            return read(file)
        except Exception as error:  # a damaged file can make Pillow, pickle, numpy raise anything
            return f"{file} ({str(error) or type(error).__name__})"

    largest = max(1, *(file.stat().st_size for file in files))
    labels, bad, first, window = [], [], None, min(256, max(1, 2**30 // largest))
    with ThreadPoolExecutor() as pool:
        for number, file in enumerate(tqdm(files, unit=unit, disable=isinstance(sink, io.BytesIO))):
            if number % window == 0:
                results = pool.map(attempt, files[number : number + window])
            found = next(results)
            if isinstance(found, str):
                bad.append(found)
                continue
            shape = found[0].shape[1:]
            size = f"{file} is {shape[2]} x {shape[1]}"
            first = first or (shape, size)
            if shape != first[0]:
                raise ValueError(f"{size} and {first[1]}: make all one size, or use --image-size")
            sink.write(np.ascontiguousarray(found[0]))
            labels += found[1]
            del found  # or this archive would stay in memory beside the next
    if bad:
        raise ValueError(f"cannot read {len(bad)} of {len(files)} {unit}: " + "; ".join(bad[:5]))
    return [len(labels), *shape], labels


def collect(root: Path, files: list, read: Callable, names: list[str], kind: str) -> Dataset:
    """The images of all files, by `read` -> (uint8 [n, C, H, W], n labels): small ones in memory,
    large ones from the cache (top of this file), into which they are converted if they are new."""
    key, size, unit = hashlib.sha256(kind.encode()), 0, kind.split()[0]
    for file in files:
        stat = file.stat()
        size += stat.st_size
        key.update(os.fsencode(f"{file.relative_to(root)}\0{stat.st_size} {stat.st_mtime_ns}\0"))
    if size <= LARGE:
        sink = io.BytesIO()
        shape, labels = read_all(files, read, unit, sink)
        images = np.frombuffer(sink.getbuffer(), np.uint8).reshape(shape)
        return Dataset(torch.from_numpy(images), torch.tensor(labels), names)

    try:
        from filelock import FileLock  # here, because it takes a tenth of a second

        cache = Path(os.environ.get("DDM_MIN_CACHE") or Path.home() / ".cache" / "ddm_min")
        folder = cache / f"{root.resolve().name[:100]}-{key.hexdigest()[:16]}"
        pixels, about = folder / "images.raw", folder / "about.npz"
        folder.mkdir(parents=True, exist_ok=True)
        # Of several processes one converts and the others wait; what is there needs no writing.
        with nullcontext() if about.exists() else FileLock(folder / "lock"):
            if not about.exists():  # it is written last
                with replacing(pixels) as temporary, open(temporary, "wb") as sink:
                    shape, labels = read_all(files, read, unit, sink)
                with replacing(about) as temporary:
                    np.savez(temporary, shape=shape, labels=labels, names=np.array(names, str))
                print(f"{root} is converted, once, into {folder}")
    except (OSError, RuntimeError) as error:  # RuntimeError: of a user who has no home
        raise OSError(f"cannot convert {root} ({error}): let DDM_MIN_CACHE name a folder") from None
    with described_by(folder, "a dataset and may be deleted"), np.load(about) as stored:
        shape, labels, names = (stored[x].tolist() for x in ("shape", "labels", "names"))
        with open(pixels, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nobody should write to this tensor
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            images = torch.frombuffer(mapped, dtype=torch.uint8).reshape(len(labels), *shape[1:])
    images = Rows(images, torch.arange(len(labels)), mapped=mapped)
    return Dataset(images, torch.tensor(labels), names)
