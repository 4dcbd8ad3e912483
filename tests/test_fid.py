"""Frechet distance against closed forms, scipy and itself; moments against numpy."""

import json
import re
import urllib.error

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torchvision import models, transforms

from ddm_min import data, features
from ddm_min.fid import FeatureStats, frechet_distance


def distance(mean_a, cov_a, mean_b, cov_b) -> float:
    arrays = (np.asarray(x, dtype=np.float64) for x in (mean_a, cov_a, mean_b, cov_b))
    return frechet_distance(*(torch.from_numpy(x) for x in arrays))


def random_cov(dims: int, seed: int, rank: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((dims, rank or 3 * dims))
    return factor @ factor.T / factor.shape[1]


def test_equal_covariances_leave_the_squared_distance_of_the_means():
    cov = random_cov(5, seed=0)
    found = distance([1, 2, 3, 4, 5], cov, [1, 0, 3, 4, 8], cov)
    assert found == pytest.approx(4 + 9, rel=1e-12)


def test_one_dimension_is_the_squared_difference_of_means_and_deviations():
    assert distance([1.0], [[4.0]], [4.0], [[25.0]]) == pytest.approx(3**2 + (5 - 2) ** 2)


def test_commuting_covariances_differ_by_their_roots():
    rotation, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((4, 4)))
    a, b = np.array([1.0, 4, 9, 16]), np.array([25.0, 4, 1, 0.25])
    zero = np.zeros(4)
    found = distance(zero, rotation * a @ rotation.T, zero, rotation * b @ rotation.T)
    assert found == pytest.approx(((np.sqrt(a) - np.sqrt(b)) ** 2).sum(), rel=1e-9)


@pytest.mark.parametrize("dims", [2, 7, 30])
@pytest.mark.parametrize("seed", [0, 1])
def test_distance_is_the_one_with_scipys_matrix_root(dims, seed):
    a, b = random_cov(dims, seed), random_cov(dims, seed + 10)
    mean_a, mean_b = np.random.default_rng(seed).standard_normal((2, dims))
    root = scipy.linalg.sqrtm(a @ b).real
    expected = ((mean_a - mean_b) ** 2).sum() + np.trace(a + b - 2 * root)
    assert distance(mean_a, a, mean_b, b) == pytest.approx(expected, rel=1e-9)
    assert distance(mean_b, b, mean_a, a) == pytest.approx(expected, rel=1e-9)  # symmetric


def test_rank_deficient_covariances_keep_the_closed_form():
    """Rank 3 of 9 in the same eigenbasis: roots of the product commute, zeros stay zero."""
    basis, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((9, 9)))
    a = np.array([4.0, 1, 9, 0, 0, 0, 0, 0, 0])
    b = np.array([1.0, 0, 4, 16, 0, 0, 0, 0, 0])
    expected = ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    zero = np.zeros(9)
    for x, y in ((a, b), (b, a)):
        found = distance(zero, basis * x @ basis.T, zero, basis * y @ basis.T)
        # zero eigenvalues are rounded to 1e-16 of the largest, and their roots to 1e-8
        assert found == pytest.approx(expected, abs=1e-5)


def test_constant_feature_is_no_obstacle():
    cov = random_cov(4, seed=3)
    cov[1] = cov[:, 1] = 0
    found = distance(np.zeros(4), cov, np.array([0, 5.0, 0, 0]), cov)
    assert found == pytest.approx(25, abs=1e-5)


@pytest.mark.parametrize("count", [500, 16], ids=["more than dimensions", "fewer"])
def test_a_set_against_itself_is_zero(count):
    samples = torch.from_numpy(np.random.default_rng(4).standard_normal((count, 40)))
    stats = FeatureStats(40).update(samples)
    found = frechet_distance(stats.mean, stats.cov, stats.mean, stats.cov)
    assert 0 <= found < 1e-6


def batches(samples: torch.Tensor, size: int) -> FeatureStats:
    stats = FeatureStats(samples.shape[1])
    for batch in samples.split(size):
        stats.update(batch)
    return stats


@pytest.mark.parametrize("size", [1, 3, 5, 10, 64])
def test_F5_moments_do_not_depend_on_the_batch_size(size):
    samples = np.random.default_rng(5).standard_normal((10, 6)) * 3 + 100
    stats = batches(torch.from_numpy(samples), size)
    assert stats.count == 10
    # one pass subtracts squares of size 1e4 from each other: 1e-16 * 1e5, with room
    assert np.allclose(stats.mean, samples.mean(0), rtol=1e-12)
    assert np.allclose(stats.cov, np.cov(samples.T), atol=1e-8)


