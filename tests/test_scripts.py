"""The scripts through main(argv): the whole pipeline in small, and every way of asking wrongly."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sample
import train_expert
import train_router
from ddm_min import data, features, figures, partition
from ddm_min.expert import Expert, load_router

MAINS = {
    "partition": partition.main,
    "train_expert": train_expert.main,
    "train_router": train_router.main,
    "sample": sample.main,
    "fid": features.main,
    "figures": figures.main,
}
SHORT = ["--steps", "3", "--batch-size", "8", "--device", "cpu"]
MINI = Path(__file__).parent.parent.parent / "shared" / "data" / "cifar10-mini"


def call(name: str, *words) -> str:
    """Run one script quietly, as a command line would, and return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        MAINS[name]([str(word) for word in words])
    return out.getvalue()


def make_run(run: Path, dataset: str, *partition_arguments, router: bool = True) -> Path:
    """Partition into two, train a DDPM and a flow expert and a router: a few steps each."""
    common = ["--data", dataset, "--run", run]
    call("partition", *common, "--clusters", 2, *partition_arguments)
    call("train_expert", *common, "--cluster", 0, "--objective", "ddpm", *SHORT)
    call("train_expert", *common, "--cluster", 1, "--objective", "flow", *SHORT)
    if router:
        call("train_router", *common, *SHORT)
    return run


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("digits"), "digits", "--fine", 8)


@pytest.fixture(scope="module")
def classes_run(tmp_path_factory) -> Path:
    """Even digits in one cluster, odd ones in the other."""
    return make_run(tmp_path_factory.mktemp("classes"), "digits", "--features", "labels")


@pytest.fixture
def copied(digits_run, tmp_path) -> Path:
    """A copy of the run that a test may break."""
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


@pytest.fixture
def classes(classes_run, tmp_path) -> Path:
    return Path(shutil.copytree(classes_run, tmp_path / "run"))


