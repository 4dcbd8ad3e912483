"""Expert, router and partition files: bitwise round trips, refusals that name the file."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddm_min import expert as expert_module
from ddm_min.dit import DiT, DiTConfig
from ddm_min.ensemble import Ensemble
from ddm_min.expert import (
    Expert,
    load_router,
    read_file,
    replacing,
    save_router,
    schedule_from_dict,
    schedule_to_dict,
    write_file,
)
from ddm_min.objectives import DDPM, FLOW, Objective
from ddm_min.partition import Partition
from ddm_min.router import LearnedRouter, ShardStats
from ddm_min.run import load_run
from ddm_min.schedule import Betas, Cosine, Linear

NAMES = ["cat", "dog", "eel"]


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def config(**changes) -> DiTConfig:
    usual = dict(
        in_channels=1, image_size=(4, 6), num_classes=3, patch_size=2, width=8, depth=2, heads=2
    )
    return DiTConfig(**usual | changes)


def make_expert(cluster=0, seed=0, counts=(4, 2, 1), **changes) -> Expert:
    """A small expert with random weights; changes of the network's shape go to its config."""
    shape = {k: changes.pop(k) for k in ("image_size", "in_channels", "num_classes", "modulation")
             if k in changes}  # fmt: skip
    model = randomised(DiT(config(**shape)), seed)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    images = torch.rand(sum(counts), 1, 4, 6, generator=generator) * 2 - 1
    usual = dict(
        objective=FLOW, cluster=cluster, stats=ShardStats.measure(images, labels, 3),
        class_names=NAMES, fingerprint="f" * 64, label_dropout=0.1, step=7, seed=seed,
    )  # fmt: skip
    return Expert(model, **usual | changes)


def make_router(clusters: int = 2) -> LearnedRouter:
    return randomised(LearnedRouter(config(), clusters), seed=9)


def make_partition() -> Partition:
    assignment = torch.tensor([0, 1, 0, 2, 0, 1])
    counts = torch.tensor([[1, 1, 1], [2, 0, 0], [0, 0, 1]])
    return Partition(assignment, counts, NAMES, "d" * 64, "pixels", 3)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x_t = torch.randn(5, 1, 4, 6, generator=generator)
    return x_t, torch.rand(5, generator=generator), torch.tensor([0, 1, 2, 3, 1])


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("modulation", ["single", "per-block"])
@pytest.mark.parametrize(
    "objective",
    [FLOW, DDPM, Objective("x0", Betas.ddpm(7), "velocity"), Objective("v", Cosine(), "eps")],
)
def test_expert_round_trip_is_bitwise(tmp_path, objective, modulation):
    made = make_expert(
        cluster=2, objective=objective, modulation=modulation, time_interval=(0.25, 0.75),
        latents=True,
    )  # fmt: skip
    made.save(tmp_path / made.file_name)
    back = Expert.load(tmp_path / made.file_name)
    for name, weights in made.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], weights)
    for name, value in vars(made.stats).items():
        assert torch.equal(getattr(back.stats, name), value)
    assert back.model.config == made.model.config
    for name in ("objective", "cluster", "time_interval", "class_names", "fingerprint",
                 "label_dropout", "step", "seed", "latents", "image_shape"):  # fmt: skip
        assert getattr(back, name) == getattr(made, name), name
    assert torch.equal(back.model(*inputs()), made.model(*inputs()))


def test_loaded_expert_is_ready_to_be_sampled(tmp_path):
    make_expert().save(tmp_path / "x.safetensors")
    model = Expert.load(tmp_path / "x.safetensors").model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_expert_without_statistics_and_without_classes(tmp_path):
    made = Expert(randomised(DiT(config(num_classes=0)), 1), FLOW)
    made.save(tmp_path / "x.safetensors")
    back = Expert.load(tmp_path / "x.safetensors")
    assert back.stats is None
    assert back.cluster == "all"
    assert back.class_names == []
    assert back.time_interval == (0.0, 1.0)


def test_expert_files_are_named_by_cluster_and_interval():
    assert make_expert(cluster=2).file_name == "expert_2.safetensors"
    named = make_expert(cluster="all", time_interval=(0.0, 0.33)).file_name
    assert named == "expert_all_0-0.33.safetensors"


@pytest.mark.parametrize("interval", [(0.5, 0.5), (0.7, 0.3), (-0.1, 1.0), (0.0, 1.5)])
def test_an_impossible_time_interval_is_refused(interval):
    with pytest.raises(ValueError, match="time interval"):
        make_expert(time_interval=interval)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Betas.ddpm(5)])