def test_F5_score_does_not_depend_on_the_batch_size():
    rng = np.random.default_rng(6)
    a, b = (torch.from_numpy(rng.standard_normal((10, 6)).astype(np.float32)) for _ in "ab")
    scores = [features.distance(batches(a, size), batches(b, size)) for size in (1, 3, 5, 10, 64)]
    assert np.ptp(scores) < 1e-3 * scores[0]
    assert scores[0] > 0.1


def test_F5_pixel_features_use_every_image():
    images = torch.from_numpy(
        np.random.default_rng(7).integers(0, 256, (10, 3, 2, 4), dtype=np.uint8)
    )
    rows = images.double().flatten(1).numpy() / 127.5 - 1
    for size in (1, 3, 64):
        seen = torch.cat(list(features.extract(images, "pixels", size)))
        assert np.allclose(seen, rows, atol=1e-6)
    assert np.allclose(features.moments(images, "pixels").cov, np.cov(rows.T), atol=1e-6)


def test_a_single_sample_has_a_mean_and_no_spread():
    stats = FeatureStats(3).update(torch.tensor([[1.0, 2, 3]]))
    assert stats.mean.tolist() == [1, 2, 3]
    assert torch.equal(stats.cov, torch.zeros(3, 3, dtype=torch.float64))


def test_F1_fewer_images_than_features_give_a_real_number():
    """16 images against 16, with 512 features (2,048 only cost time)."""
    a, b = (
        batches(torch.from_numpy(np.random.default_rng(s).standard_normal((16, 512))), 16)
        for s in (8, 9)
    )
    found = features.distance(a, b)
    assert isinstance(found, float)
    assert np.isfinite(found)
    # The spans of two small samples are nearly orthogonal: near |mean|^2 + tr A + tr B = 64 + 1024
    assert 500 < found < 1100
    assert 0 <= features.distance(a, a) < 1e-3


def test_F1_too_few_images_are_announced_with_both_counts(tmp_path, capsys):
    rng = np.random.default_rng(10)
    for name, count in (("a", 16), ("b", 20)):
        images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", arr_0=images)
    features.main([str(tmp_path / "a.npz"), str(tmp_path / "b.npz")])
    out, err = capsys.readouterr()
    assert "16 and 20 images are few for 192 features" in err
    assert "Frechet distance in pixels" in out
    assert "do not compare this with published FIDs" in out


def test_F2_scipys_matrix_root_is_not_used(monkeypatch):
    def broken(*args, **kwargs):
        raise AssertionError("sqrtm was called")

    monkeypatch.setattr(scipy.linalg, "sqrtm", broken)
    cov = random_cov(6, seed=11)
    assert distance(np.ones(6), cov, np.zeros(6), cov) == pytest.approx(6)


def test_F6_inception_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch_fidelity", None)
    monkeypatch.setitem(
        __import__("sys").modules, "torch_fidelity.feature_extractor_inceptionv3", None
    )
    with pytest.raises(ValueError, match=r"pip install .*inception.* or use pixels"):
        next(features.extract(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "inception"))


def test_unknown_features_are_refused():
    with pytest.raises(
        ValueError, match="unknown features 'best': use pixels, inception, dinov2, res"
    ):
        next(features.extract(torch.zeros(2, 3, 8, 8), "best"))


def test_a_single_image_can_be_measured_but_not_be_the_reference(tmp_path, capsys):
    for name, count in (("one", 1), ("five", 5)):
        np.savez(tmp_path / f"{name}.npz", arr_0=np.full((count, 2, 2, 1), 7, dtype=np.uint8))
    one, five = str(tmp_path / "one.npz"), str(tmp_path / "five.npz")
    features.main([one, five])
    assert "Frechet distance in pixels: 0.000" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        features.main([five, one])
    assert end.value.code == 2
    assert "one.npz has a single image" in capsys.readouterr().err


def test_images_of_another_shape_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", arr_0=np.zeros((4, 2, 3, 1), dtype=np.uint8))
    with pytest.raises(SystemExit) as end:
        features.main([str(tmp_path / "a.npz"), "digits"])
    assert end.value.code == 2
    assert "differ in shape: 1x2x3 and 1x8x8" in capsys.readouterr().err


# ---------------------------------------------------------------- pytorch-fid's numbers and files


def moments_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As pytorch-fid takes them: float64 mean [D] and covariance [D, D]."""
    return rows.mean(0), np.cov(rows, rowvar=False)


def feature_like(num: int, dims: int, seed: int) -> np.ndarray:
    """Correlated, positive and skewed, as the features of a network are."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(0).standard_normal((dims, dims)) / np.sqrt(dims)
    return np.abs(rng.standard_normal((num, dims)) @ mix * (1 + 0.1 * seed))