@pytest.fixture
def other_data(tmp_path) -> str:
    """A dataset of the digits' shape and class count, but not the digits."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "other.npz", arr_0=images, arr_1=np.arange(40) % 10)
    return f"npz:{tmp_path / 'other.npz'}"


# ---------------------------------------------------------------- the pipeline


def test_the_pipeline_leaves_one_file_per_part(digits_run):
    names = {str(file.relative_to(digits_run)) for file in digits_run.rglob("*") if file.is_file()}
    assert names == {
        "partition.safetensors", "clusters.png", "router.safetensors",
        "expert_0.safetensors", "expert_1.safetensors", "resume/router.safetensors",
        "resume/expert_0.safetensors", "resume/expert_1.safetensors",
    }  # fmt: skip
    experts = [Expert.load(digits_run / f"expert_{k}.safetensors") for k in range(2)]
    assert [expert.objective.prediction for expert in experts] == ["eps", "velocity"]
    assert experts[0].class_names == list("0123456789")
    assert sum(int(expert.stats.counts.sum()) for expert in experts) == 1797
    _, counts, metadata = load_router(digits_run / "router.safetensors")
    assert torch.equal(counts, torch.stack([expert.stats.counts for expert in experts]))
    assert {metadata["fingerprint"]} == {expert.fingerprint for expert in experts}


def test_partition_prints_sizes_and_classes(tmp_path):
    out = call("partition", "--data", "digits", "--clusters", 2, "--run", tmp_path,
               "--features", "labels")  # fmt: skip
    sizes = [int(n) for n in re.findall(r"cluster \d: (\d+) images", out)]
    assert sum(sizes) == 1797
    assert '{"1": 182, "3": 183' in out  # the odd digits, or the even ones, by name


def test_D13_experts_hold_the_average_not_the_raw_weights(digits_run):
    from ddm_min.expert import read_file

    tensors, _ = read_file(digits_run / "resume" / "expert_0.safetensors", "resume")
    weights = Expert.load(digits_run / "expert_0.safetensors").model.state_dict()
    assert all(torch.equal(weight, tensors[f"ema.{name}"]) for name, weight in weights.items())
    assert any(not torch.equal(w, tensors[f"model.{name}"]) for name, w in weights.items())


def test_samples_as_a_grid_as_npz_and_as_a_folder(digits_run, tmp_path):
    words = [digits_run, "--num", 20, "--num-steps", 2, "--device", "cpu"]
    out = call("sample", *words, "--out", tmp_path / "grid.png")
    assert "2 experts, learned router, strategy coupled" in out
    assert "per image: 2.0 expert forwards" in out
    assert Image.open(tmp_path / "grid.png").size[0] > 100

    call("sample", *words, "--out", tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as archive:
        images, labels = archive["arr_0"], archive["arr_1"]
    assert (images.shape, images.dtype) == ((20, 8, 8, 1), np.uint8)
    assert labels.tolist() == [label for label in range(10) for _ in range(2)]

    call("sample", *words, "--out", tmp_path / "folder")
    files = sorted((tmp_path / "folder").rglob("*.png"))
    assert len(files) == 20
    assert [file.parent.name for file in files] == [str(label) for label in labels]
    assert all(
        np.array_equal(np.asarray(Image.open(file)), image[:, :, 0])
        for file, image in zip(files, images, strict=True)
    )
    assert data.load(f"folder:{tmp_path / 'folder'}").labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    "words",
    [
        "--strategy full",
        "--strategy top-1 --router gaussian",
        "--strategy sample-1 --router prior --solver heun",
        "--label 3 --guidance-scale 2",
        "--label none --strategy nucleus-0.9",
    ],
)
def test_sampling_options(digits_run, tmp_path, words):
    out = call("sample", digits_run, "--num", 3, "--num-steps", 2, "--device", "cpu",
               *words.split(), "--out", tmp_path / "x.npz")  # fmt: skip
    images = data.load(f"npz:{tmp_path / 'x.npz'}").images
    assert images.shape == (3, 1, 8, 8)
    if "--router" in words:
        assert f"{words.split('--router ')[1].split()[0]} router" in out
    if "--label 3" in words:
        assert "label 3 is class '3'" in out
        assert "per image: 4.0 expert forwards" in out  # 2 steps, both halves of guidance


@pytest.mark.parametrize("solver", ["ddim", "ddpm"])
def test_a_lone_expert_samples_its_own_way(digits_run, tmp_path, solver):
    shutil.copy(digits_run / "expert_0.safetensors", tmp_path)
    words = ["--num", 4, "--num-steps", 3, "--solver", solver, "--device", "cpu"]
    for batch_size in (1, 4):
        call("sample", tmp_path, *words, "--batch-size", batch_size,
             "--out", tmp_path / f"{batch_size}.npz")  # fmt: skip
    one, four = (data.load(f"npz:{tmp_path / f'{n}.npz'}").images.int() for n in (1, 4))
    assert (one - four).abs().max() <= 1


def test_D10_images_do_not_depend_on_the_batch_size(digits_run, tmp_path):
    images = {}
    for size in (1, 2, 5):
        call("sample", digits_run, "--num", 5, "--num-steps", 4, "--seed", 7, "--device", "cpu",
             "--batch-size", size, "--out", tmp_path / f"{size}.npz")  # fmt: skip
        images[size] = data.load(f"npz:{tmp_path / f'{size}.npz'}").images.int()
    for size in (1, 2):
        assert (images[size] - images[5]).abs().max() <= 1  # 1e-4 can cross one rounding
    assert (images[5][0] - images[5][1]).abs().max() > 10


def test_figures_are_drawn_from_a_run(copied):
    call("figures", "losses", "--run", copied)
    call("figures", "routing", "--run", copied, "--data", "digits")
    for name in ("losses", "routing"):
        picture = np.asarray(Image.open(copied / f"{name}.png").convert("L"))
        assert picture.std() > 5  # not an empty page


def test_fid_prints_and_writes_distance_and_floor(digits_run, tmp_path):
    call("sample", digits_run, "--num", 80, "--num-steps", 1, "--device", "cpu",
         "--out", tmp_path / "x.npz")  # fmt: skip
    out = call("fid", tmp_path / "x.npz", "digits", "--out", tmp_path / "fid.json")
    result = json.loads((tmp_path / "fid.json").read_text())
    assert (result["num_a"], result["num_b"], result["features"]) == (80, 1797, "pixels")
    assert result["frechet_distance"] > 5 * result["floor"] > 0  # 3 steps of training are none
    assert f"{result['frechet_distance']:.3f} (80 and 1797 images)" in out
    assert "floor, one half of digits against the other" in out


def test_a_finished_step_is_reused(copied):
    out = call("train_expert", "--data", "digits", "--run", copied, "--cluster", 0,
               "--objective", "ddpm", *SHORT)  # fmt: skip
    assert "all 3 steps were done earlier" in out


def test_mdm_intervals_and_a_monolith_need_no_partition(tmp_path):
    for words in (["--time-interval", 0, 0.5], ["--time-interval", 0.5, 1, "--objective", "v"]):
        call("train_expert", "--run", tmp_path, "--cluster", "all", *words, *SHORT)
    assert (tmp_path / "expert_all_0-0.5.safetensors").exists()
    out = call("sample", tmp_path, "--num", 2, "--num-steps", 4, "--device", "cpu",
               "--out", tmp_path / "x.png")  # fmt: skip
    assert "2 experts, gaussian router" in out


def test_D11_without_label_dropout_scale_one_still_works(tmp_path):
    call("train_expert", "--run", tmp_path, "--cluster", "all", "--label-dropout", 0, *SHORT)
    words = [tmp_path, "--num", 2, "--num-steps", 1, "--device", "cpu", "--out", tmp_path / "x.npz"]
    call("sample", *words)
    refused(tmp_path, "sample", *words, "--guidance-scale", 4, match="label-dropout")


def test_A5_a_class_is_asked_for_by_its_folders_name(tmp_path):
    make_photos(tmp_path / "photos", ["1", "2", "10"])
    dataset = f"folder:{tmp_path / 'photos'}"
    run = tmp_path / "run"
    call("train_expert", "--data", dataset, "--run", run, "--cluster", "all", *SHORT)
    names = Expert.load(run / "expert_all.safetensors").class_names
    out = call("sample", run, "--label", 10, "--num", 2, "--num-steps", 1, "--device", "cpu",
               "--out", tmp_path / "x.npz")  # fmt: skip
    assert f"label {names.index('10')} is class '10'" in out
    with np.load(tmp_path / "x.npz") as archive:
        assert archive["arr_1"].tolist() == [names.index("10")] * 2


# ---------------------------------------------------------------- a photo folder, same scripts


def make_photos(folder: Path, names, per_class: int = 12, size=(12, 8)) -> None:
    """A class per folder, each of its own colour; `size` is (W, H)."""
    rng = np.random.default_rng(2)
    for c, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = rng.integers(0, 90, (size[1], size[0], 3), dtype=np.uint8)
            pixels[:, :, c % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{i}.jpg", quality=95)


def test_a_photo_folder_needs_no_special_case(tmp_path):
    """Colour, JPEG, and not square."""
    make_photos(tmp_path / "photos", ["cat", "dog", "eel"])
    run = make_run(tmp_path / "run", f"folder:{tmp_path / 'photos'}")
    call("sample", run, "--label", "dog", "--num", 3, "--num-steps", 2, "--device", "cpu",
         "--out", tmp_path / "dogs")  # fmt: skip
    files = list((tmp_path / "dogs").rglob("*.png"))
    assert [file.parent.name for file in files] == ["dog"] * 3
    assert Image.open(files[0]).size == (12, 8)
    call("sample", run, "--num", 6, "--num-steps", 2, "--device", "cpu", "--out", run / "grid.png")
    assert (run / "grid.png").exists()


@pytest.mark.skipif(not MINI.is_dir(), reason=f"there are no photos in {MINI}")
def test_cifar10_photos_need_no_special_case(tmp_path):
    run = make_run(tmp_path, f"folder:{MINI}", "--features", "labels", router=False)
    call("sample", run, "--num", 4, "--num-steps", 2, "--device", "cpu", "--out", run / "x.npz")
    assert data.load(f"npz:{run / 'x.npz'}").images.shape == (4, 3, 32, 32)


# ---------------------------------------------------------------- bad input


def snapshot(folder: Path) -> dict:
    """Every path below a folder, with the content of files."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def refused(folder: Path, name: str, *words, match: str) -> None:
    """Exit code 2, one sentence on stderr that matches, nothing written below `folder`."""
    before = snapshot(folder)
    err = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):  # fmt: skip
        MAINS[name]([str(word) for word in words])
    message = err.getvalue()
    assert end.value.code == 2
    assert message.startswith("error: "), message
    assert message.count("\n") == 1, message
    assert "Traceback" not in message
    assert re.search(match, message), message
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("partition", ["--clusters", 2]),
        ("train_expert", ["--cluster", "all"]),
        ("train_router", []),
    ],
)
@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        ("mnist", "unknown dataset 'mnist': use digits, cifar10"),
        ("folder:{}/missing", "there is no folder /.*missing"),
        ("npz:{}/missing.npz", r"there is no file /.*missing\.npz"),
    ],
)
def test_G3_unknown_or_missing_data(tmp_path, name, words, dataset, match):
    dataset = dataset.format(tmp_path)
    refused(tmp_path, name, "--data", dataset, "--run", tmp_path / "run", *words, match=match)