def test_schedules_survive_json(schedule):
    stored = json.loads(json.dumps(schedule_to_dict(schedule)))
    assert schedule_from_dict(stored) == schedule


def test_router_round_trip_is_bitwise(tmp_path):
    router, counts = make_router(), torch.tensor([[4, 2, 1], [0, 3, 0]])
    save_router(tmp_path / "router.safetensors", router, counts, fingerprint="f", step=3)
    back, back_counts, metadata = load_router(tmp_path / "router.safetensors")
    assert torch.equal(back(*inputs()), router(*inputs()))
    assert torch.equal(back_counts, counts)
    assert (metadata["fingerprint"], metadata["step"]) == ("f", 3)
    assert not back.training


def test_files_hold_no_pickle_and_one_metadata_entry(tmp_path):
    make_expert().save(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert list(file.metadata()) == ["ddm_min"]
        metadata = json.loads(file.metadata()["ddm_min"])
        assert {name.split(".")[0] for name in file.keys()} == {"model", "stats"}
    assert (metadata["format_version"], metadata["kind"]) == (1, "expert")


# ---------------------------------------------------------------- bad files


def write_all(folder: Path) -> dict[str, Path]:
    """One good file of each kind that is shipped."""
    files = {kind: folder / f"{kind}.safetensors" for kind in ("expert", "router", "partition")}
    make_expert().save(files["expert"])
    save_router(files["router"], make_router(), torch.ones(2, 3), fingerprint="f")
    make_partition().save(files["partition"])
    return files


class AnyData:
    """Stands for a dataset with the fingerprint of `make_partition`."""

    def fingerprint(self):
        return "d" * 64


LOADERS = {
    "expert": Expert.load,
    "router": load_router,
    "partition": lambda path: Partition.load(path, AnyData()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_missing_file_is_named(tmp_path, kind):
    with pytest.raises(ValueError, match=f"there is no {kind} file {tmp_path}/x.safetensors"):
        LOADERS[kind](tmp_path / "x.safetensors")


@pytest.mark.parametrize("kind", LOADERS)
def test_a_newer_format_is_refused(tmp_path, kind, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(expert_module, "FORMAT_VERSION", 99)
        file = write_all(tmp_path)[kind]
    with pytest.raises(ValueError, match=r"has format 99, not up to 1: update ddm_min") as error:
        LOADERS[kind](file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("kind", LOADERS)
def test_another_kind_is_refused(tmp_path, kind):
    for other, file in write_all(tmp_path).items():
        if other != kind:
            with pytest.raises(ValueError, match=f"is a {other} file, not a {kind} file"):
                LOADERS[kind](file)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_truncated_file_is_refused_by_name(tmp_path, kind):
    file = write_all(tmp_path)[kind]
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in (0, 1, 8, 9, header // 2, header - 1, header, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is damaged or not a ddm_min file") as error:
            LOADERS[kind](file)
        assert str(file) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", LOADERS)
def test_other_content_is_refused_by_name(tmp_path, kind):
    file = tmp_path / "x.safetensors"
    for text in (b"", b"hello", b"\xff" * 100, b"{}" * 50, struct.pack("<Q", 2) + b"{}"):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=str(file)):
            LOADERS[kind](file)
    for metadata in (None, {"other": "x"}, {"ddm_min": "no json"}, {"ddm_min": "[]"},
                     {"ddm_min": "{}"}, {"ddm_min": '{"format_version": "1", "kind": "x"}'},
                     {"ddm_min": json.dumps({"format_version": 1, "kind": kind})}):  # fmt: skip
        save_file({"x": torch.zeros(2)}, file, metadata=metadata)
        with pytest.raises(ValueError, match=str(file)):
            LOADERS[kind](file)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", LOADERS)
def test_flipped_bits_in_the_header_are_refused_by_name_or_harmless(tmp_path, kind):
    """Every seventh byte of the header, one bit each: an answer or a sentence, no accident."""
    file = write_all(tmp_path)[kind]
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    refused = 0
    for position in range(0, header, 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position // 7 % 8)
        file.write_bytes(bytes(flipped))
        try:
            LOADERS[kind](file)
        except ValueError as error:
            refused += 1
            assert str(file) in str(error), error
            assert "\n" not in str(error)
    assert refused > header / 7 / 2  # most flips break a name, a number or the syntax


def rewrite(file: Path, kind: str, change) -> None:
    """Change tensors and metadata of a file in place."""
    tensors, metadata = read_file(file, kind)
    change(tensors, metadata)
    metadata.pop("format_version"), metadata.pop("kind")
    write_file(file, kind, tensors, metadata)


CHANGES = {
    "expert": {
        "width": lambda t, m: m["config"].update(width=16),
        "depth": lambda t, m: m["config"].update(depth=3),
        "no heads": lambda t, m: m["config"].update(heads=0),
        "no patch": lambda t, m: m["config"].update(patch_size=0),
        "odd patch": lambda t, m: m["config"].update(patch_size=4),
        "classes": lambda t, m: m["config"].update(num_classes=4),
        "unknown field": lambda t, m: m["config"].update(dropout=0.1),
        "no config": lambda t, m: m.pop("config"),
        "config is text": lambda t, m: m.update(config="tiny"),
        "no objective": lambda t, m: m.pop("objective"),
        "objective is null": lambda t, m: m.update(objective=None),
        "unknown prediction": lambda t, m: m["objective"].update(prediction="noise"),
        "unknown schedule": lambda t, m: m["objective"].update(schedule={"name": "Sigmoid"}),
        "wrong betas": lambda t, m: m["objective"].update(
            schedule={"name": "Betas", "betas": [2.0]}
        ),
        "no interval": lambda t, m: m.pop("time_interval"),
        "short interval": lambda t, m: m.update(time_interval=[0.5]),
        "odd interval": lambda t, m: m.update(time_interval=[0.5, 0.2]),
        "missing weight": lambda t, m: t.pop("model.head.bias"),
        "extra weight": lambda t, m: t.update({"model.extra": torch.zeros(1)}),
        "missing statistic": lambda t, m: t.pop("stats.rest"),
    },
    "router": {
        "clusters": lambda t, m: m.update(num_clusters=5),
        "no clusters": lambda t, m: m.pop("num_clusters"),
        "no counts": lambda t, m: t.pop("counts"),
        "missing weight": lambda t, m: t.pop("model.head.bias"),
        "width": lambda t, m: m["config"].update(width=16),
    },
    "partition": {
        "no seed": lambda t, m: m.pop("seed"),
        "no fingerprint": lambda t, m: m.pop("data_fingerprint"),
        "no counts": lambda t, m: t.pop("counts"),
        "extra tensor": lambda t, m: t.update(extra=torch.zeros(1)),
    },
}


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, name) for kind, names in CHANGES.items() for name in names]
)
def test_metadata_that_does_not_match_is_refused_by_name(tmp_path, kind, change):
    file = write_all(tmp_path)[kind]
    LOADERS[kind](file)
    rewrite(file, kind, CHANGES[kind][change])
    with pytest.raises(ValueError, match=str(file)) as error:
        LOADERS[kind](file)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- writing


def fail_half_way(tensors, path, metadata=None):
    Path(path).write_bytes(b"half of a file")
    raise SafetensorError("No space left on device (os error 28)")


def test_C7_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "expert_0.safetensors"
    make_expert(seed=1).save(file)
    before = file.read_bytes()
    monkeypatch.setattr(expert_module, "save_file", fail_half_way)
    with pytest.raises(OSError, match=f"cannot write {file}: No space left"):
        make_expert(seed=2).save(file)
    assert file.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["expert_0.safetensors"]


def test_C7_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        fail = KeyboardInterrupt()
        Path(args[1]).write_bytes(b"half")
        raise fail

    monkeypatch.setattr(expert_module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_expert().save(tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_C7_leftovers_of_a_killed_write_are_no_experts(tmp_path):
    make_expert().save(tmp_path / "expert_0.safetensors")
    (tmp_path / ".expert_0.4711.tmp.safetensors").write_bytes(b"half")
    assert len(load_run(tmp_path, "gaussian", "cpu").experts) == 1


def test_replacing_makes_folders_and_keeps_the_suffix(tmp_path):
    file = tmp_path / "a" / "b" / "x.npz"
    with replacing(file) as temporary:
        assert temporary.suffix == ".npz"  # numpy appends it otherwise
        assert temporary.parent == file.parent
        temporary.write_text("new")
        assert not file.exists()
    assert file.read_text() == "new"
    assert list(file.parent.iterdir()) == [file]


def test_G3_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="file"):
        make_expert().save(tmp_path / "file" / "x.safetensors")


# ---------------------------------------------------------------- files that belong together


def save_run(folder: Path, *experts: Expert, router_fingerprint: str | None = None, clusters=2):
    for expert in experts:
        expert.save(folder / expert.file_name)
    if router_fingerprint:
        save_router(
            folder / "router.safetensors", make_router(clusters), torch.full((clusters, 3), 2),
            fingerprint=router_fingerprint,
        )  # fmt: skip


def test_a_run_is_read_with_its_router(tmp_path):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1), router_fingerprint="f" * 64)
    run = load_run(tmp_path, None, "cpu")
    assert run.router_name == "learned"
    assert [expert.cluster for expert in run.experts] == [0, 1]
    assert run.class_names == NAMES
    assert run.counts.tolist() == [[2, 2, 2], [2, 2, 2]]  # of the router's file


def test_a_run_without_a_router_file_uses_the_gaussian_one(tmp_path):
    save_run(tmp_path, make_expert(0, counts=(4, 2, 1)), make_expert(1, seed=1, counts=(1, 1, 5)))
    run = load_run(tmp_path, None, "cpu")
    assert run.router_name == "gaussian"
    assert run.counts.tolist() == [[4, 2, 1], [1, 1, 5]]
    log_probs = run.router(*inputs())
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(5))


def test_the_prior_router_counts_images(tmp_path):
    save_run(tmp_path, make_expert(0, counts=(4, 2, 1)), make_expert(1, seed=1, counts=(1, 1, 5)))
    x_t, t, _ = inputs()
    log_probs = load_run(tmp_path, "prior", "cpu").router(x_t[:2], t[:2], torch.tensor([2, 3]))
    assert torch.allclose(log_probs.exp(), torch.tensor([[1 / 6, 5 / 6], [0.5, 0.5]]))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (dict(image_size=(4, 8)), "image_shape"),
        (dict(in_channels=2), "image_shape"),
        (dict(class_names=["cat", "eel", "dog"]), "class_names"),
        (dict(class_names=["cat", "dog"]), "class_names"),
        (dict(latents=True), "latents"),
    ],
)
def test_experts_that_differ_are_refused_with_both_files(tmp_path, changes, what):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1, **changes))
    with pytest.raises(ValueError, match=f"differ in {what}") as error:
        load_run(tmp_path, None, "cpu")
    for name in ("expert_0.safetensors", "expert_1.safetensors"):
        assert str(tmp_path / name) in str(error.value)