@pytest.mark.filterwarnings("ignore:.*disp.*:DeprecationWarning")
@pytest.mark.parametrize(("num_a", "num_b"), [(400, 500), (40, 50), (40, 500), (3, 4)], ids=str)
def test_distance_is_pytorch_fids_on_the_same_moments(num_a, num_b):
    """Also where a covariance has less than full rank. pytorch-fid adds 1e-6 to the diagonals of a
    singular product only where SciPy's root is then not finite, which it is here in no case."""
    peer = pytest.importorskip("pytorch_fid.fid_score", reason="pip install '.[peers]'")
    (mean_a, cov_a), (mean_b, cov_b) = (
        moments_of(feature_like(num, 96, seed)) for seed, num in ((1, num_a), (2, num_b))
    )
    expected = peer.calculate_frechet_distance(mean_a, cov_a, mean_b, cov_b)
    assert distance(mean_a, cov_a, mean_b, cov_b) == pytest.approx(expected, rel=1e-4)


def run(capsys, *argv) -> tuple[str, str]:
    capsys.readouterr()
    features.main([str(word) for word in argv])
    return capsys.readouterr()


def pictures(file, num: int, seed: int, shape=(4, 4, 3)) -> np.ndarray:
    images = np.random.default_rng(seed).integers(0, 256, (num, *shape), dtype=np.uint8)
    np.savez(file, arr_0=images)
    return images.transpose(0, 3, 1, 2).reshape(num, -1) / 127.5 - 1


def test_statistics_of_pytorch_fid_stand_for_images(tmp_path, capsys):
    a, b, stats = (tmp_path / f"{name}.npz" for name in ("a", "b", "stats"))
    rows = pictures(a, 200, 1), pictures(b, 150, 2)
    run(capsys, a, b, "--out", tmp_path / "1.json", "--save-stats", stats)
    with np.load(stats) as written:
        assert sorted(written.files) == ["mu", "sigma"]  # the layout of python -m pytorch_fid
        assert np.allclose(written["mu"], rows[1].mean(0), atol=1e-6)
        assert np.allclose(written["sigma"], np.cov(rows[1], rowvar=False), atol=1e-6)
    for pair in ((a, stats), (stats, a)):
        out, err = run(capsys, *pair, "--out", tmp_path / "2.json")
        one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in "12")
        assert two["frechet_distance"] == pytest.approx(one["frechet_distance"], rel=1e-9)
        assert "200" in out
        assert "unknown" in out
        assert err == ""
    assert one["floor"] > 0
    mu, sigma = moments_of(rows[0])  # written by somebody else, in single precision
    np.savez(stats, mu=mu.astype(np.float32), sigma=sigma.astype(np.float32))
    out, _ = run(capsys, stats, b, "--out", tmp_path / "3.json")
    three = json.loads((tmp_path / "3.json").read_text())
    assert three["frechet_distance"] == pytest.approx(one["frechet_distance"], rel=1e-4)
    assert three["num_a"] is None


def test_statistics_of_other_features_or_damaged_ones_are_refused(tmp_path, capsys):
    pictures(tmp_path / "a.npz", 20, 1)
    bad = {
        "other": (dict(mu=np.zeros(7), sigma=np.eye(7)), "other.npz has 7 features and .* has 48"),
        "shapes": (dict(mu=np.zeros(48), sigma=np.eye(7)), "shapes.npz"),
        "nan": (dict(mu=np.full(48, np.nan), sigma=np.eye(48)), "nan.npz"),
        "half": (dict(mu=np.zeros(48)), "half.npz"),
        "objects": (dict(mu=np.array([{}], dtype=object), sigma=np.eye(1)), "objects.npz"),
    }
    for name, (arrays, words) in bad.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(SystemExit) as end:
            features.main([str(tmp_path / f"{name}.npz"), str(tmp_path / "a.npz")])
        assert end.value.code == 2
        said = capsys.readouterr().err.strip()
        assert re.search(words, said), said
        assert "\n" not in said


def test_each_image_of_the_reference_is_looked_at_once(tmp_path, capsys, monkeypatch):
    """The moments of B are the sum of its halves': a network runs over it a single time."""
    pictures(tmp_path / "a.npz", 60, 1)
    pictures(tmp_path / "b.npz", 101, 2)
    seen, original = [], data.to_float
    monkeypatch.setattr(data, "to_float", lambda x: seen.append(len(x)) or original(x))
    run(capsys, tmp_path / "a.npz", tmp_path / "b.npz")
    assert sum(seen) == 161


def test_moments_of_two_sets_add_up():
    rows = torch.from_numpy(feature_like(31, 6, 1))
    both = FeatureStats(6).update(rows[:9]) + FeatureStats(6).update(rows[9:])
    assert both.count == 31
    assert np.allclose(both.mean, rows.mean(0), rtol=1e-12)
    assert np.allclose(both.cov, np.cov(rows.T), rtol=1e-9)


