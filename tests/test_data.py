"""Datasets by name: real files in, uint8 tensors out, and one sentence where that is impossible."""

import io
import mmap
import os
import pickle
import struct
import sys
import threading
import urllib.error
import urllib.request
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import train_expert
from ddm_min import data, partition, router
from ddm_min.data import Dataset, load, to_float, to_uint8
from ddm_min.router import ShardStats
from ddm_min.training import draw_batch


def picture(seed: int = 0, size: tuple[int, int] = (12, 8)) -> np.ndarray:
    """Random uint8 [H, W, 3] of `size` (W, H), as Pillow gives sizes."""
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def save(file, array=None, mode: str = "RGB", **options) -> None:
    """Write a picture, making its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture() if array is None else array).convert(mode).save(file, **options)


def everything(dataset: Dataset) -> Tensor:
    """The images of a dataset, wherever they lie, as a tensor."""
    return dataset.images[torch.arange(len(dataset))]


def class_folders(root, names, per_class: int = 2):
    """PNG pictures that are all different; returns {(name, index): array}."""
    made = {}
    for c, name in enumerate(names):
        for i in range(per_class):
            made[name, i] = picture(100 * c + i)
            save(root / name / f"{i}.png", made[name, i])
    return made


# ---------------------------------------------------------------- digits, values, names


def test_digits_are_the_real_ones():
    from sklearn.datasets import load_digits

    digits, original = load("digits"), load_digits()
    assert digits.images.shape == (1797, 1, 8, 8)
    assert digits.images.dtype == torch.uint8
    assert digits.class_names == [str(i) for i in range(10)]
    assert digits.num_classes == 10
    assert np.array_equal(digits.labels.numpy(), original.target)
    assert digits.images.min() == 0
    assert digits.images.max() == 255
    # 17 gray levels stretched to 0..255: back within half a level
    assert np.abs(digits.images[:, 0].numpy() * (16 / 255) - original.images).max() < 0.5 * 16 / 255


@pytest.mark.parametrize("name", ["", "digit", "digits:here", "folder:", "npz:", "mnist", "Digits"])
def test_unknown_names_are_refused_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"unknown dataset .* use digits, cifar10") as error:
        load(name)
    assert repr(name) in str(error.value)


def test_D9_values_outside_the_range_are_clamped_not_wrapped():
    bytes_ = to_uint8(torch.tensor([-1.2, -1, 0, 1, 1.2, -9, 9]))
    assert bytes_.dtype == torch.uint8
    assert bytes_.tolist() in ([0, 0, 127, 255, 255, 0, 255], [0, 0, 128, 255, 255, 0, 255])


def test_every_byte_survives_the_model_range():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(to_float(every)), every)
    assert to_float(every).min() == -1
    assert to_float(every).max() == 1


def test_latents_pass_through():
    latents = torch.randn(3, 4, 2, 5) * 7
    assert to_float(latents) is latents


# ---------------------------------------------------------------- folders


def test_folder_of_classes_gives_the_files_in_order(tmp_path):
    made = class_folders(tmp_path, ["dog", "cat", "zebra"])
    dataset = load(f"folder:{tmp_path}")
    assert dataset.class_names == ["cat", "dog", "zebra"]
    assert dataset.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.images.shape == (6, 3, 8, 12)
    expected = [made[name, i] for name in dataset.class_names for i in range(2)]
    assert np.array_equal(dataset.images.numpy(), np.stack(expected).transpose(0, 3, 1, 2))


def test_folder_without_classes_is_unconditional(tmp_path):
    for i in range(3):
        save(tmp_path / f"{i}.png", picture(i))
    dataset = load(f"folder:{tmp_path}")
    assert dataset.class_names == []
    assert dataset.num_classes == 0
    assert dataset.labels.tolist() == [0, 0, 0]


def test_folder_with_one_class_has_one_class(tmp_path):
    class_folders(tmp_path, ["only"], per_class=3)
    dataset = load(f"folder:{tmp_path}")
    assert (dataset.class_names, dataset.num_classes) == (["only"], 1)


def test_A1_sixteen_bit_png_is_scaled(tmp_path):
    ramp = np.linspace(0, 65535, 8 * 12).reshape(8, 12).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "a16.png")
    save(tmp_path / "b8.png", np.round(ramp / 257).astype(np.uint8))
    images = load(f"folder:{tmp_path}").images.int()
    assert images.shape == (2, 3, 8, 12)
    assert (images[0] - images[1]).abs().max() <= 1
    assert images[0].float().mean() == pytest.approx(127.5, abs=1)  # not nearly white


def test_A1_sixteen_bit_tiff_in_both_byte_orders(tmp_path):
    ramp = np.linspace(0, 65535, 8 * 12).reshape(8, 12)
    for name, dtype in (("little", "<u2"), ("big", ">u2")):
        raw = ramp.astype(dtype).tobytes()
        mode = "I;16" if dtype == "<u2" else "I;16B"
        Image.frombytes(mode, (12, 8), raw).save(tmp_path / f"{name}.tif")
    images = load(f"folder:{tmp_path}").images.int()
    expected = torch.from_numpy(np.round(ramp / 257)).int()
    assert (images - expected).abs().max() <= 1


def damaged_folder(root):
    """Eight good images and the three kinds of bad ones."""
    class_folders(root, ["a", "b"], per_class=4)
    (root / "a" / "empty.jpg").write_bytes(b"")
    whole = (root / "a" / "0.png").read_bytes()
    (root / "b" / "half.png").write_bytes(whole[: len(whole) // 2])
    (root / "b" / "text.png").write_text("this is no picture\n")


def test_A2_damaged_files_are_listed_by_name_before_anything_else(tmp_path):
    damaged_folder(tmp_path)
    with pytest.raises(ValueError, match="cannot read 3 of 11 pictures") as error:
        load(f"folder:{tmp_path}")
    for name in ("a/empty.jpg", "b/half.png", "b/text.png"):
        assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize("suffix", ["jpg", "gif", "webp", "bmp", "tif", "png"])
def test_A2_a_picture_cut_anywhere_is_read_or_named(tmp_path, suffix):
    file = tmp_path / f"x.{suffix}"
    save(file, picture(size=(24, 16)))
    whole = file.read_bytes()
    for length in np.linspace(0, len(whole) - 1, 12).astype(int):
        file.write_bytes(whole[:length])
        try:
            assert load(f"folder:{tmp_path}").images.shape == (1, 3, 16, 24)
        except ValueError as error:
            assert str(file) in str(error)


def test_A3_every_colour_mode_gives_three_channels(tmp_path):
    gray = picture()[:, :, 0]
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        save(tmp_path / f"{mode}.png", gray, mode)
    save(tmp_path / "CMYK.jpg", gray, "CMYK", quality=95)
    images = load(f"folder:{tmp_path}").images
    assert images.shape == (7, 3, 8, 12)
    assert images.dtype == torch.uint8
    names = sorted(file.name for file in tmp_path.iterdir())
    for name, image in zip(names, images.numpy(), strict=True):
        if name in ("L.png", "LA.png", "P.png", "RGB.png", "RGBA.png"):
            # a palette of 256 colours holds these grays exactly or to a few levels
            assert np.abs(image.astype(int) - gray).max() <= (8 if name == "P.png" else 0), name
        assert np.array_equal(image[0], image[1]) or name == "CMYK.jpg"


def test_A3_transparent_pixels_keep_their_colour(tmp_path):
    rgba = np.dstack([picture(), np.zeros((8, 12), dtype=np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "x.png")
    assert np.array_equal(load(f"folder:{tmp_path}").images[0].permute(1, 2, 0), picture())


def test_A4_hidden_folders_and_files_are_no_classes_and_no_pictures(tmp_path):
    made = class_folders(tmp_path, ["cat", "dog"])
    save(tmp_path / ".ipynb_checkpoints" / "0.png")
    save(tmp_path / "cat" / ".thumbnails" / "0.png")
    save(tmp_path / "dog" / "._1.png")
    dataset = load(f"folder:{tmp_path}")
    assert dataset.class_names == ["cat", "dog"]
    assert dataset.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(dataset.images[2].permute(1, 2, 0), made["dog", 0])


def test_a_dataset_below_a_hidden_folder_is_found(tmp_path):
    class_folders(tmp_path / ".cache" / "photos", ["cat", "dog"])
    assert len(load(f"folder:{tmp_path / '.cache' / 'photos'}")) == 4


def test_A5_numeric_folders_keep_their_names(tmp_path):
    made = class_folders(tmp_path, ["1", "2", "10"], per_class=1)
    dataset = load(f"folder:{tmp_path}")
    assert sorted(dataset.class_names) == sorted(["1", "2", "10"])
    for label, image in zip(dataset.labels.tolist(), dataset.images, strict=True):
        assert np.array_equal(image.permute(1, 2, 0), made[dataset.class_names[label], 0])


def test_exif_rotation_is_applied(tmp_path):
    upright = np.zeros((12, 8, 3), dtype=np.uint8)
    upright[:3] = 255  # white at the top
    exif = Image.Exif()
    exif[274] = 6  # stored turned: rotate by 90 degrees clockwise to view
    stored = Image.fromarray(np.rot90(upright, 1).copy())
    stored.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(load(f"folder:{tmp_path}").images[0].permute(1, 2, 0), upright)


def test_F3_mixed_sizes_are_refused_with_both_files(tmp_path):
    save(tmp_path / "a.png", picture(size=(32, 32)))
    save(tmp_path / "b.png", picture(size=(40, 28)))
    with pytest.raises(ValueError, match=r"b\.png is 40 x 28 and .*a\.png is 32 x 32"):
        load(f"folder:{tmp_path}")


def test_files_that_are_no_pictures_are_passed_over(tmp_path):
    class_folders(tmp_path, ["a"])
    (tmp_path / "a" / "notes.txt").write_text("hello")
    (tmp_path / "README.md").write_text("hello")
    assert len(load(f"folder:{tmp_path}")) == 2


def test_pictures_in_nested_folders_belong_to_the_outer_class(tmp_path):
    class_folders(tmp_path, ["a", "b"])
    save(tmp_path / "a" / "deep" / "er" / "x.JPG")
    assert load(f"folder:{tmp_path}").labels.tolist() == [0, 0, 0, 1, 1]


def test_F4_each_way_of_finding_nothing_has_its_own_message(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*missing"):
        load(f"folder:{tmp_path / 'missing'}")
    with pytest.raises(ValueError, match="there are no pictures in"):
        load(f"folder:{tmp_path}")
    class_folders(tmp_path, ["full"])
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"there are no pictures in .*void"):
        load(f"folder:{tmp_path}")
    file = tmp_path / "full" / "0.png"
    with pytest.raises(ValueError, match=r"there is no folder .*0\.png"):
        load(f"folder:{file}")


# ---------------------------------------------------------------- npz


def test_npz_of_pictures_and_of_latents_round_trip(tmp_path):
    file = tmp_path / "x.npz"
    pictures = np.random.default_rng(0).integers(0, 256, (5, 8, 12, 3), dtype=np.uint8)
    np.savez(file, arr_0=pictures, arr_1=np.array([2, 0, 1, 2, 2]))
    dataset = load(f"npz:{file}")
    assert np.array_equal(dataset.images.numpy(), pictures.transpose(0, 3, 1, 2))
    assert dataset.images.is_contiguous()
    assert dataset.labels.tolist() == [2, 0, 1, 2, 2]
    assert dataset.class_names == ["0", "1", "2"]

    latents = np.random.default_rng(1).standard_normal((5, 4, 2, 3)).astype(np.float32)
    np.savez(file, arr_0=latents)
    dataset = load(f"npz:{file}")
    assert np.array_equal(dataset.images.numpy(), latents)
    assert dataset.num_classes == 0


GOOD = np.zeros((4, 2, 3, 1), dtype=np.uint8)
WRONG = {
    "no arr_0": dict(other=GOOD),
    "three axes": dict(arr_0=GOOD[0]),
    "float64": dict(arr_0=GOOD.astype(np.float64)),
    "no images": dict(arr_0=GOOD[:0]),
    "no pixels": dict(arr_0=GOOD[:, :0]),
    "nan": dict(arr_0=np.full((4, 1, 2, 3), np.nan, dtype=np.float32)),
    "pickled": dict(arr_0=np.array([{}, {}], dtype=object)),
    "too few labels": dict(arr_0=GOOD, arr_1=np.zeros(3, dtype=np.int64)),
    "two axes of labels": dict(arr_0=GOOD, arr_1=np.zeros((4, 1), dtype=np.int64)),
    "float labels": dict(arr_0=GOOD, arr_1=np.zeros(4)),
    "negative label": dict(arr_0=GOOD, arr_1=np.array([0, -1, 0, 0])),
    "absurd label": dict(arr_0=GOOD, arr_1=np.array([0, 2**40, 0, 0])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_npz_is_refused_by_name(tmp_path, wrong):
    file = tmp_path / "x.npz"
    np.savez(file, **WRONG[wrong])
    with pytest.raises(ValueError, match=r"x\.npz") as error:
        load(f"npz:{file}")
    assert "\n" not in str(error.value)


def test_truncated_npz_is_refused_by_name(tmp_path):
    file = tmp_path / "x.npz"
    np.savez_compressed(file, arr_0=np.random.default_rng(0).integers(0, 9, (4, 2, 3, 1), "uint8"))
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"x\.npz is not a complete npz file"):
            load(f"npz:{file}")


def test_missing_npz_is_named_with_its_full_path(tmp_path):
    with pytest.raises(ValueError, match=f"there is no file {tmp_path}/x.npz"):
        load(f"npz:{tmp_path / 'x.npz'}")


def test_other_files_are_no_npz(tmp_path):
    np.save(tmp_path / "x.npy", GOOD)
    (tmp_path / "x.txt").write_text("hello")
    for name in ("x.npy", "x.txt", "."):
        with pytest.raises(ValueError, match="is not a complete npz file"):
            load(f"npz:{tmp_path / name}")


# ---------------------------------------------------------------- fingerprint, batches


def small(num: int = 5) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, 2, 4), generator=generator).to(torch.uint8)
    return Dataset(images, torch.arange(num) % 2, ["a", "b"])


def test_fingerprint_is_that_of_the_data():
    assert small().fingerprint() == small().fingerprint()
    changed = [small() for _ in range(3)]
    changed[0].images[4, 2, 1, 3] ^= 1
    changed[1].labels[3] = 0
    changed[2].images = changed[2].images.reshape(5, 3, 4, 2)
    prints = {dataset.fingerprint() for dataset in (*changed, small(), small(num=6))}
    assert len(prints) == 5
    assert all(len(text) == 64 for text in prints)


def test_fingerprint_of_many_images_sees_first_last_and_every_label():
    dataset = small(1000)
    before = dataset.fingerprint()
    for row in (0, 999):
        dataset.images[row, 0, 0, 0] ^= 1
        assert dataset.fingerprint() != before
        dataset.images[row, 0, 0, 0] ^= 1
    dataset.labels[501] ^= 1
    assert dataset.fingerprint() != before


def test_subset_keeps_class_numbers():
    subset = small().subset(torch.tensor([3, 1]))
    assert subset.labels.tolist() == [1, 1]
    assert subset.class_names == ["a", "b"]
    assert torch.equal(subset.images[0], small().images[3])


def test_A7_fewer_images_than_the_batch_are_drawn_more_than_once():
    x0, labels, rows = draw_batch(small(5), 8, np.random.default_rng(0))
    assert x0.shape == (8, 3, 2, 4)
    assert torch.equal(labels, small(5).labels[rows])
    assert torch.equal(x0, to_float(small(5).images[rows]))


# ---------------------------------------------------------------- CIFAR-10 without a network


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_A6_cifar10_in_an_empty_folder_without_a_network(tmp_path, no_network):
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz .*or use folder:DIR") as error:
        load(f"cifar10:{tmp_path}")
    assert str(tmp_path) in str(error.value)
    assert "no network in tests" in str(error.value)


def test_A6_a_cut_cifar10_archive_without_a_network(tmp_path, no_network):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(ValueError, match="CIFAR-10 is not complete in"):
        load(f"cifar10:{tmp_path}")


def test_A6_a_folder_of_pictures_needs_no_network(tmp_path, no_network):
    class_folders(tmp_path, ["a"])
    assert len(load(f"folder:{tmp_path}")) == 2


def test_a_png_that_claims_to_be_huge_is_named(tmp_path):
    """A decompression bomb: a header of 60,000 x 60,000 pixels over nothing."""
    buffer = io.BytesIO()
    Image.fromarray(picture()).save(buffer, "png")
    raw = bytearray(buffer.getvalue())
    raw[16:24] = struct.pack(">II", 60_000, 60_000)
    raw[29:33] = struct.pack(">I", zlib.crc32(bytes(raw[12:29])))
    (tmp_path / "bomb.png").write_bytes(bytes(raw))
    with pytest.raises(ValueError, match=r"bomb\.png"):
        load(f"folder:{tmp_path}")


def test_names_are_those_of_the_error_message():
    for name in ("digits", "cifar10", "imagenet64", "imagenet32", "folder", "npz"):
        assert name in data.NAMES


# ---------------------------------------------------------------- sizes


def reference(array: np.ndarray, size: int) -> np.ndarray:
    """The short side to `size` by Pillow, then the middle: [size, size, 3]."""
    height, width = array.shape[:2]
    scale = size / min(height, width)
    resized = Image.fromarray(array).resize((round(width * scale), round(height * scale)))
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def test_squares_are_resized_as_pillow_does(tmp_path):
    for name, side in (("a", 48), ("b", 30), ("c", 9)):  # larger, and smaller than asked for
        save(tmp_path / f"{name}.png", picture(side, (side, side)))
    dataset = load(f"folder:{tmp_path}", 16)
    assert dataset.images.shape == (3, 3, 16, 16)
    for image, side in zip(dataset.images, (48, 30, 9), strict=True):
        assert np.array_equal(image.permute(1, 2, 0), reference(picture(side, (side, side)), 16))


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (33, 100)], ids=str)
def test_F3_photos_are_cropped_to_their_middle_square(tmp_path, size):
    smooth = np.asarray(Image.fromarray(picture(1, (6, 5))).resize(size, Image.Resampling.BICUBIC))
    save(tmp_path / "a.png", smooth)
    image = load(f"folder:{tmp_path}", 16).images[0].permute(1, 2, 0).numpy().astype(int)
    error = np.abs(image - reference(smooth, 16))
    assert error.mean() < 4  # of 255: the crop may lie half a pixel elsewhere
    assert np.abs(image - np.roll(reference(smooth, 16), 4, (0, 1))).mean() > 20  # not the corner


def test_fine_stripes_are_averaged_away_not_aliased(tmp_path):
    stripes = np.zeros((128, 128, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    save(tmp_path / "a.png", stripes)
    image = load(f"folder:{tmp_path}", 32).images.int()
    assert (image - 127)[..., 1:-1].abs().max() <= 2  # at the rim the filter has fewer stripes


def test_F3_mixed_sizes_become_one(tmp_path):
    for name, size in (("a", (32, 32)), ("b", (40, 28)), ("c", (64, 64))):
        save(tmp_path / f"{name}.png", picture(size=size))
    with pytest.raises(ValueError, match="use --image-size"):
        load(f"folder:{tmp_path}")
    assert load(f"folder:{tmp_path}", 32).images.shape == (3, 3, 32, 32)


@pytest.mark.parametrize("name", ["digits", "npz:x.npz", "cifar10", "imagenet64:x"])
def test_only_folders_are_resized(name):
    with pytest.raises(
        ValueError, match=r"--image-size resizes folder:DIR only: .*size of its own"
    ):
        load(name, 16)


# ---------------------------------------------------------------- archives of ImageNet


def pixels_of(number: int, size: int = 4, num: int = 6) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (num, 3 * size**2), dtype=np.uint8)


def write_archive(file, number: int, protocol: int | None = 4, **changes) -> None:
    """One archive in the official layout, pickled or (protocol None) as .npz."""
    stored = {"data": pixels_of(number), "labels": [1, 1000, 7, 7, 2, number + 1]}
    stored |= {"mean": np.zeros(48)} | changes
    if protocol is None:
        np.savez(f"{file}.npz", **stored)
    else:
        file.write_bytes(pickle.dumps(stored, protocol=protocol))


def write_archives(root, protocol: int | None = 4, **changes) -> None:
    root.mkdir(exist_ok=True)
    for number in range(1, 11):
        write_archive(root / f"train_data_batch_{number}", number, protocol, **changes)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and every folder and archive is large enough for it."""
    monkeypatch.setenv("DDM_MIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "LARGE", -1)
    return tmp_path / "cache"


@pytest.fixture
def small_archives(monkeypatch):
    """4 x 4 pixels instead of 64 x 64, which only cost time."""
    original = data.load_imagenet
    monkeypatch.setattr(data, "load_imagenet", lambda root, size: original(root, size // 16))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5, None])
@pytest.mark.parametrize("where", ["in memory", "converted"])
def test_imagenet_archives_are_read_in_order(tmp_path, request, small_archives, protocol, where):
    if where == "converted":
        request.getfixturevalue("cache")
    write_archives(tmp_path / "in", protocol)
    dataset = load(f"imagenet64:{tmp_path / 'in'}")
    expected = np.concatenate([pixels_of(n).reshape(-1, 3, 4, 4) for n in range(1, 11)])
    assert np.array_equal(everything(dataset), expected)
    assert dataset.labels[:12].tolist() == [0, 999, 6, 6, 1, 1, 0, 999, 6, 6, 1, 2]
    assert dataset.labels.dtype == torch.int64
    assert dataset.num_classes == 1000


def test_the_size_of_an_archive_is_that_of_its_name(tmp_path):
    write_archives(tmp_path, data=pixels_of(0, size=32))
    assert load(f"imagenet32:{tmp_path}").images.shape == (60, 3, 32, 32)
    with pytest.raises(
        ValueError, match=r"cannot read 10 of 10 archives: .*batch_1 \(data must be"
    ):
        load(f"imagenet64:{tmp_path}")


def test_validation_archive_alone(tmp_path, small_archives):
    write_archive(tmp_path / "val_data", 3)
    assert np.array_equal(load(f"imagenet64:{tmp_path}").images.flatten(1).numpy(), pixels_of(3))
    write_archives(tmp_path)  # where both are, training goes first
    assert len(load(f"imagenet64:{tmp_path}")) == 60


def test_missing_archives_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no train_data_batch_1, .*, as pickle or as \.npz"):
        load(f"imagenet64:{tmp_path}")
    write_archives(tmp_path)
    (tmp_path / "train_data_batch_7").unlink()
    with pytest.raises(ValueError, match=r"has no train_data_batch_7, as pickle"):
        load(f"imagenet64:{tmp_path}")


BAD_ARCHIVES = {
    "labels from 0": dict(labels=[0, 1, 2, 3, 4, 5]),
    "label 1001": dict(labels=[1001, 1, 2, 3, 4, 5]),
    "float labels": dict(labels=[1.5, 1, 2, 3, 4, 5]),
    "few labels": dict(labels=[1, 2]),
    "float data": dict(data=pixels_of(0).astype(np.float32)),
    "other size": dict(data=pixels_of(0)[:, :-1]),
    "no array": dict(data="hello"),
    "objects": dict(data=np.array([{}, {}], dtype=object)),
}


@pytest.mark.parametrize("protocol", [4, None])
@pytest.mark.parametrize("bad", BAD_ARCHIVES)
def test_wrong_archives_are_refused_by_name(tmp_path, small_archives, bad, protocol):
    write_archives(tmp_path)
    (tmp_path / "train_data_batch_4").unlink()
    write_archive(tmp_path / "train_data_batch_4", 4, protocol, **BAD_ARCHIVES[bad])
    with pytest.raises(ValueError, match=r"cannot read 1 of 10 archives: .*batch_4") as error:
        load(f"imagenet64:{tmp_path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size, together", [(2**30, 1), (2**29, 2)])
def test_large_archives_are_read_one_at_a_time(tmp_path, size, together):
    """Files of holes, of which nothing is read; small ones wait for each other or would hang."""
    files = [tmp_path / str(number) for number in range(4)]
    for file in files:
        file.touch()
        os.truncate(file, size)
    reading, most, meet = [], [], threading.Barrier(together, timeout=30)

    def read(file):
        reading.append(file)
        meet.wait()
        most.append(len(reading))
        meet.wait()
        reading.remove(file)
        return np.full((1, 3, 2, 2), int(file.name), np.uint8), [int(file.name)]

    shape, labels = data.read_all(files, read, "archives", io.BytesIO())
    assert (shape, labels, max(most)) == ([4, 3, 2, 2], [0, 1, 2, 3], together)


def test_an_error_without_words_is_named(tmp_path):
    def read(file):
        raise MemoryError

    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match=r"cannot read 1 of 1 archives: .*a \(MemoryError\)"):
        data.read_all([tmp_path / "a"], read, "archives", io.BytesIO())


class Malice:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", ["system", "eval", "getattr", "fromfile"])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, small_archives, kind, protocol):
    proof = tmp_path / "was here"
    malice = {
        "system": Malice(os.system, f"touch '{proof}'"),
        "eval": Malice(eval, f"open({str(proof)!r}, 'w')"),
        "getattr": Malice(getattr, "text", "upper"),
        "fromfile": Malice(np.fromfile, "/etc/hostname"),
    }[kind]
    write_archives(tmp_path)
    write_archive(tmp_path / "train_data_batch_2", 2, protocol, mean=malice)
    with pytest.raises(ValueError, match=r"cannot read 1 of 10 .*batch_2 \(.* could run code"):
        load(f"imagenet64:{tmp_path}")
    assert not proof.exists()
    if kind in ("system", "eval"):  # the test would notice
        pickle.loads((tmp_path / "train_data_batch_2").read_bytes())
        assert proof.exists()


def test_archives_cut_or_flipped_end_in_a_sentence_or_whole(tmp_path, small_archives):
    file, rng = tmp_path / "val_data", np.random.default_rng(0)
    write_archive(file, 1)
    whole = file.read_bytes()
    for _ in range(100):
        damaged = bytearray(whole[: rng.choice([len(whole), rng.integers(len(whole))])])
        for place in rng.integers(0, max(min(len(damaged), 200), 1), 2):
            if len(damaged) > place:
                damaged[place] ^= 1 << rng.integers(8)
        file.write_bytes(damaged)
        try:
            assert load(f"imagenet64:{tmp_path}").images.shape[1:] == (3, 4, 4)
        except ValueError as error:
            assert str(file) in str(error)
            assert "\n" not in str(error)


# ---------------------------------------------------------------- converted once, memory-mapped


def files_in(folder) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def test_a_converted_folder_is_the_same_dataset(tmp_path, monkeypatch, request):
    class_folders(tmp_path / "in", ["dog", "cat"], per_class=5)
    name = f"folder:{tmp_path / 'in'}"
    small = load(name)
    cache = request.getfixturevalue("cache")
    before = files_in(tmp_path / "in")
    large = load(name)
    assert torch.equal(everything(large), small.images)
    assert torch.equal(large.labels, small.labels)
    assert large.class_names == small.class_names
    assert large.fingerprint() == small.fingerprint()
    assert files_in(cache) == ["about.npz", "images.raw", "lock"]
    assert files_in(tmp_path / "in") == before  # the source may be read-only

    def read(*args):
        raise AssertionError("read again")

    monkeypatch.setattr(data, "read_image", read)
    assert load(name).fingerprint() == small.fingerprint()


def test_the_conversion_is_announced_with_a_progress_bar(tmp_path, cache, capsys):
    class_folders(tmp_path / "in", ["a"])
    for times in (1, 0):
        load(f"folder:{tmp_path / 'in'}")
        out, err = capsys.readouterr()
        assert out.count("is converted, once, into") == times
        assert ("2/2" in err) == bool(times)


def test_a_changed_source_is_converted_anew(tmp_path, cache):
    class_folders(tmp_path / "in", ["a", "b"])
    name, file = f"folder:{tmp_path / 'in'}", tmp_path / "in" / "a" / "0.png"
    prints = [load(name).fingerprint()]
    content, stat = file.read_bytes(), file.stat()
    save(file, 255 - picture())
    prints.append(load(name).fingerprint())
    file.rename(tmp_path / "in" / "b" / "9.png")
    prints.append(load(name).fingerprint())
    assert load(name, 8).images.shape == (4, 3, 8, 8)  # and so does another size
    (tmp_path / "in" / "b" / "9.png").unlink()
    prints.append(load(name).fingerprint())
    assert len({*prints}) == 4
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load(name).fingerprint() == prints[0]


def test_A2_damaged_pictures_of_a_large_folder_are_listed_and_leave_nothing(tmp_path, cache):
    damaged_folder(tmp_path / "in")
    with pytest.raises(ValueError, match="cannot read 3 of 11 pictures"):
        load(f"folder:{tmp_path / 'in'}")
    assert files_in(cache) == ["lock"]


def test_C7_a_killed_conversion_is_not_taken_for_whole(tmp_path, cache, monkeypatch):
    """Killed in the middle of the images, and between images and labels."""
    made = class_folders(tmp_path / "in", ["a"], per_class=6)
    for place in ("read_image", "savez"):
        with monkeypatch.context() as patch:
            original, calls = data.read_image, []

            def read(*args, original=original, calls=calls):
                calls.append(1)
                return os._exit(7) if len(calls) == 4 else original(*args)

            if place == "read_image":
                patch.setattr(data, "read_image", read)
            else:
                patch.setattr(np, "savez", lambda *args, **kwargs: os._exit(7))
            if (child := os.fork()) == 0:
                load(f"folder:{tmp_path / 'in'}")
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert "about.npz" not in files_in(cache)
    dataset = load(f"folder:{tmp_path / 'in'}")
    expected = np.stack([made["a", i] for i in range(6)]).transpose(0, 3, 1, 2)
    assert np.array_equal(everything(dataset), expected)
    assert files_in(cache) == ["about.npz", "images.raw", "lock"]


def test_processes_that_start_together_convert_once(tmp_path, cache):
    class_folders(tmp_path / "in", ["a", "b"], per_class=20)
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            whole = len(load(f"folder:{tmp_path / 'in'}")) == 40
            os._exit(0 if whole else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0, 0, 0]
    assert files_in(cache) == ["about.npz", "images.raw", "lock"]


def test_a_cache_that_cannot_be_written_or_is_damaged_is_named(tmp_path, cache, monkeypatch):
    class_folders(tmp_path / "in", ["a"])
    load(f"folder:{tmp_path / 'in'}")
    pixels = next(cache.rglob("images.raw"))
    pixels.write_bytes(pixels.read_bytes()[:-1])
    with pytest.raises(ValueError, match="does not describe a dataset and may be deleted") as error:
        load(f"folder:{tmp_path / 'in'}")
    assert str(pixels.parent) in str(error.value)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDM_MIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot convert .*let DDM_MIN_CACHE name a folder"):
        load(f"folder:{tmp_path / 'in'}")


def test_a_finished_conversion_is_read_by_who_may_not_write(tmp_path, cache, monkeypatch):
    """Another user's cache: the lock cannot be opened, and nothing needs it."""
    class_folders(tmp_path / "in", ["a"])
    first = load(f"folder:{tmp_path / 'in'}")

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr("filelock.FileLock", refuse)
    assert torch.equal(everything(load(f"folder:{tmp_path / 'in'}")), everything(first))
    class_folders(tmp_path / "new", ["a"])
    with pytest.raises(OSError, match=r"cannot convert .*lock.*let DDM_MIN_CACHE name a folder"):
        load(f"folder:{tmp_path / 'new'}")


def test_a_user_without_a_home_is_told_what_to_do(tmp_path, cache, monkeypatch):
    class_folders(tmp_path / "in", ["a"])
    monkeypatch.delenv("DDM_MIN_CACHE")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(data.Path, "home", home)
    with pytest.raises(OSError, match=r"home directory.*let DDM_MIN_CACHE name a folder"):
        load(f"folder:{tmp_path / 'in'}")


def test_labels_of_another_number_than_images_are_noticed(tmp_path, cache):
    class_folders(tmp_path / "in", ["a"])
    load(f"folder:{tmp_path / 'in'}")
    about = next(cache.rglob("about.npz"))
    with np.load(about) as stored:
        parts = dict(stored)
    np.savez(about, **parts | {"labels": np.zeros(3, int)})
    with pytest.raises(ValueError, match="does not describe a dataset and may be deleted"):
        load(f"folder:{tmp_path / 'in'}")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_names_that_are_long_or_not_unicode_are_names(tmp_path, cache):
    root = tmp_path / ("n" * 250)
    save(root / "a" / "1.png")
    os.rename(root / "a" / "1.png", os.fsencode(root / "a") + b"/caf\xe9.png")
    assert len(load(f"folder:{root}")) == 1


def test_a_shard_of_a_large_dataset_is_not_copied(tmp_path, cache):
    class_folders(tmp_path / "in", ["a", "b"], per_class=10)
    whole = load(f"folder:{tmp_path / 'in'}")
    copied = Dataset(everything(whole), whole.labels, whole.class_names)
    mask = torch.arange(20) % 3 == 1
    shard, expected = whole.subset(mask), copied.images[mask]
    assert shard.images.whole is whole.images  # a list of rows, on the same memory-mapped pages
    assert shard.images.shape == expected.shape
    assert shard.images.dtype == torch.uint8
    assert torch.equal(shard.images[torch.arange(len(shard))], expected)
    assert torch.equal(shard.labels, copied.labels[mask])
    again = shard.subset(torch.tensor([4, 0]))
    assert torch.equal(again.images[torch.tensor([0, 1])], expected[[4, 0]])
    assert shard.num_bytes == expected.nbytes
    rng = [np.random.default_rng(3) for _ in range(2)]
    batches = [draw_batch(x, 8, r) for x, r in zip((shard, copied.subset(mask)), rng, strict=True)]
    assert torch.equal(batches[0][0], batches[1][0])


def test_small_shards_are_tensors():
    assert torch.equal(small().subset(torch.arange(5) > 2).images, small().images[3:])


def test_nothing_is_copied_on_the_cpu_and_what_fits_moves_whole(monkeypatch):
    dataset = small()
    assert dataset.to("cpu") is dataset
    assert dataset.to("cpu:0") is dataset
    moved = dataset.to("meta")  # a device without memory stands for a GPU
    assert (moved.images.device.type, moved.images.shape) == ("meta", dataset.images.shape)
    assert moved.labels.device.type == "meta"


def test_what_does_not_fit_on_a_gpu_goes_batch_by_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 300))
    monkeypatch.setattr(Tensor, "to", lambda self, device: self)
    dataset = small()
    moved = dataset.to("cuda:0")
    assert dataset.num_bytes > 100
    assert moved.images.whole is dataset.images
    assert torch.equal(moved.images[torch.tensor([3, 0])], dataset.images[[3, 0]])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3000, 3000))
    assert torch.equal(dataset.to("cuda:0").images, dataset.images)