def test_experts_of_different_partitions_are_refused(tmp_path):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1, fingerprint="e" * 64))
    with pytest.raises(ValueError, match=r"expert_0\.s.*expert_1\.s.* different partitions"):
        load_run(tmp_path, None, "cpu")


def test_a_router_of_another_partition_is_refused(tmp_path):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1), router_fingerprint="e" * 64)
    with pytest.raises(ValueError, match=r"router\.safetensors was trained for another partition"):
        load_run(tmp_path, None, "cpu")
    load_run(tmp_path, "gaussian", "cpu")  # needs no router file


def test_an_expert_beyond_the_routers_clusters_is_refused(tmp_path):
    experts = [make_expert(k, seed=k) for k in range(3)]
    save_run(tmp_path, *experts, router_fingerprint="f" * 64, clusters=2)
    with pytest.raises(ValueError, match="knows 2 clusters and there is an expert for cluster 2"):
        load_run(tmp_path, None, "cpu")


def test_a_run_without_experts_and_a_run_without_the_asked_router(tmp_path):
    with pytest.raises(ValueError, match=f"there are no expert files in {tmp_path}"):
        load_run(tmp_path, None, "cpu")
    save_run(tmp_path, make_expert(0))
    with pytest.raises(ValueError, match=f"there is no router file {tmp_path}/router.safetensors"):
        load_run(tmp_path, "learned", "cpu")