# ---------------------------------------------------------------- networks


@pytest.fixture
def random_weights(monkeypatch):
    """What the loaders return without a network: the right architecture, random weights."""
    original = models.resnet18
    torch.manual_seed(0)
    network = original(weights=None)
    asked = []

    def resnet18(weights):
        asked.append(weights)
        network.fc = torch.nn.Linear(512, 1000)
        return network

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return torch.nn.Sequential(torch.nn.AvgPool2d(14), torch.nn.Flatten())

    monkeypatch.setattr(models, "resnet18", resnet18)
    monkeypatch.setattr(torch.hub, "load", load)
    return network, asked


def test_resnet18_gives_what_precedes_its_classifier(random_weights):
    """Against torchvision's own preprocessing and forward hooks."""
    network, asked = random_weights
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 40, 40), np.uint8))
    found = torch.cat(list(features.extract(images, "resnet18", batch_size=2)))
    assert asked == ["IMAGENET1K_V1"]
    assert found.shape == (5, 512)
    seen = []
    network.avgpool.register_forward_hook(lambda *args: seen.append(args[2].flatten(1)))
    prepare = transforms.Compose([
        transforms.Resize((224, 224), transforms.InterpolationMode.BICUBIC),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    pil = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    with torch.no_grad():
        network.eval()(torch.stack([prepare(image) for image in pil]))
    # Pillow rounds the resized picture to bytes, we do not
    assert (found - seen[0]).norm() < 0.01 * seen[0].norm()
    assert (seen[0][0] - seen[0][1]).norm() > 0.05 * seen[0][0].norm()  # and they differ


@pytest.mark.parametrize("shape", [(8, 8), (13, 40), (300, 200)], ids=str)
def test_networks_take_any_size_and_gray(random_weights, shape):
    gray = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (2, 1, *shape), np.uint8))
    for name in ("resnet18", "dinov2"):
        one = torch.cat(list(features.extract(gray, name)))
        three = torch.cat(list(features.extract(gray.expand(-1, 3, -1, -1), name)))
        assert torch.equal(one, three)
        assert one.isfinite().all()


def test_dinov2_sees_normalised_images_of_224(random_weights):
    _, asked = random_weights
    gray = torch.full((1, 1, 32, 32), 255, dtype=torch.uint8)
    found = next(features.extract(gray, "dinov2")).reshape(3, 16, 16)  # 224 / 14 patches
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(found, white[:, None, None].expand(3, 16, 16), atol=1e-5)
    assert asked[0][0] == ("facebookresearch/dinov2", "dinov2_vitb14")
    assert asked[0][1] == {"trust_repo": True}  # or torch.hub would wait for an answer


@pytest.mark.parametrize(
    ("name", "file"),
    [("dinov2", "dinov2_vitb14_pretrain.pth"), ("resnet18", "resnet18-f37072fd.pth")],
)
def test_F6_weights_without_a_network_are_named_with_their_place(monkeypatch, capsys, name, file):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network\nin tests")

    monkeypatch.setattr(models, "resnet18", refuse)
    monkeypatch.setattr(torch.hub, "load", refuse)
    with pytest.raises(SystemExit) as end:
        features.main(["digits", "digits", "--features", name])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    for words in (
        "weights cannot be had",
        "no network in tests",
        file,
        "/checkpoints",
        "use pixels",
    ):
        assert words in said


@pytest.mark.parametrize("name", ["inception", "dinov2", "resnet18"])
def test_latents_are_no_pictures(name):
    with pytest.raises(ValueError, match=f"{name} features need pictures, not latents"):
        next(features.extract(torch.zeros(2, 4, 8, 8), name))


def test_networks_may_compare_images_of_other_sizes(tmp_path, capsys, random_weights):
    pictures(tmp_path / "a.npz", 4, 1, (8, 8, 1))
    pictures(tmp_path / "b.npz", 5, 2, (6, 10, 3))
    argv = [tmp_path / "a.npz", tmp_path / "b.npz"]
    out, err = run(capsys, *argv, "--features", "resnet18")
    assert "4 and 5 images are few for 512 features" in err
    assert "Frechet distance in resnet18" in out
    with pytest.raises(SystemExit):
        run(capsys, *argv)
    assert "differ in shape: 1x8x8 and 3x6x10" in capsys.readouterr().err


def test_folders_are_resized_to_be_compared(tmp_path, capsys):
    pictures(tmp_path / "a.npz", 20, 1, (8, 8, 3))
    for index in range(6):
        rows = np.random.default_rng(index).integers(0, 256, (20 + index, 30, 3), dtype=np.uint8)
        Image.fromarray(rows).save(tmp_path / f"{index}.png")
    run(capsys, tmp_path / "a.npz", f"folder:{tmp_path}", "--image-size", 8)