def test_A2_a_damaged_picture_stops_every_script_by_name(tmp_path):
    make_photos(tmp_path / "photos", ["cat"])
    (tmp_path / "photos" / "cat" / "bad.png").write_bytes(b"")
    common = ["--data", f"folder:{tmp_path / 'photos'}", "--run", tmp_path / "run"]
    for name, words in (("partition", ["--clusters", 2]), ("train_expert", ["--cluster", "all"])):
        refused(tmp_path, name, *common, *words, match=r"cat/bad\.png")
    for pair in (("digits", common[1]), (common[1], "digits")):
        refused(tmp_path, "fid", *pair, match=r"cat/bad\.png")


@pytest.mark.parametrize("cluster", ["2", "-1", "x"])
def test_cluster_out_of_range(copied, cluster):
    refused(copied, "train_expert", "--run", copied, f"--cluster={cluster}", *SHORT,
            match="there is no cluster .*: use 0 to 1, or all")  # fmt: skip


def test_E2_more_clusters_than_images(tmp_path, other_data):
    refused(tmp_path, "partition", "--data", other_data, "--clusters", 50, "--run",
            tmp_path / "run", match="50 clusters of only 40 different images")  # fmt: skip


def test_D14_image_size_not_divisible_by_the_patch_size(tmp_path):
    np.savez(tmp_path / "x.npz", arr_0=np.zeros((9, 8, 30, 3), dtype=np.uint8))
    refused(tmp_path, "train_expert", "--data", f"npz:{tmp_path / 'x.npz'}", "--cluster", "all",
            "--run", tmp_path / "run", "--model", "DiT-S/4", *SHORT,
            match="image size 30 is not divisible by the patch size 4: use images of 28 or 32",
            )  # fmt: skip