def test_statistics_of_a_large_shard_are_exact_but_for_the_covariance(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (400, 1, 2, 3), generator=rng).to(torch.uint8)
    labels = torch.randint(0, 3, (400,), generator=rng)
    whole = ShardStats.measure(to_float(images), labels, 3)
    assert torch.equal(
        ShardStats.measure(images, labels, 3, as_floats=to_float).variances, whole.variances
    )
    monkeypatch.setattr(router, "MEASURED", 150)
    found = ShardStats.measure(images, labels, 3, as_floats=to_float)
    assert torch.equal(found.counts, whole.counts)
    assert torch.allclose(found.means, whole.means, atol=1e-6)
    assert torch.equal(found.value_range, whole.value_range)
    ratio = found.variances.sum() / whole.variances.sum()
    assert 0.8 < ratio < 1.2
    assert ratio != 1


def test_training_on_a_memory_mapped_dataset_writes_the_same_bytes(tmp_path, request):
    """Partition and an expert, once in memory and once memory-mapped, with Rows."""
    class_folders(tmp_path / "in", ["a", "b"], per_class=20)
    written = []
    for where in ("small", "large"):
        if where == "large":
            request.getfixturevalue("cache")
        run = tmp_path / where
        words = f"--data folder:{tmp_path / 'in'} --image-size 8 --run {run}"
        short = "--steps 2 --batch-size 4 --model router --device cpu"
        partition.main(f"{words} --clusters 2 --export {run / 'islands'}".split())
        train_expert.main(f"{words} --cluster 1 {short}".split())
        files = sorted([*run.glob("*.safetensors"), *run.glob("islands/*/*/*.png")])
        assert len(files) == 2 + 40
        written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]


