"""The CNN in whose features benchmarks measure CIFAR-10, on a zip of 120 coloured pictures."""

import itertools
import json
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import cifar_cnn
from ddm_min import data
from ddm_min.expert import read_file

COLORS = {"blue": (40, 60, 200), "green": (60, 190, 50), "red": (200, 50, 40)}
EACH = 40


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """train/CLASS/NNNN.jpg: one colour per class, under noise, out of order."""
    file = tmp_path_factory.mktemp("zip") / "train.zip"
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(file, "w") as archive:
        for number, (name, color) in itertools.product(reversed(range(EACH)), COLORS.items()):
            pixels = (color + rng.normal(0, 25, (32, 32, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(buffer := BytesIO(), "JPEG", quality=95)
            archive.writestr(f"train/{name}/{number:04}.jpg", buffer.getvalue())
    return file


@pytest.fixture(scope="module")
def run(archive, tmp_path_factory):
    """A finished run of two epochs, through the command line."""
    run = tmp_path_factory.mktemp("run")
    words = ["--zip", archive, "--run", run, "--epochs", 2, "--seed", 3]
    cifar_cnn.main([str(word) for word in words])
    return run


def train_for_two_epochs(archive, run):
    train, held = cifar_cnn.prepare(archive, run)
    return cifar_cnn.train_cnn(run, train, held, {"epochs": 2, "seed": 3})


def test_the_parts_are_disjoint_complete_and_named_like_any_dataset(archive, run):
    images, labels = cifar_cnn.read_zip(archive)
    train, held = (data.load(f"npz:{run / name}.npz") for name in ("train", "held"))
    assert held.labels.bincount().tolist() == [EACH // 10] * 3
    assert train.labels.bincount().tolist() == [EACH - EACH // 10] * 3
    parts = np.concatenate([x.images.permute(0, 2, 3, 1).numpy() for x in (train, held)])
    assert sorted(x.tobytes() for x in parts) == sorted(x.tobytes() for x in images)
    for part in (train, held):  # labels follow the names' order: blue, green, red
        means = part.images.double().mean((2, 3))
        nearest = torch.cdist(means, torch.tensor(list(COLORS.values())).double()).argmin(1)
        assert torch.equal(nearest, part.labels)
    assert np.array_equal(labels, np.repeat([0, 1, 2], EACH))


def test_the_report_holds_what_the_files_give(run):
    report = json.loads((run / "cnn.json").read_text())
    train, held = (data.load(f"npz:{run / name}.npz") for name in ("train", "held"))
    file = run / "cnn.safetensors"
    cnn = cifar_cnn.load_cnn(file)
    for name, part in (("train", train), ("held", held)):
        right = (cnn(data.to_float(part.images)).argmax(1) == part.labels).double().mean()
        assert report[f"{name}_accuracy"] == pytest.approx(float(right))
    distances = report["frechet"]
    between = cifar_cnn.frechet(train.images, held.images, file)
    assert distances["train_against_held"] == pytest.approx(between, rel=1e-3)
    assert distances["noise"]["2"] < distances["noise"]["32"]
    with Image.open(run / "cnn.png") as picture:
        assert min(picture.size) > 100


def test_a_second_call_reads_the_parts_and_needs_no_zip(run, tmp_path):
    train, _ = cifar_cnn.prepare(tmp_path / "gone.zip", run)
    assert len(train) == 3 * (EACH - EACH // 10)


def test_it_learns_colours_in_a_few_small_batches(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar_cnn, "BATCH", 16)
    train, held = cifar_cnn.prepare(archive, tmp_path)
    epochs = cifar_cnn.train_cnn(tmp_path, train, held, {"epochs": 5, "seed": 0})
    assert epochs[-1]["held_accuracy"] >= 11 / 12
    assert epochs[-1]["loss"] < 0.3 * epochs[0]["loss"]


def test_features_are_what_the_head_sees_whatever_the_batch(run):
    images = data.load(f"npz:{run / 'train.npz'}").images
    file = run / "cnn.safetensors"
    seen = cifar_cnn.features(images.repeat(6, 1, 1, 1), file)  # more than one batch of it
    cnn = cifar_cnn.load_cnn(file)
    assert seen.shape == (6 * len(images), 128)
    torch.testing.assert_close(cnn.head(seen[-len(images) :]), cnn(data.to_float(images)))


def test_interrupted_after_an_epoch_it_ends_in_the_same_bytes(archive, run, tmp_path, monkeypatch):
    write, calls = cifar_cnn.write_file, []

    def write_once(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cifar_cnn, "write_file", write_once)
    with pytest.raises(KeyboardInterrupt):
        train_for_two_epochs(archive, tmp_path)
    assert read_file(tmp_path / "resume" / "cnn.safetensors", "cnn training")[1]["epochs"]
    monkeypatch.setattr(cifar_cnn, "write_file", lambda *a: (calls.append(a[1]), write(*a)))
    train_for_two_epochs(archive, tmp_path)
    assert calls == ["cnn training", "cnn"], "one epoch was left to do"
    name = "cnn.safetensors"
    assert (tmp_path / name).read_bytes() == (run / name).read_bytes()


def test_other_settings_are_refused(archive, run):
    train, held = cifar_cnn.prepare(archive, run)
    with pytest.raises(ValueError, match=r"'seed': 3.*not.*'seed': 4.*delete it"):
        cifar_cnn.train_cnn(run, train, held, {"epochs": 2, "seed": 4})


def test_an_image_is_moved_by_at_most_two_pixels_reflected_and_mirrored():
    """Every result is one of the 50 that NumPy's reflecting pad allows, and many of them occur."""
    images = torch.randint(0, 256, (200, 3, 5, 6), dtype=torch.uint8)
    moved = cifar_cnn.shift_and_flip(images, np.random.default_rng(0))
    seen = set()
    for image, result in zip(images.numpy(), moved.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)), mode="reflect")
        windows = {
            (y, x, step): padded[:, y : y + 5, x : x + 6][..., ::step]
            for y, x, step in itertools.product(range(5), range(5), (1, -1))
        }
        found = [where for where, window in windows.items() if np.array_equal(window, result)]
        assert found, "not a window of the padded image"
        seen.update(found)
    assert len(seen) > 40


def test_distance_is_zero_to_itself_and_grows_with_noise_and_blur(run):
    """After two steps already; the benchmark prints the numbers of the trained network."""
    images = data.load(f"npz:{run / 'train.npz'}").images
    file = run / "cnn.safetensors"
    reference = cifar_cnn.moments(images, file)
    assert cifar_cnn.frechet(images, reference, file) < 1e-6
    for change in (cifar_cnn.add_noise, cifar_cnn.blur):
        small, large = (cifar_cnn.frechet(change(images, s), reference, file) for s in (0.5, 30))
        assert small < large / 3, change.__name__


def test_a_zip_that_is_absent_or_something_else_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cifar_cnn.main(["--zip", str(tmp_path / "none.zip"), "--run", str(tmp_path / "run")])
    assert end.value.code == 2
    assert "none.zip: put CIFAR-10's training images there" in capsys.readouterr().err
    other = tmp_path / "other.zip"
    other.write_bytes(b"PK and no more")
    with pytest.raises(ValueError, match=r"other\.zip is no zip of CLASS/NAME\.jpg"):
        cifar_cnn.read_zip(other)
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("readme.txt", "no pictures")
    with pytest.raises(ValueError, match=r"other\.zip is no zip of CLASS/NAME\.jpg"):
        cifar_cnn.read_zip(other)


def test_missing_weights_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"python -m benchmarks\.cifar_cnn makes it"):
        cifar_cnn.features(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), tmp_path / "cnn.st")