@pytest.mark.parametrize("interval", [(0.7, 0.3), (0.5, 0.5), (0, 1.5), ("nan", 1)])
def test_an_impossible_time_interval(tmp_path, interval):
    refused(tmp_path, "train_expert", "--run", tmp_path / "run", "--cluster", "all", *SHORT,
            "--time-interval", *interval, match="time interval")  # fmt: skip


@pytest.mark.parametrize("label", ["-1", "10", "999", "cat", ""])
def test_D3_label_out_of_range(digits_run, tmp_path, label):
    """10 is the null label: not a class that one can ask for."""
    refused(tmp_path, "sample", digits_run, f"--label={label}", "--out", tmp_path / "x.png",
            match=f"there is no class {label!r}: the experts know 0, 1, .*, 9")  # fmt: skip


@pytest.mark.parametrize("strategy", ["best", "top-0", "sample-inf", "nucleus-2"])
def test_unknown_strategy(digits_run, tmp_path, strategy):
    refused(tmp_path, "sample", digits_run, "--strategy", strategy, "--out", tmp_path / "x.png",
            match=f"unknown strategy {strategy!r}: use full, coupled, top-K")  # fmt: skip


@pytest.mark.parametrize("router", ["learned", "prior", "gaussian"])
def test_a_class_that_only_a_missing_expert_knows(classes, tmp_path, router):
    even = [k for k in range(2) if Expert.load(classes / f"expert_{k}.safetensors").stats.counts[4]]
    (classes / f"expert_{even[0]}.safetensors").unlink()
    words = [classes, "--router", router, "--allow-missing", "--num", 2, "--num-steps", 1]
    refused(tmp_path, "sample", *words, "--label", 4, "--out", tmp_path / "x.png",
            match="no expert here knows class 4")  # fmt: skip
    call("sample", *words, "--label", 3, "--out", tmp_path / "x.png")


