"""Frechet distance against closed forms, scipy and itself; moments against numpy."""

import numpy as np
import pytest
import scipy.linalg
import torch

from ddm_min import features
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
    with pytest.raises(ValueError, match="unknown features 'best': use pixels or inception"):
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