def test_a_converted_island_of_gray_pictures_is_gray(tmp_path, cache):
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "gray.npz", arr_0=images, arr_1=np.arange(30) % 2)
    words = f"--data npz:{tmp_path / 'gray.npz'} --clusters 2 --run {tmp_path}"
    partition.main(f"{words} --export {tmp_path / 'islands'}".split())
    mapped = load(f"folder:{tmp_path / 'islands' / 'cluster_1'}")
    assert isinstance(mapped.images, data.Rows)
    shard, _, _ = partition.exported_shard(mapped, tmp_path / "islands" / "classes.json", "1")
    assert shard.images.whole is mapped.images  # nothing is read before it is asked for
    gray = load(f"npz:{tmp_path / 'gray.npz'}")
    made = partition.Partition.load(tmp_path / "partition.safetensors", gray)
    expected = gray.images[made.assignment == 1]
    assert sorted(everything(shard).flatten(1).tolist()) == sorted(expected.flatten(1).tolist())


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="no madvise here")
def test_a_batch_asks_for_all_its_pages_and_no_others():
    """Of each image every page that it touches, from the start of one: 700 bytes, pages of 4096."""
    whole = torch.arange(40 * 700).reshape(40, 7, 10, 10).to(torch.uint8)
    asked = []

    class File:
        def madvise(self, advice, start, length):
            assert (advice, start % mmap.PAGESIZE) == (mmap.MADV_WILLNEED, 0)
            asked.append((start, start + length))

    rows = data.Rows(whole, torch.arange(0, 40, 2), mapped=File())
    chosen = torch.tensor([[0, 19], [7, 7]])
    assert torch.equal(rows[chosen], whole[2 * chosen])
    for (start, end), row in zip(asked, [0, 38, 14, 14], strict=True):
        assert start <= row * 700 < start + mmap.PAGESIZE
        assert end == (row + 1) * 700
