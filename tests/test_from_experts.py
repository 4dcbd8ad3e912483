"""A router from the experts alone (DDM's private-data setting), and a DDM x MDM grid."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_scripts import SHORT, call, refused

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow
from ddm_min.expert import Expert, load_router
from ddm_min.objectives import DDPM, FLOW
from ddm_min.run import load_run
from ddm_min.sampler import sample_clusters
from ddm_min.schedule import Linear

GRID = [  # cluster, time interval, objective
    (0, (0, 0.4), "flow"), (0, (0.4, 1), "ddpm"), (1, (0, 0.7), "v"), (1, (0.7, 1), "x0"),
]  # fmt: skip


# ---------------------------------------------------------------- the samples


def exact_experts() -> tuple[list, list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(experts, images, labels, counts [2, 3]) of two shards of digits 0, 1 and 2."""
    digits = data.load("digits")
    images = data.to_float(digits.images)
    rows = [digits.labels.eq(y).nonzero()[:, 0] for y in range(3)]
    shards = [torch.cat([rows[0][:6], rows[1][:3]]), torch.cat([rows[1][3:5], rows[2][:8]])]
    labels = [digits.labels[shard] for shard in shards]
    experts = [
        SimpleNamespace(
            model=EmpiricalFlow(images[shard], Linear(), y, 3).expert(objective),
            objective=objective, cluster=k, time_interval=(0.0, 1.0), image_shape=(1, 8, 8),
            stats=SimpleNamespace(
                value_range=torch.tensor([-1.0, 1.0]),
                mean_image=lambda labels, null, shard=shard, y=y: torch.stack(
                    [images[shard][y == label].mean(0) for label in labels]),
            ),
        )
        for k, (shard, y, objective) in enumerate(zip(shards, labels, (FLOW, DDPM), strict=True))
    ]  # fmt: skip
    counts = torch.stack([y.bincount(minlength=3) for y in labels])
    return experts, [images[shard] for shard in shards], labels, counts


def test_samples_come_from_the_right_expert_and_class_in_the_datas_numbers():
    """Of exact experts each sample is an image of the cluster and class that it stands for."""
    experts, images, labels, counts = exact_experts()
    samples, drawn_labels, clusters = sample_clusters(experts, counts, seed=0, most=100)
    assert len(samples) == counts.sum() == 19
    found = torch.zeros_like(counts).index_put_(
        (clusters, drawn_labels), torch.ones(19, dtype=torch.long), accumulate=True
    )
    assert torch.equal(found, counts)
    distance = torch.cdist(samples.flatten(1), torch.cat(images).flatten(1))
    nearest = distance.argmin(1)
    assert distance.amin(1).max() < 0.5  # the images are at least 2 apart
    assert torch.equal(torch.cat(labels)[nearest], drawn_labels)
    assert torch.equal((nearest >= len(images[0])).long(), clusters)
    assert len(nearest.unique()) > 10  # and not the same image each time


def test_fewer_samples_than_images_keep_the_proportions():
    experts, _, _, counts = exact_experts()
    for most in (7, 18):
        _, labels, clusters = sample_clusters(experts, counts, seed=0, most=most, num_steps=1)
        assert len(labels) == most
        cells = (clusters * 3 + labels).bincount(minlength=6)
        expected = counts.flatten() * most / 19
        assert ((cells - expected).abs() <= 1).all()  # evenly spaced: off by less than one


