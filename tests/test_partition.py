"""Splitting data into clusters: every image once, the same split everywhere, clear refusals."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from ddm_min import data, kmeans
from ddm_min.data import Dataset
from ddm_min.kmeans import nearest
from ddm_min.partition import Partition, feature_points, main, partition


def blobs(sizes=(20, 50, 30), seed: int = 0, spread: float = 8.0) -> tuple[Dataset, torch.Tensor]:
    """Images [N, 3, 2, 4] around well separated grays, shuffled; and the true group of each."""
    rng = np.random.default_rng(seed)
    centres = np.linspace(30, 220, len(sizes))
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    pixels = centres[groups][:, None] + rng.normal(0, spread, (len(groups), 24))
    images = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8).reshape(-1, 3, 2, 4))
    labels = torch.from_numpy(rng.integers(0, 2, len(groups)))
    return Dataset(images, labels, ["a", "b"]), torch.from_numpy(groups)


def as_npz(tmp_path, images: np.ndarray) -> str:
    """images [N, H, W, C] as a dataset name."""
    np.savez(tmp_path / "images.npz", arr_0=images)
    return f"npz:{tmp_path / 'images.npz'}"


def test_separated_groups_are_found():
    dataset, groups = blobs()
    made = partition(dataset, 3, "pixels", None, 0)
    pairs = {(int(a), int(b)) for a, b in zip(made.assignment, groups, strict=True)}
    assert len(pairs) == 3  # one cluster per group


def test_the_largest_cluster_comes_first():
    dataset, _ = blobs()
    made = partition(dataset, 3, "pixels", None, 0)
    assert made.assignment.bincount().tolist() == [50, 30, 20]
    for features in ("labels", "random"):
        sizes = partition(dataset, 2, features, None, 0).assignment.bincount().tolist()
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("features", ["pixels", "labels", "random"])
def test_every_image_is_in_exactly_one_shard_and_counts_say_which(features):
    dataset, _ = blobs()
    made = partition(dataset, 2, features, None, 0)
    assert made.assignment.shape == (100,)
    assert made.assignment.dtype == torch.int64
    assert made.num_clusters == 2
    for k in range(2):
        for y in range(2):
            both = (made.assignment == k) & (dataset.labels == y)
            assert made.counts[k, y] == both.sum()
    assert made.counts.sum() == 100


def test_counts_without_classes_have_one_column():
    dataset, _ = blobs()
    dataset = Dataset(dataset.images, torch.zeros(100, dtype=torch.long), [])
    assert partition(dataset, 3, "pixels", None, 0).counts.tolist() == [[50], [30], [20]]


def test_labels_as_features_deal_out_classes():
    dataset, _ = blobs()
    dataset = Dataset(dataset.images, torch.arange(100) % 5, list("abcde"))
    made = partition(dataset, 2, "labels", None, 0)
    assert made.counts.tolist() == [[20, 0, 20, 0, 20], [0, 20, 0, 20, 0]]


def test_random_features_give_equal_shares_that_ignore_the_image():
    dataset, groups = blobs()
    made = partition(dataset, 4, "random", None, 0)
    assert made.assignment.bincount().tolist() == [25, 25, 25, 25]
    other = partition(dataset, 4, "random", None, 1)
    assert not torch.equal(made.assignment, other.assignment)
    # the group of 50 meets each cluster 12.5 times on average, sigma 2.2
    assert all(2 < n < 23 for n in made.assignment[groups == 1].bincount(minlength=4).tolist())


def test_nearest_is_the_nearest():
    rng = np.random.default_rng(1)
    points = rng.standard_normal((300, 5)).astype(np.float32)
    centroids = rng.standard_normal((7, 5))
    expected = ((points[:, None] - centroids) ** 2).sum(-1).argmin(1)
    assert np.array_equal(nearest(points, centroids), expected)


def test_E1_clusters_on_two_spots_only():
    images = torch.zeros(20, 1, 2, 3, dtype=torch.uint8)
    images[12:] = 200
    dataset = Dataset(images, torch.zeros(20, dtype=torch.long), [])
    with pytest.raises(ValueError, match="5 clusters of only 2 different images: ask for fewer"):
        partition(dataset, 5, "pixels", None, 0)
    assert partition(dataset, 2, "pixels", None, 0).assignment.bincount().tolist() == [12, 8]


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_E1_far_outliers_leave_no_empty_cluster_and_no_nan():
    rng = np.random.default_rng(2)
    latents = rng.standard_normal((60, 1, 2, 3)).astype(np.float32)
    latents[7] = 1e6
    dataset = Dataset(torch.from_numpy(latents), torch.zeros(60, dtype=torch.long), [])
    for k in (2, 5):
        sizes = partition(dataset, k, "pixels", 12, 0).assignment.bincount(minlength=k)
        assert (sizes > 0).all()
        assert sizes.sum() == 60


@pytest.mark.parametrize("features", ["pixels", "random"])
def test_E2_more_clusters_than_images_are_refused(features):
    dataset, _ = blobs(sizes=(2, 1, 1))
    with pytest.raises(ValueError, match="ask for fewer"):
        partition(dataset, 8, features, None, 0)


def test_E2_copies_of_one_image_are_one_group():
    dataset = Dataset(torch.full((12, 1, 2, 3), 9).byte(), torch.zeros(12, dtype=torch.long), [])
    with pytest.raises(ValueError, match="3 clusters of only 1 different images"):
        partition(dataset, 3, "pixels", None, 0)


def test_E2_fewer_classes_than_clusters_are_refused():
    dataset, _ = blobs()
    with pytest.raises(ValueError, match="only 2 of 3 clusters got images"):
        partition(dataset, 3, "labels", None, 0)


def test_E2_as_many_clusters_as_images_is_possible():
    rng = np.random.default_rng(3)
    images = torch.from_numpy(rng.integers(0, 256, (4, 1, 2, 3), dtype=np.uint8))
    made = partition(Dataset(images, torch.zeros(4, dtype=torch.long), []), 4, "pixels", None, 0)
    assert sorted(made.assignment.tolist()) == [0, 1, 2, 3]


def test_E3_threads_and_repetition_do_not_change_the_split():
    dataset, _ = blobs(sizes=(60, 50, 40, 30), spread=60)  # overlapping: borders matter
    threads = torch.get_num_threads()
    try:
        splits = []
        for count in (1, 4, 1):
            torch.set_num_threads(count)
            splits.append(partition(dataset, 4, "pixels", 20, 0).assignment)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(splits[0], splits[1])
    assert torch.equal(splits[0], splits[2])


def test_E4_a_cluster_of_one_outlier_is_announced(tmp_path, capsys):
    images = np.full((100, 2, 3, 1), 100, dtype=np.uint8)
    images += np.random.default_rng(4).integers(0, 20, images.shape, dtype=np.uint8)
    images[42] = 255
    name = as_npz(tmp_path, images)
    # every image its own fine centroid, so that nothing is merged too early
    main(["--data", name, "--clusters", "2", "--run", str(tmp_path / "run"), "--fine", "100"])
    out, err = capsys.readouterr()
    assert "cluster 0: 99 images" in out
    assert "cluster 1: 1 images" in out
    assert "warning: cluster 1 is too small" in err
    assert "cluster 0" not in err


def test_fingerprint_depends_on_data_and_assignment():
    dataset, _ = blobs()
    made = partition(dataset, 3, "pixels", None, 0)
    same = partition(dataset, 3, "pixels", None, 0)
    assert made.fingerprint == same.fingerprint
    same.assignment[0] = (same.assignment[0] + 1) % 3
    other_data, _ = blobs(seed=1)
    prints = {
        made.fingerprint,
        same.fingerprint,
        partition(other_data, 3, "pixels", None, 0).fingerprint,
        partition(dataset, 2, "pixels", None, 0).fingerprint,
    }
    assert len(prints) == 4


def test_partition_file_round_trip(tmp_path):
    dataset, _ = blobs()
    made = partition(dataset, 3, "pixels", None, 5)
    made.save(tmp_path / "partition.safetensors")
    back = Partition.load(tmp_path / "partition.safetensors", dataset)
    assert torch.equal(back.assignment, made.assignment)
    assert torch.equal(back.counts, made.counts)
    assert back.fingerprint == made.fingerprint
    assert (back.class_names, back.features, back.seed) == (["a", "b"], "pixels", 5)


def test_partition_of_other_data_is_refused(tmp_path):
    dataset, _ = blobs()
    file = tmp_path / "partition.safetensors"
    partition(dataset, 3, "pixels", None, 0).save(file)
    with pytest.raises(ValueError, match=r"partition\.safetensors was made for other data"):
        Partition.load(file, blobs(seed=1)[0])


@pytest.mark.parametrize("name", ["4", "-1", "x", "1.0", "", "²"])
def test_a_cluster_out_of_range_is_refused_with_the_range(name):
    dataset, _ = blobs()
    made = partition(dataset, 4, "random", None, 0)
    assert made.check_cluster("3") == 3
    with pytest.raises(ValueError, match="use 0 to 3, or all"):
        made.check_cluster(name)


def test_another_split_does_not_replace_the_one_that_experts_rest_on(tmp_path, capsys):
    rng = np.random.default_rng(5)
    name = as_npz(tmp_path, rng.integers(0, 256, (80, 2, 3, 1), dtype=np.uint8))
    arguments = ["--data", name, "--run", str(tmp_path / "run"), "--features", "random"]
    main([*arguments, "--clusters", "2"])
    file = tmp_path / "run" / "partition.safetensors"
    before = file.read_bytes()
    main([*arguments, "--clusters", "2"])  # the same again is fine
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--clusters", "2", "--seed", "1"])
    assert end.value.code == 2
    assert "holds another split" in capsys.readouterr().err
    assert file.read_bytes() == before


# ---------------------------------------------------------------- many points


def far_blobs(num: int = 600, dims: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Points [N, D] around six corners that are far apart; and the corner of each."""
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 6, num)
    corners = 20 * np.eye(6, dims + 1)[:, :dims]
    return (corners[groups] + rng.standard_normal((num, dims))).astype(np.float32), groups