def test_the_message_for_a_lost_class_names_the_missing_expert(classes, tmp_path):
    (classes / "expert_1.safetensors").unlink()
    lost = "3" if Expert.load(classes / "expert_0.safetensors").stats.counts[4] else "4"
    refused(tmp_path, "sample", classes, "--allow-missing", "--label", lost,
            "--out", tmp_path / "x.png", match=r"lives in cluster \[1\], whose expert is missing",
            )  # fmt: skip


def test_a_missing_expert_file(copied, tmp_path):
    (copied / "expert_1.safetensors").unlink()
    words = ["sample", copied, "--num", 2, "--num-steps", 1, "--out", tmp_path / "x.png"]
    refused(tmp_path, *words, match="no expert answers for cluster 1 at t from 0 to 1")
    call(*words, "--allow-missing")
    (copied / "expert_0.safetensors").unlink()
    refused(tmp_path, *words, match="there are no expert files in /")


def test_G3_a_run_that_is_not_there(tmp_path):
    run = tmp_path / "nowhere"
    refused(tmp_path, "sample", run, match=f"there are no expert files in {run}")
    refused(tmp_path, "train_expert", "--run", run, "--cluster", 0, match="no partition file")
    refused(tmp_path, "train_router", "--run", run, match="there is no partition file")
    refused(tmp_path, "figures", "losses", "--run", run, match="no training records in /")
    refused(tmp_path, "figures", "routing", "--run", run, match="there is no partition file")


@pytest.mark.parametrize(
    ("name", "words"), [("train_expert", ["--cluster", 0]), ("train_router", [])]
)
def test_a_partition_made_for_other_data(copied, other_data, tmp_path, name, words):
    refused(tmp_path, name, "--data", other_data, "--run", copied, *words, *SHORT,
            match=r"partition\.safetensors was made for other data")  # fmt: skip


def test_a_router_made_for_another_partition(copied, classes_run, tmp_path):
    shutil.copy(classes_run / "router.safetensors", copied)
    refused(tmp_path, "sample", copied, "--out", tmp_path / "x.png",
            match=r"router\.safetensors was trained for another partition")  # fmt: skip


def test_experts_of_two_partitions(copied, classes_run, tmp_path):
    shutil.copy(classes_run / "expert_1.safetensors", copied)
    refused(tmp_path, "sample", copied, "--out", tmp_path / "x.png",
            match="come from different partitions")  # fmt: skip


def test_a_damaged_expert_file(copied, tmp_path):
    file = copied / "expert_0.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused(tmp_path, "sample", copied, "--out", tmp_path / "x.png", match=f"{file} is damaged")


def test_two_experts_for_one_cluster_and_time(copied, tmp_path):
    expert = Expert.load(copied / "expert_0.safetensors")
    expert.time_interval = (0.0, 0.5)
    expert.save(copied / expert.file_name)
    refused(tmp_path, "sample", copied, "--out", tmp_path / "x.png",
            match="more than one expert answers for cluster 0 at t from 0 to 0.5")  # fmt: skip


@pytest.mark.parametrize("solver", ["ddim", "ddpm"])
def test_solvers_of_a_lone_expert(digits_run, tmp_path, solver):
    refused(tmp_path, "sample", digits_run, "--solver", solver, "--out", tmp_path / "x.png",
            match="needs a lone expert")  # fmt: skip


