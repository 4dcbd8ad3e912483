"""Bad files and full disks, end to end: one sentence before heavy work, and nothing half-written.

What each reader refuses is tested in test_data.py, test_files.py and test_training.py; random
damage in test_fuzz.py. Here are the scripts, flipped bits, absurd sizes, and disks that are full.
"""

import json
import os
import resource
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sample
import train_expert
import train_router
from benchmarks.kill_loop import cut_files, fork, wait
from ddm_min import expert, features, figures, partition, training
from ddm_min.expert import Expert, load_router, read_file, write_file
from ddm_min.router import ShardStats
from ddm_min.run import load_run

SHORT = "--steps 2 --batch-size 4 --model router --device cpu"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Forty pictures in two class folders."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for index in range(20):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A whole run on the digits: partition, experts of three clusters, router."""
    run = tmp_path_factory.mktemp("finished")
    partition.main(["--data", "digits", "--clusters", "3", "--run", str(run)])
    for k in range(3):
        train_expert.main(f"--run {run} --cluster {k} {SHORT}".split())
    train_router.main(f"--run {run} {SHORT}".split())
    return run


def copy(source: Path, target: Path) -> Path:
    for file in source.rglob("*"):
        if file.is_file():
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    return target


def sentence(capsys, main, argv: str) -> str:
    """What main(argv) says when it refuses: one line, exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(argv.split())
    assert end.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    return said[0]


# ---------------------------------------------------------------- scripts, before heavy work


def test_A2_no_script_starts_work_on_a_damaged_folder(tmp_path, capsys, monkeypatch, pictures):
    """Partition, both kinds of training and the distance list the same files, and write nothing."""
    root, run = copy(pictures, tmp_path / "data"), tmp_path / "run"
    partition.main(f"--data folder:{root} --clusters 2 --run {run}".split())
    before = sorted(run.rglob("*"))
    (root / "cat" / "empty.jpg").write_bytes(b"")
    half = (root / "dog" / "0.png").read_bytes()
    (root / "dog" / "half.png").write_bytes(half[: len(half) // 2])

    def work(*args, **kwargs):
        raise AssertionError("heavy work has started")

    for place in (
        (partition.kmeans, "two_stage"),
        (train_expert, "train"),
        (train_router, "train"),
    ):
        monkeypatch.setattr(*place, work)
    monkeypatch.setattr(features, "moments", work)
    data = f"--data folder:{root} --run {run}"
    said = {
        sentence(capsys, partition.main, f"{data} --clusters 2"),
        sentence(capsys, train_expert.main, f"{data} --cluster 0"),
        sentence(capsys, train_expert.main, f"{data} --cluster all"),
        sentence(capsys, train_router.main, data),
        sentence(capsys, features.main, f"digits folder:{root}"),
        sentence(capsys, figures.main, f"routing {data}"),
    }
    assert len(said) == 1
    assert "cannot read 2 of 42 pictures" in next(iter(said))
    assert f"{root}/cat/empty.jpg" in next(iter(said))
    assert f"{root}/dog/half.png" in next(iter(said))
    assert sorted(run.rglob("*")) == before


def test_other_pictures_than_those_of_the_partition_are_refused(tmp_path, capsys, pictures):
    root, run = copy(pictures, tmp_path / "data"), tmp_path / "run"
    partition.main(f"--data folder:{root} --clusters 2 --run {run}".split())
    (root / "dog" / "7.png").unlink()
    for main, words in ((train_expert.main, "--cluster 0"), (train_router.main, "")):
        said = sentence(capsys, main, f"--data folder:{root} --run {run} {words}")
        assert "partition.safetensors was made for other data" in said
    assert not (run / "resume").exists()


BAD_RUNS = {
    "cut": (lambda run: cut(run / "expert_1.safetensors"), "expert_1.safetensors is damaged"),
    "flipped": (lambda run: flip(run / "expert_1.safetensors"), "expert_1.safetensors is damaged"),
    "twice": (
        lambda run: copy_file(run / "expert_1.safetensors", run / "expert_1b.safetensors"),
        "cluster 1",
    ),
    "missing": (lambda run: (run / "expert_2.safetensors").unlink(), "cluster 2"),
    "router cut": (lambda run: cut(run / "router.safetensors"), "router.safetensors is damaged"),
    "router is an expert": (
        lambda run: copy_file(run / "expert_0.safetensors", run / "router.safetensors"),
        "router.safetensors is a expert file",
    ),
    "router of another partition": (
        lambda run: rewrite(run / "router.safetensors", "router", fingerprint="e" * 64),
        "router.safetensors was trained for another partition",
    ),
    "expert of another partition": (
        lambda run: rewrite(run / "expert_0.safetensors", "expert", fingerprint="e" * 64),
        "expert_0.safetensors",
    ),
    "expert of other classes": (
        lambda run: rewrite(run / "expert_2.safetensors", "expert", class_names=list("abcdefghij")),
        "differ in class_names",
    ),
    "newer": (
        lambda run: rewrite(run / "expert_0.safetensors", "expert", format_version=2),
        "has format 2, not up to 1: update ddm_min",
    ),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[-50] ^= 4
    file.write_bytes(bytes(whole))


def copy_file(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def rewrite(file: Path, kind: str, **changes) -> None:
    tensors, metadata = read_file(file, kind)
    write_file(file, kind, tensors, metadata | changes)


@pytest.mark.parametrize("bad", BAD_RUNS)
def test_sampling_from_a_bad_run_says_what_and_writes_nothing(tmp_path, capsys, finished, bad):
    damage, words = BAD_RUNS[bad]
    run, out = copy(finished, tmp_path / "run"), tmp_path / "samples.png"
    damage(run)
    said = sentence(capsys, sample.main, f"{run} --num 4 --num-steps 2 --out {out} --device cpu")
    assert words in said
    assert not out.exists()


# ---------------------------------------------------------------- flipped bits


@pytest.mark.parametrize("name", ["expert_0", "router", "partition", "resume/expert_0"])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path, finished, name):
    """The checksum covers metadata and tensors; the header is checked by safetensors itself."""
    kind = "resume" if "resume" in name else name.split("_")[0]
    whole = (finished / f"{name}.safetensors").read_bytes()
    good = read_file(finished / f"{name}.safetensors", kind)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    file, rng = tmp_path / "x.safetensors", np.random.default_rng(0)
    places = [*rng.integers(0, header, 40), *rng.integers(header, len(whole), 40), len(whole) - 1]
    for position in places:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << rng.integers(8)
        file.write_bytes(bytes(flipped))
        try:
            tensors, metadata = read_file(file, kind)
        except ValueError as error:
            assert str(file) in str(error)
            continue
        assert position < header  # in the name of the checksum itself, which is then not looked at
        assert all(metadata[key] == x for key, x in good[1].items())
        assert all(torch.equal(tensors[key], x) for key, x in good[0].items())


def test_a_file_without_a_checksum_is_read(tmp_path):
    """Of another writer, who has the format from the README."""
    from safetensors.torch import save_file

    text = json.dumps({"format_version": 1, "kind": "thing", "x": 1})
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"ddm_min": text})
    tensors, metadata = read_file(tmp_path / "x.safetensors", "thing")
    assert metadata["x"] == 1
    assert tensors["a"].tolist() == [1, 1]


# ---------------------------------------------------------------- absurd sizes


ABSURD = {
    "width": 10**9,
    "depth": 10**9,
    "num_classes": 10**9,
    "in_channels": 10**9,
    "image_size": [10**6, 10**6],
    "patch_size": 10**9,
}


@pytest.mark.parametrize("field", ABSURD)
@pytest.mark.parametrize("kind", ["expert", "router"])
def test_absurd_sizes_are_refused_before_memory_is_taken(tmp_path, finished, kind, field):
    name = {"expert": "expert_0.safetensors", "router": "router.safetensors"}[kind]
    copy_file(finished / name, tmp_path / name)
    _, metadata = read_file(tmp_path / name, kind)
    rewrite(tmp_path / name, kind, config=metadata["config"] | {field: ABSURD[field]})
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, hard))
    try:
        with pytest.raises(ValueError, match=f"{name} does not describe") as error:
            (Expert.load if kind == "expert" else load_router)(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "allocate" not in str(error.value)


@pytest.mark.parametrize(
    "changes", [dict(num_clusters=10**9), dict(num_clusters=2), dict(fingerprint=None)]
)
def test_a_router_that_does_not_fit_its_tensors_is_refused(tmp_path, finished, changes):
    run = copy(finished, tmp_path / "run")
    rewrite(run / "router.safetensors", "router", **changes)
    with pytest.raises(ValueError, match=r"router\.safetensors"):
        load_run(run, "learned", "cpu")


@pytest.mark.parametrize(
    "changes", [dict(cluster=10**9), dict(cluster=-1), dict(cluster="x"), dict(class_names="abc"),
                dict(class_names=[1, 2]), dict(fingerprint=[])],
)  # fmt: skip
def test_an_expert_that_makes_no_sense_is_refused(tmp_path, finished, changes):
    run = copy(finished, tmp_path / "run")
    rewrite(run / "expert_1.safetensors", "expert", **changes)
    with pytest.raises(ValueError, match=r"expert_1\.safetensors"):
        load_run(run, "gaussian", "cpu")


def test_statistics_whose_shapes_differ_are_refused(finished):
    stats = vars(Expert.load(finished / "expert_0.safetensors").stats)
    ShardStats(**stats)
    for name in ("counts", "means", "basis", "variances", "value_range"):
        with pytest.raises(ValueError, match="do not fit each other"):
            ShardStats(**stats | {name: stats[name][1:]})


def test_a_partition_whose_counts_are_wrong_is_refused(tmp_path, finished):
    file = tmp_path / "partition.safetensors"
    tensors, metadata = read_file(finished / file.name, "partition")
    for change in (
        {"assignment": tensors["assignment"] + 1},
        {"assignment": tensors["assignment"] - 1},
        {"assignment": tensors["assignment"].flip(0) * 0},
        {"counts": tensors["counts"] + 1},
    ):
        write_file(file, "partition", tensors | change, metadata)
        with pytest.raises(ValueError, match=r"partition\.safetensors does not describe"):
            partition.Partition.load(file, partition.data.load("digits"))


# ---------------------------------------------------------------- disks


def limited(argv: str, megabytes: float, after_saves: int):
    """Train, saving every step; after some saves, no file may be larger than so much: EFBIG."""

    def work():
        saves, original = [], training.State.save

        def save(self, *args):
            if len(saves) == after_saves:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                limit = int(megabytes * 2**20)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            saves.append(1)
            original(self, *args)

        training.SAVE_EVERY, training.State.save = 0, save
        train_expert.main(argv.split())

    return work


def test_C7_a_full_disk_while_training_leaves_the_earlier_checkpoint(tmp_path, finished):
    run = tmp_path / "run"
    run.mkdir()
    copy_file(finished / "partition.safetensors", run / "partition.safetensors")
    argv = f"--run {run} --cluster 0 --batch-size 4 --model router --device cpu --steps 6"
    log, place = tmp_path / "log", run / "resume" / "expert_0.safetensors"
    assert wait(fork(limited(argv, 0.1, after_saves=3), log)) == 2
    said = log.read_text()
    assert f"error: cannot write {place}: " in said
    assert "File too large" in said
    assert "Traceback" not in said
    assert len(read_file(place, "resume")[0]["losses"]) == 3  # of the third save
    assert cut_files(run) == []

    # with space again, it goes on and ends where it would have ended
    assert wait(fork(lambda: train_expert.main(argv.split()), log)) == 0
    assert "goes on at step 3" in log.read_text()
    straight = tmp_path / "straight"
    straight.mkdir()
    copy_file(finished / "partition.safetensors", straight / "partition.safetensors")
    train_expert.main(argv.replace(str(run), str(straight)).split())
    name = "expert_0.safetensors"
    assert (run / name).read_bytes() == (straight / name).read_bytes()


@pytest.mark.parametrize("name", ["clusters.png", "partition.safetensors", "samples.npz"])
def test_C7_a_full_disk_elsewhere_is_one_sentence_too(tmp_path, finished, name):
    run = copy(finished, tmp_path / "run")
    before = {file: file.read_bytes() for file in run.rglob("*.*") if file.is_file()}
    bytes_allowed = {"clusters.png": 16_000}.get(name, 1000)

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, bytes_allowed))
        if name == "samples.npz":
            sample.main(f"{run} --num 40 --num-steps 1 --out {run / name} --device cpu".split())
        else:
            partition.main(f"--clusters 3 --run {run}".split())

    log = Path("/dev/shm") / f"{os.getpid()}.log"  # what is printed must not be limited either
    try:
        assert wait(fork(work, log)) == 2
        said = log.read_text()
    finally:
        log.unlink()
    assert "error: " in said
    assert "File too large" in said
    assert "Traceback" not in said
    after = {file: file.read_bytes() for file in run.rglob("*.*") if file.is_file()}
    assert after == before or name == "clusters.png"
    assert cut_files(run) == []


def test_C7_a_file_system_without_space(tmp_path, finished):
    """The real thing, where this user may mount one: 300 kB of memory as a disk."""
    run = tmp_path / "run"
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(run)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        copy_file(finished / "partition.safetensors", run / "partition.safetensors")
        argv = f"--run {run} --cluster 0 --batch-size 4 --device cpu --steps 3"
        log = tmp_path / "log"
        assert wait(fork(lambda: train_expert.main(argv.split()), log)) == 2
        assert "error: cannot write" in log.read_text()
        assert "No space left on device" in log.read_text()
        assert cut_files(run) == []
        assert [x.name for x in run.iterdir() if x.name != "resume"] == ["partition.safetensors"]
    finally:
        subprocess.run(["umount", str(run)], check=True)


def test_G3_an_output_that_cannot_be_written_ends_before_training(tmp_path, capsys, monkeypatch):
    """A folder below a file, which even root cannot make."""
    (tmp_path / "file").write_text("not a folder")

    def work(*args, **kwargs):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(train_expert, "draw_batch", work)
    run = tmp_path / "file" / "run"
    said = sentence(capsys, train_expert.main, f"--run {run} --cluster all {SHORT}")
    assert "Not a directory" in said
    assert str(tmp_path / "file") in said


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("steps", "words"), [(1, "no longer finite"), (5, "loss inf .* at step 1")]
)
def test_B6_weights_that_are_not_finite_are_never_saved(tmp_path, steps, words):
    """A loss is that of the weights before its step: the last step is judged by what it leaves."""
    settings = training.TrainConfig(steps=steps, lr=1e39, warmup=0)
    model = torch.nn.Linear(2, 1)
    loss = lambda model, rng: model(torch.ones(3, 2)).square().sum()  # noqa: E731
    with pytest.raises(FloatingPointError, match=words):
        training.train(model, loss, settings, tmp_path / "x.safetensors", {})
    assert list(tmp_path.iterdir()) == []


def test_B5_fp16_is_refused_on_a_cpu_and_bf16_is_another_run(tmp_path, capsys):
    argv = f"--run {tmp_path} --cluster all {SHORT} --lr-schedule constant"
    said = sentence(capsys, train_expert.main, f"{argv} --precision fp16")
    assert "fp16 training needs a GPU" in said
    train_expert.main(f"{argv} --precision bf16".split())
    said = sentence(capsys, train_expert.main, f"{argv} --precision fp32 --steps 4")
    assert "precision was bf16 and is fp32" in said
    assert expert.read_file(tmp_path / "resume" / "expert_all.safetensors", "resume")


def test_B5_scaled_gradients_are_unscaled_before_they_are_clipped(tmp_path, monkeypatch):
    """fp16's scaler, made to work on the CPU: the steps are those without it, to rounding."""
    scaler = torch.amp.GradScaler

    def losses(scaled: bool, norm_limit: float) -> list[float]:
        made = lambda device, enabled: scaler("cpu", init_scale=65536.0, enabled=scaled)  # noqa: E731
        monkeypatch.setattr(torch.amp, "GradScaler", made)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        settings = training.TrainConfig(steps=12, lr=0.05, warmup=0, clip=norm_limit)
        file = tmp_path / f"{scaled} {norm_limit}.safetensors"
        loss = lambda model, rng: (model(torch.eye(3)) - 1).square().mean()  # noqa: E731
        _, curve = training.train(model, loss, settings, file, {})
        if scaled:
            assert read_file(file, "resume")[1]["scaler"]["scale"] == 65536.0
        return curve

    for limit in (1.0, 0.1):  # above and below the gradients' norms
        assert losses(True, limit) == pytest.approx(losses(False, limit), rel=1e-5)