def test_few_points_are_split_as_by_scikit_learn_on_all_of_them():
    """The digits' partition, bit for bit: Lloyd on all points, fine then coarse, in one thread."""
    points = (data.load("digits").images.flatten(1) / 127.5 - 1).numpy()

    def centroids(rows, k, weights=None):
        with threadpool_limits(1):
            fitted = KMeans(k, n_init=4, random_state=0).fit(rows, sample_weight=weights)
        return fitted.cluster_centers_.astype(np.float32)

    def assign(rows, ends):
        return torch.cdist(torch.from_numpy(rows), torch.from_numpy(ends)).argmin(1).numpy()

    fine = centroids(points, 40)
    sizes = np.bincount(assign(points, fine), minlength=40)
    expected = assign(points, centroids(fine, 4, sizes))
    assert np.array_equal(kmeans.two_stage(points, 4, 40, 0), expected)


@pytest.mark.parametrize("k", [2, 6])
def test_mini_batches_find_groups_too(monkeypatch, k):
    points, groups = far_blobs()
    monkeypatch.setattr(kmeans, "LARGE", 100)
    monkeypatch.setattr(kmeans, "BATCH", 64)
    found = kmeans.two_stage(points, k, 30, 0)
    pairs = {(int(a), int(b)) for a, b in zip(groups, found, strict=True)}
    assert len(pairs) == 6  # a corner is never cut in two
    assert len(set(found.tolist())) == k


