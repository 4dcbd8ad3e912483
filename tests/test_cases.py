"""Cases of tests/README.md that belong to no single module, and a check of its table."""

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

import convert_ckpt
import sample
import train_expert
import train_router
from ddm_min import features, figures, partition
from ddm_min.data import load
from ddm_min.expert import Expert, read_file

TESTS = Path(__file__).parent
SHORT = "--steps 2 --batch-size 4 --model router --device cpu"


def refused(capsys, main, argv: str) -> str:
    """The last line that main(argv) says when it ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(argv.split())
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------- C5: nothing to be said twice


def test_C5_an_expert_file_alone_is_enough_and_nothing_can_contradict_it(tmp_path, capsys):
    """The shape of the network is in the file; sample.py has no option that could differ."""
    argv = f"--run {tmp_path} --cluster all {SHORT} --modulation per-block --objective v"
    train_expert.main(argv.split())
    (tmp_path / "resume" / "expert_all.safetensors").unlink()
    words = f"{tmp_path} --num 2 --num-steps 2 --out {tmp_path / 'x.png'} --device cpu"
    sample.main(words.split())
    assert (tmp_path / "x.png").exists()
    said = refused(capsys, sample.main, f"{words} --model DiT-S/2")
    assert "unrecognized arguments: --model DiT-S/2" in said
    # training from it, where --model may be given, names the field and both values
    init = f"--run {tmp_path / 'b'} --cluster all --init {tmp_path / 'expert_all.safetensors'}"
    said = refused(capsys, train_expert.main, f"{init} --model tiny --device cpu")
    assert "width 32 and not 64" in said


# ---------------------------------------------------------------- E5: has the router learned?


def two_groups(file: Path) -> None:
    """60 dark and 20 bright pictures, far apart."""
    rng = np.random.default_rng(0)
    dark = rng.integers(0, 60, (60, 8, 8, 1), dtype=np.uint8)
    bright = rng.integers(195, 255, (20, 8, 8, 1), dtype=np.uint8)
    np.savez(file, arr_0=np.concatenate([dark, bright]))


def test_E5_the_routing_map_shows_what_was_learned_next_to_chance(tmp_path, monkeypatch):
    """Near clean each image finds home; at pure noise n_k / N is all there is, and no alarm."""
    two_groups(tmp_path / "x.npz")
    dataset = f"npz:{tmp_path / 'x.npz'}"
    partition.main(f"--data {dataset} --clusters 2 --run {tmp_path}".split())
    words = f"--data {dataset} --run {tmp_path} --steps 150 --batch-size 64 --device cpu"
    train_router.main(f"{words} --ema-decay 0.9 --warmup 10".split())
    panels = []
    original = Axes.imshow

    def imshow(self, panel, *args, **kwargs):
        panels.append(panel)
        return original(self, panel, *args, **kwargs)

    monkeypatch.setattr(Axes, "imshow", imshow)
    figures.main(f"routing --data {dataset} --run {tmp_path}".split())
    assert (tmp_path / "routing.png").exists()
    large, small = panels  # images of a cluster: [router's cluster, time]
    assert large[0, 1] > 0.9
    assert small[1, 1] > 0.9
    for panel in panels:
        assert panel[:, -1] == pytest.approx([0.75, 0.25], abs=0.1)


# ---------------------------------------------------------------- F6: feature weights


def test_F6_a_cut_or_missing_weights_file_is_named_with_what_to_do(monkeypatch):
    """With the package there, whatever its download or a damaged cache raises is one sentence."""
    package = ModuleType("torch_fidelity")
    module = ModuleType("torch_fidelity.feature_extractor_inceptionv3")

    class FeatureExtractorInceptionV3:
        def __init__(self, *args):
            raise RuntimeError("unexpected EOF, expected 812 more bytes: the file is corrupted")

    module.FeatureExtractorInceptionV3 = FeatureExtractorInceptionV3
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the Inception weights cannot be had") as error:
        next(features.extract(images, "inception"))
    for words in ("812 more bytes", "weights-inception-2015-12-05", "or use pixels"):
        assert words in str(error.value)


# ---------------------------------------------------------------- G1: on and off

SWITCHES = {  # script -> its on/off options
    "train_expert": (train_expert, ["--flip"], "--run RUN --cluster all"),
    "train_router": (train_router, ["--flip", "--from-experts"], "--run RUN"),
    "sample": (sample, ["--allow-missing"], "RUN"),
    "convert_ckpt": (convert_ckpt, ["--raw"], "a.pt b.safetensors"),
}


@pytest.mark.parametrize("script", SWITCHES)
def test_G1_a_switch_is_off_by_default_on_when_named_and_takes_no_word(script, capsys):
    module, options, needed = SWITCHES[script]
    source = Path(module.__file__).read_text()
    source += (TESTS.parent / "ddm_min" / "cli.py").read_text() if "train" in script else ""
    assert source.count("store_true") == len(options)  # none is forgotten here
    assert "store_false" not in source
    for option in options:
        name = option.removeprefix("--").replace("-", "_")
        assert getattr(module.parse(needed.split()), name) is False
        assert getattr(module.parse([*needed.split(), option]), name) is True
        for word in ("false", "off", "0", "true"):
            with pytest.raises(SystemExit):
                module.parse([*needed.split(), f"{option}={word}"])
            assert "ignored explicit argument" in capsys.readouterr().err
        with pytest.raises(SystemExit):  # where a word may stand, it is none of the switch's
            module.parse([*needed.split(), "--device", "cpu", option, "false", "false", "false"])


def test_G1_the_configuration_that_counts_is_kept_with_the_run(tmp_path):
    train_expert.main(f"--run {tmp_path} --cluster all {SHORT} --flip".split())
    _, metadata = read_file(tmp_path / "resume" / "expert_all.safetensors", "resume")
    kept = metadata["arguments"]
    assert kept["flip"] is True
    assert kept["objective"] == "flow"  # also what was left to its default
    assert (kept["steps"], kept["batch_size"], kept["seed"]) == (2, 4, 0)
    assert metadata["environment"].keys() == {"device", "threads", "processes", "torch", "machine"}


# ---------------------------------------------------------------- D3: more folders than classes


def test_D3_classes_are_counted_from_the_data_and_never_given(tmp_path):
    """No option says how many classes there are, so that it cannot differ from the folders."""
    from PIL import Image

    for label in range(12):
        (tmp_path / "data" / f"class{label:02}").mkdir(parents=True)
        pixels = np.full((8, 8, 3), 20 * label, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / f"class{label:02}" / "x.png")
    name = f"folder:{tmp_path / 'data'}"
    assert load(name).num_classes == 12
    train_expert.main(f"--data {name} --run {tmp_path} --cluster all {SHORT}".split())
    assert Expert.load(tmp_path / "expert_all.safetensors").model.config.num_classes == 12


# ---------------------------------------------------------------- the table


def test_the_table_has_every_case_and_names_tests_that_exist():
    rows = re.findall(r"^\| ([A-H]\d+) \|.*\| (.*) \|$", (TESTS / "README.md").read_text(), re.M)
    sizes = dict(A=7, B=8, C=9, D=14, E=5, F=6, G=3, H=5)
    assert [number for number, _ in rows] == [
        f"{group}{n}" for group, size in sizes.items() for n in range(1, size + 1)
    ]
    exist = {
        (file.name, name)
        for file in TESTS.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    for number, cell in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
        assert named, number
        for file, name in named:
            assert (file, name) in exist, f"{file}::{name}"
            assert re.search(rf"_{number}(_|$)", name), name
