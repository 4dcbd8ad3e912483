"""Experts join and leave: what each router makes of the files that are there, and what is lost."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_files import NAMES, inputs, make_expert, save_run
from test_scripts import SHORT, call

from ddm_min.data import load
from ddm_min.ensemble import Ensemble, what_is_lost, whole_clusters
from ddm_min.expert import Expert
from ddm_min.router import gaussian_router, prior_router
from ddm_min.run import Run, choose_labels, load_run

CLOSED = pytest.mark.parametrize("router", ["gaussian", "prior"])


def ensemble_of(run: Run, **more) -> Ensemble:
    """As sample.py makes it."""
    known = dict(num_clusters=len(run.counts), counts=run.counts, num_classes=len(run.class_names))
    return Ensemble(run.experts, run.router, **known, **more)


def closed_form(router: str, experts: list[Expert]):
    """The router that knows nothing but these experts, in this order."""
    if router == "gaussian":
        return gaussian_router([expert.stats for expert in experts], 3)
    return prior_router(torch.stack([expert.stats.counts for expert in experts]), 3)


# ---------------------------------------------------------------- leaving


@CLOSED
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_one_leaves_and_the_others_are_the_population(tmp_path, capsys, router, gone):
    """No flag: the posterior is that of a run which never had the one that left."""
    experts = [
        make_expert(k, seed=k, counts=c) for k, c in enumerate([(4, 2, 1), (1, 1, 5), (2, 2, 2)])
    ]
    save_run(tmp_path, *experts)
    (tmp_path / f"expert_{gone}.safetensors").unlink()
    run = load_run(tmp_path, router, "cpu")
    stay = [k for k in range(3) if k != gone]
    images = sum(int(experts[k].stats.counts.sum()) for k in stay)
    assert f"clusters {stay[0]}, {stay[1]} by their expert files: {images} images" in (
        capsys.readouterr().out
    )
    log_probs = ensemble_of(run).log_probs(*inputs())
    expected = closed_form(router, [experts[k] for k in stay])(*inputs())
    assert torch.allclose(log_probs[:, stay].exp(), expected.exp(), atol=1e-6)
    assert log_probs.exp().sum(1).allclose(torch.ones(5))
    ensemble_of(run).field(torch.tensor([0, 1, 2, 3]), "coupled")


@CLOSED
def test_a_class_that_left_with_its_expert_gets_no_share(tmp_path, router):
    save_run(tmp_path, make_expert(0, counts=(4, 2, 0)), make_expert(1, seed=1, counts=(0, 1, 5)))
    (tmp_path / "expert_1.safetensors").unlink()
    run = load_run(tmp_path, router, "cpu")
    assert choose_labels(None, 4, NAMES, run.drawable_counts).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="knows class 2: no cluster has images of it"):
        ensemble_of(run).field(torch.tensor([2]), "full")


@CLOSED
def test_a_hole_in_the_time_of_a_cluster_that_is_there_stays_an_error(tmp_path, router):
    experts = [make_expert(0), make_expert(2, seed=2, time_interval=(0.0, 0.5))]
    save_run(tmp_path, *experts)
    run = load_run(tmp_path, router, "cpu")
    with pytest.raises(ValueError, match=r"answers for cluster 2 at t from 0\.5 to 1$"):
        ensemble_of(run)
    ensemble_of(run, allow_missing=True)


def test_a_learned_router_misses_an_expert_by_name_and_share(tmp_path, capsys):
    save_run(tmp_path, *(make_expert(k, seed=k) for k in range(3)), router_fingerprint="f" * 64,
             clusters=3)  # fmt: skip
    load_run(tmp_path, None, "cpu")
    assert capsys.readouterr().out == ""
    (tmp_path / "expert_2.safetensors").unlink()
    run = load_run(tmp_path, None, "cpu")
    expected = "clusters 2 cannot be drawn: 33.3% of the images, part of classes cat, dog, eel"
    assert expected in capsys.readouterr().out
    with pytest.raises(ValueError, match="no expert answers for cluster 2 at t from 0 to 1"):
        ensemble_of(run)
    log_probs = ensemble_of(run, allow_missing=True).log_probs(*inputs())
    assert torch.allclose(log_probs[:, :2], run.router(*inputs())[:, :2].log_softmax(1), atol=1e-6)


def test_what_is_lost_names_clusters_share_and_classes():
    class Piece:
        def __init__(self, cluster, low=0.0, high=1.0):
            self.cluster, self.time_interval = cluster, (low, high)

    counts = torch.tensor([[6, 3, 0, 0], [0, 1, 4, 0], [1, 1, 0, 4]])
    names = ["ant", "bee", "cat", "dog"]
    assert what_is_lost([Piece(0), Piece(1), Piece(2)], counts, names) == ""
    assert what_is_lost([Piece("all", 0, 0.5), Piece("all", 0.5, 1)], counts, names) == ""
    assert what_is_lost([Piece(0), Piece(2)], counts, names) == (
        "clusters 1 cannot be drawn: 25.0% of the images, all of class cat, part of class bee"
    )
    half = [Piece(0), Piece(1, 0, 0.5)]  # a cluster is drawn all the way or not at all
    assert whole_clusters(half, 3) == [True, False, False]
    assert what_is_lost(half, counts, names) == (
        "clusters 1, 2 cannot be drawn: 55.0% of the images, all of classes cat, dog, "
        "part of classes ant, bee"
    )
    assert what_is_lost([Piece(0)], counts[:, :1], []) == (
        "clusters 1, 2 cannot be drawn: 14.3% of the images"
    )
    assert what_is_lost([Piece(0)], torch.tensor([[5], [0]]), []) == ""  # an empty one


def test_without_a_label_classes_are_those_that_can_be_drawn(tmp_path):
    """--allow-missing with a learned router: a class that is wholly lost is not asked for."""
    from ddm_min.expert import load_router, save_router

    save_run(tmp_path, make_expert(0), router_fingerprint="f" * 64)
    file = tmp_path / "router.safetensors"
    router, _, _ = load_router(file)
    save_router(file, router, torch.tensor([[4, 2, 0], [0, 1, 5]]), fingerprint="f" * 64)
    run = load_run(tmp_path, None, "cpu")
    assert run.counts.tolist() == [[4, 2, 0], [0, 1, 5]]
    assert run.drawable_counts.tolist() == [[4, 2, 0], [0, 0, 0]]


# ---------------------------------------------------------------- joining


@CLOSED
def test_a_fifth_expert_of_another_partition_joins(tmp_path, capsys, router):
    """Its file is called as one likes, its cluster is counted on, and the posterior knows it."""
    experts = [make_expert(k, seed=k, counts=(4 + k, 2, 1)) for k in range(4)]
    guests = [
        make_expert(0, seed=8, counts=(1, 1, 7), fingerprint="e" * 64, time_interval=(0.0, 0.5)),
        make_expert(0, seed=8, counts=(1, 1, 7), fingerprint="e" * 64, time_interval=(0.5, 1.0)),
        make_expert(3, seed=9, counts=(2, 1, 2), fingerprint="e" * 64),
    ]
    save_run(tmp_path, *experts)
    for name, guest in zip(("new_a", "new_b", "x"), guests, strict=True):
        guest.save(tmp_path / f"expert_{name}.safetensors")
    run = load_run(tmp_path, router, "cpu")
    printed = capsys.readouterr()
    assert "clusters 0, 1, 2, 3, 4, 5 by their expert files: 48 images" in printed.out
    assert "come from different partitions: an image in both counts twice" in printed.err
    assert [expert.cluster for expert in run.experts] == [0, 1, 2, 3, 4, 4, 5]
    assert run.counts.tolist()[4:] == [[1, 1, 7], [2, 1, 2]]
    log_probs = ensemble_of(run).log_probs(*inputs())
    expected = closed_form(router, [*experts, guests[0], guests[2]])(*inputs())
    assert torch.allclose(log_probs, expected, atol=1e-6)


@pytest.mark.parametrize("router", [None, "learned"])
def test_a_learned_router_refuses_a_guest_and_says_what_can_join_it(tmp_path, router):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1), router_fingerprint="f" * 64)
    make_expert(0, seed=8, fingerprint="e" * 64).save(tmp_path / "expert_new.safetensors")
    with pytest.raises(ValueError, match=r"different partitions, which only --router gaussian or"):
        load_run(tmp_path, router, "cpu")


@pytest.mark.parametrize("router", ["gaussian", "prior"])
def test_an_expert_that_says_nothing_of_its_data_cannot_be_routed_in_closed_form(tmp_path, router):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1, stats=None))
    with pytest.raises(ValueError, match=f"cluster 1 has no statistics .* --router {router} needs"):
        load_run(tmp_path, router, "cpu")


@CLOSED
def test_statistics_of_another_number_of_classes_are_refused(tmp_path, router):
    expert = make_expert(1, seed=1)
    expert.stats.counts, expert.stats.means = expert.stats.counts[:2], expert.stats.means[:2]
    save_run(tmp_path, make_expert(0), expert)
    with pytest.raises(ValueError, match="the expert of cluster 1 counts 2 classes"):
        load_run(tmp_path, router, "cpu")


def test_more_than_one_silent_expert_is_named(tmp_path):
    save_run(tmp_path, make_expert(0, stats=None), make_expert(2, seed=1, stats=None))
    with pytest.raises(ValueError, match="cluster 0, 2 has no statistics"):
        load_run(tmp_path, "prior", "cpu")


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("two")
    call("partition", "--data", "digits", "--clusters", 2, "--fine", 8, "--run", run)
    for k in range(2):
        call("train_expert", "--run", run, "--cluster", k, *SHORT)
    return run


@CLOSED
def test_joining_and_leaving_through_the_command_lines(run_of_two, tmp_path, router):
    run = Path(shutil.copytree(run_of_two, tmp_path / "run"))
    words = ["sample", run, "--router", router, "--num", 4, "--num-steps", 2, "--device", "cpu"]
    words += ["--strategy", "full", "--out", tmp_path / "x.npz"]
    digits = load("digits")
    np.savez(tmp_path / "new.npz", arr_0=digits.images[::9].permute(0, 2, 3, 1).numpy(),
             arr_1=digits.labels[::9].numpy())  # fmt: skip
    common = ["--data", f"npz:{tmp_path / 'new.npz'}", "--run", tmp_path / "new"]
    call("partition", *common, "--clusters", 1)
    call("train_expert", *common, "--cluster", 0, *SHORT)
    shutil.copy(tmp_path / "new" / "expert_0.safetensors", run / "expert_new.safetensors")
    out = call(*words)
    assert "clusters 0, 1, 2 by their expert files: 1,997 images" in out
    assert f"3 experts, {router} router" in out
    (run / "expert_0.safetensors").unlink()
    (run / "expert_1.safetensors").unlink()
    assert "clusters 0 by their expert files: 200 images" in call(*words)