def test_the_same_seed_draws_the_same_samples():
    experts, _, _, counts = exact_experts()
    first, again, other = (
        sample_clusters(experts, counts, seed, 9, num_steps=2)[0] for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---------------------------------------------------------------- a grid, and its router


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    """2 clusters x 2 intervals each, four objectives, through the command lines."""
    run = tmp_path_factory.mktemp("grid")
    digits = data.load("digits")
    np.savez(run / "few.npz", arr_0=digits.images[:60].permute(0, 2, 3, 1).numpy(),
             arr_1=digits.labels[:60].numpy())  # fmt: skip
    common = ["--data", f"npz:{run / 'few.npz'}", "--run", run]
    call("partition", *common, "--clusters", 2, "--fine", 8)
    for k, times, objective in GRID:
        call("train_expert", *common, "--cluster", k, "--time-interval", *times,
             "--objective", objective, *SHORT)  # fmt: skip
    return run


@pytest.fixture
def private(grid, tmp_path) -> Path:
    """The expert files alone: no partition, no data."""
    run = tmp_path / "private"
    run.mkdir()
    for file in grid.glob("expert_*.safetensors"):
        shutil.copy(file, run)
    return run


def test_a_grid_of_clusters_and_intervals_trains_and_samples(grid, tmp_path):
    names = {"expert_0_0-0.4", "expert_0_0.4-1", "expert_1_0-0.7", "expert_1_0.7-1"}
    assert {file.stem for file in grid.glob("expert_*.safetensors")} == names
    words = ["sample", grid, "--num", 6, "--num-steps", 10, "--device", "cpu"]
    words += ["--router", "prior", "--label", "none", "--out", tmp_path / "x.npz"]
    for strategy, forwards in (("coupled", 10), ("full", 20)):
        out = call(*words, "--strategy", strategy)
        assert "4 experts, prior router" in out
        assert f"per image: {forwards}.0 expert forwards" in out  # one expert per cluster and step
    assert data.load(f"npz:{tmp_path / 'x.npz'}").images.shape == (6, 1, 8, 8)


def test_a_hole_in_the_grid_is_refused_by_cluster_and_time(private, tmp_path):
    (private / "expert_1_0.7-1.safetensors").unlink()
    refused(tmp_path, "sample", private, "--out", tmp_path / "x.png",
            match="no expert answers for cluster 1 at t from 0.7 to 1")  # fmt: skip
    refused(tmp_path, "train_router", "--run", private, "--from-experts", *SHORT,
            match="no expert answers for cluster 1 at t from 0.7 to 1")  # fmt: skip


def test_the_router_of_a_grid_needs_no_data_and_belongs_to_its_experts(private, tmp_path):
    assert "2 clusters, 60 images" in call("train_router", "--run", private, "--from-experts",
                                           *SHORT)  # fmt: skip
    _, counts, metadata = load_router(private / "router.safetensors")
    experts = [
        Expert.load(private / f"expert_{k}_0-{b}.safetensors") for k, b in ((0, 0.4), (1, 0.7))
    ]
    assert torch.equal(counts, torch.stack([expert.stats.counts for expert in experts]))
    assert metadata["fingerprint"] == experts[0].fingerprint
    assert load_run(private, None, "cpu").router_name == "learned"
    assert "4 experts, learned router" in call(
        "sample", private, "--num", 2, "--num-steps", 2, "--device", "cpu",
        "--label", "none", "--out", tmp_path / "x.png",
    )  # fmt: skip


def test_training_from_experts_goes_on_with_the_same_samples(private, tmp_path):
    """Two steps and two more end in the bytes of four: the samples are drawn again, alike."""
    once = Path(shutil.copytree(private, tmp_path / "once"))
    words = ["--from-experts", "--batch-size", 8, "--device", "cpu", "--lr-schedule", "constant"]
    for run, steps in ((private, 2), (private, 4), (once, 4)):
        call("train_router", "--run", run, *words, "--steps", steps)
    name = "router.safetensors"
    assert (private / name).read_bytes() == (once / name).read_bytes()


def test_a_router_of_samples_does_not_go_on_from_one_of_images(grid, tmp_path):
    run = Path(shutil.copytree(grid, tmp_path / "run"))
    call("train_router", "--data", f"npz:{grid / 'few.npz'}", "--run", run, *SHORT)
    refused(run, "train_router", "--run", run, "--from-experts", *SHORT,
            match="from_experts was False and is True")  # fmt: skip


def test_experts_of_no_or_of_two_partitions_have_no_router(private, tmp_path):
    guest = Expert.load(private / "expert_0_0-0.4.safetensors")
    guest.fingerprint, guest.time_interval = "e" * 64, (0.0, 1.0)
    guest.save(private / "expert_guest.safetensors")
    words = ["train_router", "--from-experts", *SHORT, "--run"]
    with pytest.raises(SystemExit):
        call(*words, private)
    assert not (private / "router.safetensors").exists()
    run = tmp_path / "all"
    call("train_expert", "--run", run, "--cluster", "all", *SHORT)
    refused(run, *words, run, match="has experts of 0 partitions: there must be 1")
