"""Islands that have nothing but their own pictures, and the script that runs them all."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sample
import train_expert
from ddm_min import data, partition
from ddm_min.expert import Expert
from ddm_min.run import load_run

ROOT = Path(__file__).parent.parent
SHORT = "--steps 3 --batch-size 4 --model router --device cpu"


def partitioned(folder: Path, name: str, clusters: int = 3) -> tuple[Path, Path]:
    """(RUN, exported folder) of a dataset."""
    run, islands = folder / "run", folder / "islands"
    argv = f"--data {name} --clusters {clusters} --run {run} --export {islands}"
    partition.main(argv.split())
    return run, islands


def island(islands: Path, k: int, run: Path, more: str = "") -> list[str]:
    """The arguments of an island that has only its shard."""
    where = f"--data folder:{islands}/cluster_{k} --classes {islands}/classes.json"
    return f"{where} --cluster {k} --run {run} {SHORT} {more}".split()


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> tuple[Path, Path]:
    return partitioned(tmp_path_factory.mktemp("digits"), "digits")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[str, Path, Path]:
    """(dataset, RUN, exported folder): colour pictures in three classes, split by class."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for c, name in enumerate(("ant", "bee", "cow")):
        (root / "data" / name).mkdir(parents=True)
        for index in range(12):
            pixels = 80 * c + rng.integers(0, 90, (8, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "data" / name / f"{index}.png")
    name = f"folder:{root / 'data'}"
    return name, *partitioned(root, name)


# ---------------------------------------------------------------- what is exported


def test_export_has_every_picture_once_under_its_class(digits):
    _, islands = digits
    whole, found = data.load("digits"), {}
    stored = json.loads((islands / "classes.json").read_text())
    for k, counts in enumerate(stored["counts"]):
        for file in (islands / f"cluster_{k}").rglob("*.png"):
            assert file.parent.parent == islands / f"cluster_{k}"
            row = int(file.stem)
            assert row not in found
            found[row] = k
            assert whole.class_names[whole.labels[row]] == file.parent.name
            assert np.array_equal(np.asarray(Image.open(file)), whole.images[row, 0])
        shard = data.load(f"folder:{islands}/cluster_{k}")
        assert sum(counts) == len(shard)
    assert len(found) == len(whole)
    assert stored["class_names"] == whole.class_names
    assert stored["image_shape"] == [1, 8, 8]


def test_classes_without_pictures_need_no_folder(digits):
    _, islands = digits
    present = [{x.name for x in (islands / f"cluster_{k}").iterdir()} for k in range(3)]
    assert any(len(names) < 10 for names in present)
    assert set().union(*present) == set("0123456789")


def test_a_dataset_without_classes_is_exported_too(tmp_path):
    (tmp_path / "data").mkdir()
    for index in range(20):
        pixels = np.full((8, 8, 3), 12 * index, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / f"{index:02}.png")
    run, islands = partitioned(tmp_path, f"folder:{tmp_path / 'data'}", 2)
    assert {x.suffix for x in (islands / "cluster_0").iterdir()} == {".png"}
    train_expert.main(island(islands, 0, run))
    expert = Expert.load(run / "expert_0.safetensors")
    assert expert.class_names == []
    assert int(expert.stats.counts.sum()) == len(list((islands / "cluster_0").iterdir()))


def test_latents_cannot_be_pictures(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", arr_0=np.random.default_rng(0).random((20, 4, 2, 2), "float32"))
    with pytest.raises(SystemExit):
        partitioned(tmp_path, f"npz:{tmp_path / 'x.npz'}", 2)
    assert "only pictures can be exported" in capsys.readouterr().err


# ---------------------------------------------------------------- an island with its shard alone


def test_labels_keep_their_numbers_where_the_shard_lacks_classes(digits, tmp_path):
    run, islands = digits
    whole = data.load("digits")
    split = partition.Partition.load(run / "partition.safetensors", whole)
    for k in range(3):
        shard, number, fingerprint = partition.exported_shard(
            data.load(f"folder:{islands}/cluster_{k}"), islands / "classes.json", str(k)
        )
        expected = whole.subset(split.assignment == k)
        assert (number, fingerprint) == (k, split.fingerprint)
        assert shard.class_names == whole.class_names
        assert shard.images.shape == expected.images.shape  # gray stays gray
        rows = [
            sorted(
                (label, image.numpy().tobytes())
                for image, label in zip(
                    x.images[torch.arange(len(x))], x.labels.tolist(), strict=True
                )
            )
            for x in (shard, expected)
        ]
        assert rows[0] == rows[1]


def test_experts_of_such_islands_join_the_others(digits, tmp_path, capsys):
    """Two islands with their shard alone, one with all data; sampled together, label by name."""
    run, islands = digits
    for k in (0, 1):
        home = tmp_path / f"island_{k}"
        train_expert.main(island(islands, k, home))
        (tmp_path / f"expert_{k}.safetensors").write_bytes(
            (home / f"expert_{k}.safetensors").read_bytes()
        )
    (tmp_path / "partition.safetensors").write_bytes((run / "partition.safetensors").read_bytes())
    train_expert.main(f"--run {tmp_path} --cluster 2 {SHORT}".split())
    joined = load_run(tmp_path, None, "cpu")
    split = partition.Partition.load(run / "partition.safetensors", data.load("digits"))
    assert [expert.cluster for expert in joined.experts] == [0, 1, 2]
    assert {expert.fingerprint for expert in joined.experts} == {split.fingerprint}
    assert torch.equal(joined.counts, split.counts)
    out = tmp_path / "threes.png"
    sample.main(f"{tmp_path} --num 4 --num-steps 2 --label 3 --out {out} --device cpu".split())
    assert out.exists()


def test_the_shard_alone_trains_the_same_expert_to_the_last_bit(photos, tmp_path):
    """A folder dataset keeps its order when it is exported, so that even batches are the same."""
    name, run, islands = photos
    train_expert.main(f"--data {name} --cluster 1 --run {run} {SHORT}".split())
    train_expert.main(island(islands, 1, tmp_path))
    for place in ("expert_1.safetensors", "resume/expert_1.safetensors"):
        assert (run / place).read_bytes() == (tmp_path / place).read_bytes()


def refusal(capsys, argv: list[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train_expert.main(argv)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_another_clusters_folder_is_refused(digits, tmp_path, capsys):
    _, islands = digits
    argv = " ".join(island(islands, 1, tmp_path)).replace("--cluster 1", "--cluster 2").split()
    said = refusal(capsys, argv)
    assert f"--data is not cluster 2 of {islands}/classes.json" in said
    assert list(tmp_path.iterdir()) == []


def test_lost_and_foreign_pictures_are_noticed(photos, tmp_path, capsys):
    _, _, islands = photos
    copied = tmp_path / "islands"
    for file in islands.rglob("*.*"):
        place = copied / file.relative_to(islands)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            place.write_bytes(file.read_bytes())
    folder = next(path for path in (copied / "cluster_0").iterdir())
    files = sorted(folder.iterdir())
    lost = files[0].read_bytes()
    files[0].unlink()
    said = refusal(capsys, island(copied, 0, tmp_path / "run"))
    assert f"'{folder.name}': {len(files) - 1}" in said
    assert f"'{folder.name}': {len(files)}" in said
    files[0].write_bytes(lost)
    train_expert.main(island(copied, 0, tmp_path / "run"))
    folder.rename(folder.with_name("elk"))
    assert "'elk'" in refusal(capsys, island(copied, 0, tmp_path / "run"))


@pytest.mark.parametrize("number", ["3", "-1", "all", "x"])
def test_a_cluster_that_was_not_exported_is_refused(digits, tmp_path, capsys, number):
    _, islands = digits
    argv = island(islands, 0, tmp_path)
    argv[argv.index("--cluster") + 1] = number
    said = refusal(capsys, argv)
    assert number in said
    assert "of 3" in said or "but 3" in said or "expected" in said


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"class_names": 3}', None])
def test_a_bad_class_list_is_named(digits, tmp_path, capsys, text):
    _, islands = digits
    file = tmp_path / "classes.json"
    if text is not None:
        file.write_text(text)
    argv = island(islands, 0, tmp_path)
    argv[argv.index("--classes") + 1] = str(file)
    assert f"error: {file} does not describe an exported partition" in refusal(capsys, argv)


# ---------------------------------------------------------------- islands.sh

PYTHON = """#!/usr/bin/env bash
# Stands for python: notes its arguments, fails once for cluster 1, else makes the expert file.
echo "$@" >> {notes}
while [[ $# -gt 0 ]]; do
  case $1 in --cluster) k=$2 ;; --run) run=$2 ;; esac
  shift
done
[[ $k == 1 && ! -e {failed} ]] && touch {failed} && exit 2
mkdir -p "$run" && echo "$k" > "$run/expert_$k.safetensors"
"""
SBATCH = """#!/usr/bin/env bash
# Stands for SLURM: runs the jobs of an array one after the other.
echo "$@" >> {notes}.sbatch
while [[ $1 == --* ]]; do
  case $1 in --array=*) array=${{1#--array=}} ;; esac
  shift
done
status=0
for k in $(seq "${{array%-*}}" "${{array#*-}}"); do
  SLURM_ARRAY_TASK_ID=$k bash "$@" || status=1
done
exit $status
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with stand-ins for python and sbatch on the path; returns what they note."""
    notes, tools = tmp_path / "notes", tmp_path / "bin"
    tools.mkdir()
    for name, text in (("fake_python", PYTHON), ("sbatch", SBATCH)):
        (tools / name).write_text(text.format(notes=notes, failed=tmp_path / "failed"))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", "fake_python")
    return notes


def run_islands(how: str, islands: Path, run: Path) -> subprocess.CompletedProcess:
    command = ["./islands.sh", how, islands, run, "--steps", "3", "--flip"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("how", ["one-by-one", "parallel", "slurm"])
def test_islands_are_run_collected_and_started_again_after_a_failure(
    digits, tmp_path, machine, how
):
    _, islands = digits
    run = tmp_path / "collected"
    first = run_islands(how, islands, run)
    assert first.returncode == 1
    assert "an island failed: start the same command again" in first.stderr
    assert not list(run.glob("*.safetensors"))  # an incomplete ensemble is not collected
    assert (run / "island_2" / "expert_2.safetensors").exists()  # the others have gone on

    second = run_islands(how, islands, run)
    assert second.returncode == 0, second.stderr
    assert f"3 islands are collected in {run}" in second.stdout
    for k in range(3):
        assert (run / f"expert_{k}.safetensors").read_text() == f"{k}\n"
    told = sorted(set(machine.read_text().splitlines()))
    assert told == [
        f"train_expert.py --data folder:{islands}/cluster_{k} --classes {islands}/classes.json "
        f"--cluster {k} --run {run}/island_{k} --steps 3 --flip"
        for k in range(3)
    ]
    if how == "slurm":
        asked = Path(f"{machine}.sbatch").read_text()
        for option in ("--array=0-2", "--requeue", "--wait", "--signal=B:TERM@120"):
            assert option in asked


def test_islands_says_what_it_can_do(digits, tmp_path, machine):
    done = run_islands("sideways", digits[1], tmp_path)
    assert done.returncode == 2
    assert "use one-by-one, parallel or slurm" in done.stderr


def test_the_commands_of_islands_train_experts_that_are_sampled(digits, tmp_path, machine):
    """What the stand-in has noted, done by the real script."""
    _, islands = digits
    for _ in range(2):
        run_islands("one-by-one", islands, tmp_path / "run")
    for line in sorted(set(machine.read_text().splitlines())):
        words = line.split()[1:]
        words.remove("--flip")
        train_expert.main([*words, *SHORT.split()])
        run = Path(words[words.index("--run") + 1])
        (made,) = run.glob("*.safetensors")
        (tmp_path / made.name).write_bytes(made.read_bytes())
    assert len(load_run(tmp_path, None, "cpu").experts) == 3


def test_islands_is_short():
    assert len((ROOT / "islands.sh").read_text().splitlines()) <= 30