def test_G3_an_output_below_a_file(digits_run, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    place = tmp_path / "file" / "deeper"
    for out in (place / "x.png", place / "x.npz", place):
        refused(tmp_path, "sample", digits_run, "--num", 2, "--out", out, match="file")
    refused(tmp_path, "train_expert", "--run", place, "--cluster", "all", *SHORT, match="file")
    refused(tmp_path, "partition", "--clusters", 2, "--features", "labels", "--run", place,
            match="file")  # fmt: skip


def test_other_arguments_for_a_run_that_exists(copied):
    refused(copied, "train_expert", "--run", copied, "--cluster", 0, "--objective", "ddpm", *SHORT,
            "--lr", 0.5, match=r"lr was [\d.]+ and is 0\.5")  # fmt: skip
    refused(copied, "train_expert", "--run", copied, "--cluster", 0, "--objective", "flow", *SHORT,
            match="objective was ddpm and is flow")  # fmt: skip
    refused(
        copied, "train_router", "--run", copied, *SHORT, "--seed", 5, match="seed was 0 and is 5"
    )


def test_unknown_features(tmp_path):
    refused(tmp_path, "partition", "--clusters", 2, "--run", tmp_path / "run", "--features", "best",
            match="unknown features 'best'")  # fmt: skip
    refused(tmp_path, "fid", "digits", "digits", "--features", "best", match="unknown features")


@pytest.mark.parametrize("scale", ["nan", "inf"])
def test_a_guidance_scale_that_is_no_number(digits_run, tmp_path, scale):
    with pytest.raises(SystemExit) as end:
        call("sample", digits_run, "--guidance-scale", scale, "--num", 2, "--num-steps", 1,
             "--device", "cpu", "--label", 3, "--out", tmp_path / "x.png")  # fmt: skip
    assert end.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_nan_in_an_expert_stops_sampling_without_a_picture(copied, tmp_path):
    for k in range(2):
        expert = Expert.load(copied / f"expert_{k}.safetensors")
        expert.model.head.bias.fill_(torch.nan)
        expert.save(copied / expert.file_name)
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        sample.main([str(copied), "--num", "2", "--num-steps", "3", "--device", "cpu",
                     "--out", str(tmp_path / "x.png")])  # fmt: skip
    assert end.value.code == 2
    assert "error: sampling left the finite numbers in step 1 at t = 1" in err.getvalue()
    assert not (tmp_path / "x.png").exists()


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("name", MAINS)
def test_help_says_what_the_script_is_for(name, capsys):
    with pytest.raises(SystemExit) as end:
        MAINS[name](["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: ")
    assert len(out.splitlines()) > 10


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sample", ["run", "--num", "0"]),
        ("sample", ["run", "--num-steps", "-3"]),
        ("sample", ["run", "--device", "abacus"]),
        ("sample", ["run", "--device", "meta"]),
        ("sample", ["run", "--unknown"]),
        ("train_expert", ["--run", "run", "--cluster", "0", "--steps", "1.5"]),
        ("train_expert", ["--run", "run", "--cluster", "0", "--objective", "best"]),
        ("train_router", ["--run", "run", "--batch-size", "many"]),
        ("train_router", ["--run", "run", "--clip", "-1"]),
        ("train_router", ["--run", "run", "--lr", "nan"]),
        ("train_expert", ["--run", "run", "--cluster", "0", "--label-dropout", "2"]),
        ("train_expert", ["--run", "run", "--cluster", "0", "--ema-decay", "inf"]),
        ("train_expert", ["--run", "run", "--cluster", "0", "--max-weight", "-1"]),
        ("partition", ["--run", "run", "--clusters", "²"]),
        ("figures", ["losses"]),
    ],
)
def test_G1_malformed_options_end_with_usage_and_exit_code_2(name, words, capsys):
    with pytest.raises(SystemExit) as end:
        MAINS[name](words)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_an_output_that_would_be_mistaken_is_refused_before_sampling(digits_run, tmp_path):
    """Another suffix, a folder that is called like a file, a folder with other pictures in it."""
    (tmp_path / "d.png").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.png").write_bytes(b"")
    for out, match in (("o.jpg", "use a .png file"), ("d.png", "is a folder"), ("full", "empty")):
        refused(tmp_path, "sample", digits_run, "--out", tmp_path / out, match=match)


def test_classes_without_images_get_no_share(tmp_path):
    """Labels 2 and 5 only: a plain sample.py draws these two and does not ask for the others."""
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", arr_0=images, arr_1=np.array([2, 5] * 10))
    name = f"npz:{tmp_path / 'few.npz'}"
    call("train_expert", "--data", name, "--run", tmp_path, "--cluster", "all", *SHORT)
    out = tmp_path / "s.npz"
    call("sample", tmp_path, "--num", 4, "--num-steps", 2, "--device", "cpu", "--out", out)
    assert np.load(out)["arr_1"].tolist() == [2, 2, 5, 5]


def test_pictures_of_five_channels_are_refused_as_data(tmp_path):
    np.savez(tmp_path / "five.npz", arr_0=np.zeros((4, 8, 8, 5), dtype=np.uint8))
    with pytest.raises(ValueError, match="1 or 3"):
        data.load(f"npz:{tmp_path / 'five.npz'}")