def test_E3_mini_batches_repeat_whatever_the_threads(monkeypatch):
    monkeypatch.setattr(kmeans, "LARGE", 100)
    monkeypatch.setattr(kmeans, "BATCH", 64)
    points = np.random.default_rng(1).standard_normal((500, 7)).astype(np.float32)
    threads, splits = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            splits.append(kmeans.two_stage(points, 4, 20, 0))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(*splits)


def test_points_are_read_batch_by_batch(monkeypatch):
    """What is ever looked at at once: a batch of random rows, or of neighbouring ones."""
    monkeypatch.setattr(kmeans, "LARGE", 100)
    monkeypatch.setattr(kmeans, "BATCH", 50)
    points, _ = far_blobs(700)
    seen, original = [], torch.cdist
    monkeypatch.setattr(torch, "cdist", lambda a, b: seen.append(len(a)) or original(a, b))
    kmeans.two_stage(points, 3, 10, 0)
    assert max(seen) == 50
    assert sum(seen) == 2 * 700


def test_nearest_in_batches_is_the_nearest(monkeypatch):
    monkeypatch.setattr(kmeans, "BATCH", 30)
    test_nearest_is_the_nearest()


def test_features_wait_on_the_disk(monkeypatch):
    dataset, _ = blobs()
    few = feature_points(dataset, "pixels")
    assert not isinstance(few, np.memmap)
    monkeypatch.setattr(kmeans, "LARGE", 99)
    many = feature_points(dataset, "pixels")
    assert isinstance(many, np.memmap)
    assert many.dtype == few.dtype == np.float32
    assert np.array_equal(many, few)


def test_a_large_folder_is_partitioned_like_a_small_one(monkeypatch):
    dataset, _ = blobs()
    rows = data.Rows(dataset.images, torch.arange(100))
    lazy = Dataset(rows, dataset.labels, dataset.class_names)
    small, large = (partition(x, 3, "pixels", None, 0) for x in (dataset, lazy))
    assert torch.equal(small.assignment, large.assignment)
    assert small.fingerprint == large.fingerprint


@pytest.mark.parametrize("features", ["pixels", "inception", "dinov2", "resnet18"])
def test_help_names_the_features(capsys, features):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert features in capsys.readouterr().out