def test_a_lone_expert_without_statistics_is_a_run(tmp_path):
    save_run(tmp_path, make_expert("all", stats=None, fingerprint=""))
    run = load_run(tmp_path, None, "cpu")
    x_t, t, labels = inputs()
    ensemble = Ensemble(run.experts, run.router, counts=run.counts, num_classes=3)
    velocity = ensemble.field(labels, "full")(x_t, t)
    # the conversion solves for x0 and eps in float32 and adds them up again
    assert torch.allclose(velocity, run.experts[0].model(x_t, t, labels), atol=1e-4)


def test_a_damaged_expert_among_good_ones_is_named(tmp_path):
    save_run(tmp_path, make_expert(0), make_expert(1, seed=1))
    file = tmp_path / "expert_1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        load_run(tmp_path, None, "cpu")


def test_interval_experts_of_all_clusters_are_one_run(tmp_path):
    save_run(
        tmp_path,
        make_expert("all", time_interval=(0.0, 0.5), fingerprint=""),
        make_expert("all", seed=1, time_interval=(0.5, 1.0), fingerprint=""),
    )
    run = load_run(tmp_path, None, "cpu")
    assert len(run.experts) == 2
    assert run.counts.tolist() == [[4, 2, 1]]
    assert torch.equal(run.router(*inputs()), torch.zeros(5, 1))
