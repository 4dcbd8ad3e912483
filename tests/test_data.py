"""Datasets by name: real files in, uint8 tensors out, and one sentence where that is impossible."""

import io
import struct
import urllib.error
import urllib.request
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_min import data
from ddm_min.data import Dataset, load, to_float, to_uint8
from ddm_min.training import draw_batch


def picture(seed: int = 0, size: tuple[int, int] = (12, 8)) -> np.ndarray:
    """Random uint8 [H, W, 3] of `size` (W, H), as Pillow gives sizes."""
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def save(file, array=None, mode: str = "RGB", **options) -> None:
    """Write a picture, making its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture() if array is None else array).convert(mode).save(file, **options)


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
    for name in ("digits", "cifar10", "folder", "npz"):
        assert name in data.NAMES
