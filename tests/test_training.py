"""The training loop: formulas by hand, resume bit by bit, and what stops it."""

import math
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddm_min import partition, training
from ddm_min.data import Dataset, to_float
from ddm_min.dit import DiT, DiTConfig
from ddm_min.expert import read_file, write_file
from ddm_min.objectives import FLOW, draw_times, drop_labels, loss, normal_like
from ddm_min.training import TrainConfig, describe, draw_batch, resume_file, train

# ---------------------------------------------------------------- small things to train


class Scalar(nn.Module):
    """One parameter."""

    def __init__(self, value: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))


def toy_data(num: int = 20) -> Dataset:
    """Pictures [N, 3, 2, 4] in 3 classes."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (num, 3, 2, 4), dtype=np.uint8))
    return Dataset(images, torch.arange(num) % 3, ["a", "b", "c"])


def toy_model(seed: int = 0) -> DiT:
    torch.manual_seed(seed)
    return DiT(DiTConfig(3, (2, 4), num_classes=3, patch_size=2, width=8, depth=1, heads=2))


def toy_loss(dataset: Dataset, batch_size: int = 4):
    """Everything random that a real step has: batch, flip, label dropout, time, noise."""

    def batch_loss(model, rng):
        x0, labels, _ = draw_batch(dataset, batch_size, rng, flip=True)
        labels = drop_labels(labels, 3, 0.3, rng)
        t = draw_times(len(x0), FLOW.schedule, (0.0, 1.0), rng)
        return loss(model, x0, normal_like(x0, rng), t, labels, FLOW).mean()

    return batch_loss


def config(steps: int, **changes) -> TrainConfig:
    return TrainConfig(**dict(steps=steps, batch_size=4, lr=1e-2, warmup=5) | changes)


def run(file: Path, settings: TrainConfig, batch_loss=None, model=None, **arguments):
    """Train a toy; `arguments` are those that a resume must agree in."""
    arguments = dict(steps=settings.steps, **arguments)
    return train(
        model or toy_model(), batch_loss or toy_loss(toy_data()), settings, file, arguments
    )


class StopAfter:
    """In place of `Stopper`: a request after so many steps of this process."""

    def __init__(self, steps: int):
        self.left = steps

    def __call__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0


def run_in_parts(monkeypatch, file: Path, settings: TrainConfig, parts: list[int]):
    """Stop after each part but the last, as Ctrl-C would, and start the same again."""
    for steps in parts[:-1]:
        with monkeypatch.context() as stopped:
            stopped.setattr(training, "Stopper", StopAfter(steps))
            with pytest.raises(SystemExit) as end:
                run(file, settings)
            assert end.value.code == 130
    return run(file, settings)


def state(file: Path) -> dict[str, torch.Tensor]:
    return read_file(file, "resume")[0]


# ---------------------------------------------------------------- learning rate


def test_learning_rate_warms_up_and_stays():
    settings = TrainConfig(steps=40, lr=2.0, lr_schedule="constant", warmup=10)
    rates = [settings.lr_at(step) for step in range(40)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10:] == [2.0] * 30


def test_learning_rate_falls_by_half_a_cosine():
    settings = TrainConfig(steps=40, lr=2.0, lr_schedule="cosine", warmup=0)
    for step in (0, 7, 20, 39):
        assert settings.lr_at(step) == pytest.approx(2.0 * math.cos(math.pi * step / 80) ** 2)
    assert settings.lr_at(20) == pytest.approx(1.0)
    assert settings.lr_at(39) < 0.01


def rates_used(monkeypatch) -> list[float]:
    """A list that fills with the rate of every optimizer step."""
    used = []
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        used.append(self.param_groups[0]["lr"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return used


def test_B3_warmup_does_not_start_again_on_resume(tmp_path, monkeypatch):
    used = rates_used(monkeypatch)
    settings = config(40, warmup=10)
    run(tmp_path / "straight.safetensors", settings)
    straight, used[:] = list(used), []
    run_in_parts(monkeypatch, tmp_path / "parts.safetensors", settings, [20, 20])
    assert used == straight
    assert straight == [settings.lr_at(step) for step in range(40)]
    assert straight[20] > straight[1]  # no second warm-up


# ---------------------------------------------------------------- average of the weights


def test_B4_ema_follows_its_formula(tmp_path):
    """ema <- decay ema + (1 - decay) w, decay = min(ema_decay, (1 + step) / (10 + step))."""
    seen = []

    def pull(model, rng):
        seen.append(model.weight.item())
        return (model.weight - 1).square().sum()

    settings = config(30, lr=0.1, lr_schedule="constant", warmup=0, ema_decay=0.6)
    file = tmp_path / "x.safetensors"
    ema, _ = run(file, settings, pull, Scalar())
    weights = [*seen[1:], state(file)["model.weight"].item()]  # after each step
    average = 0.0
    for step, weight in enumerate(weights):
        decay = min(0.6, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * weight
    assert ema.weight.item() == pytest.approx(average, rel=1e-5)  # 30 roundings of float32
    assert state(file)["ema.weight"].item() == ema.weight.item()
    assert weights[-1] != pytest.approx(average, rel=1e-3)  # the two are not the same


def test_B4_a_constant_weight_is_averaged_to_itself_and_decay_zero_follows_at_once(tmp_path):
    def still(model, rng):
        return 0 * model.weight.sum()

    ema, _ = run(tmp_path / "a.safetensors", config(20), still, Scalar(0.7))
    assert ema.weight.item() == pytest.approx(0.7, rel=1e-6)

    def pull(model, rng):
        return (model.weight - 1).square().sum()

    file = tmp_path / "b.safetensors"
    ema, _ = run(file, config(20, ema_decay=0.0), pull, Scalar())
    assert ema.weight.item() == state(file)["model.weight"].item()


def test_D13_the_average_is_what_is_returned(tmp_path):
    ema, _ = run(tmp_path / "x.safetensors", config(6))
    tensors = state(tmp_path / "x.safetensors")
    for name, weight in ema.state_dict().items():
        assert torch.equal(weight, tensors[f"ema.{name}"])
    assert any(not torch.equal(w, tensors[f"model.{n}"]) for n, w in ema.state_dict().items())


def test_B7_the_returned_model_is_ready_to_be_sampled(tmp_path):
    for _ in range(2):  # trained, and taken from a finished run
        ema, _ = run(tmp_path / "x.safetensors", config(3))
        assert not ema.training
        assert not any(p.requires_grad for p in ema.parameters())


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("parts", [[10, 10], [1, 19], [19, 1], [7, 6, 7]])
@pytest.mark.parametrize("lr_schedule", ["cosine", "constant"])
def test_B1_twenty_steps_are_ten_and_ten_to_the_last_bit(tmp_path, monkeypatch, parts, lr_schedule):
    settings = config(20, lr_schedule=lr_schedule, weight_decay=0.1, warmup=8)
    straight_file, file = tmp_path / "straight.safetensors", tmp_path / "parts.safetensors"
    straight, straight_losses = run(straight_file, settings)
    resumed, losses = run_in_parts(monkeypatch, file, settings, parts)
    assert len(losses) == 20
    assert np.array_equal(np.float32(losses), np.float32(straight_losses))
    for name, weight in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    a, b = state(straight_file), state(file)  # weights, average, moments, step counts, losses
    assert a.keys() == b.keys()
    assert any(name.startswith("optimizer.0.") for name in a)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_B1_stopping_before_the_first_step_is_possible(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    straight, _ = run(tmp_path / "straight.safetensors", config(5))
    resumed, _ = run_in_parts(monkeypatch, file, config(5), [0, 5])
    for name, weight in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_B1_every_step_has_its_own_randomness(tmp_path):
    drawn = []

    def batch_loss(model, rng):
        drawn.append(rng.random())
        return model.weight.square().sum()

    for seed in (0, 1):
        run(tmp_path / f"{seed}.safetensors", config(20, seed=seed), batch_loss, Scalar())
    assert len(set(drawn)) == 40


def test_B1_seeds_give_different_runs_and_the_same_seed_the_same(tmp_path):
    losses = [
        run(tmp_path / f"{i}.safetensors", config(4, seed=seed))[1]
        for i, seed in enumerate((0, 0, 1))
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_B2_raw_weights_and_average_are_not_mixed_up_on_resume(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    settings = config(6, ema_decay=0.5)
    with monkeypatch.context() as stopped:
        stopped.setattr(training, "Stopper", StopAfter(5))
        with pytest.raises(SystemExit):
            run(file, settings, lambda model, rng: 0 * model.weight.sum(), Scalar())
    tensors, metadata = read_file(file, "resume")
    tensors["model.weight"], tensors["ema.weight"] = torch.tensor([1.0]), torch.tensor([2.0])
    metadata.pop("kind"), metadata.pop("format_version")
    write_file(file, "resume", tensors, metadata)

    seen = []

    def still(model, rng):
        seen.append(model.weight.item())
        return 0 * model.weight.sum()

    ema, _ = run(file, settings, still, Scalar())
    assert seen == [1.0]
    assert ema.weight.item() == pytest.approx(0.4 * 2 + 0.6 * 1)  # step 5: decay 6 / 15


def damage(file: Path, change) -> None:
    tensors, metadata = read_file(file, "resume")
    change(tensors, metadata)
    metadata.pop("kind"), metadata.pop("format_version")
    write_file(file, "resume", tensors, metadata)


def drop(prefix: str):
    def change(tensors, metadata):
        for name in [n for n in tensors if n.startswith(prefix)]:
            del tensors[name]

    return change


DAMAGES = {
    "no weights": drop("model."),
    "no average": drop("ema."),
    "no moments": drop("optimizer."),
    "some moments": drop("optimizer.1.exp_avg_sq"),
    "no losses": drop("losses"),
    "no arguments": lambda tensors, metadata: metadata.pop("arguments"),
    "no environment": lambda tensors, metadata: metadata.pop("environment"),
    "other shape": lambda tensors, metadata: tensors.update({"ema.head.bias": torch.zeros(2)}),
}


@pytest.mark.parametrize("damaged", DAMAGES)
def test_B2_a_resume_file_that_lacks_something_is_refused_by_name(tmp_path, monkeypatch, damaged):
    file = tmp_path / "x.safetensors"
    with monkeypatch.context() as stopped:
        stopped.setattr(training, "Stopper", StopAfter(3))
        with pytest.raises(SystemExit):
            run(file, config(6))
    damage(file, DAMAGES[damaged])
    with pytest.raises(ValueError, match=str(file)) as error:
        run(file, config(6))
    assert "\n" not in str(error.value)


def test_a_truncated_resume_file_is_refused_by_name(tmp_path):
    file = tmp_path / "x.safetensors"
    run(file, config(3))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        run(file, config(3))


def test_other_arguments_are_refused_with_the_list(tmp_path):
    file = tmp_path / "x.safetensors"
    run(file, config(3), lr=0.1, model_name="tiny", data="aaa")
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"x\.safetensors belongs to another run") as error:
        run(file, config(3), lr=0.2, model_name="tiny", data="bbb", new=True)
    message = str(error.value)
    for part in ("lr was 0.1 and is 0.2", "data was aaa and is bbb", "new was None and is True"):
        assert part in message
    assert "model_name" not in message
    assert "delete the file to start anew" in message
    assert file.read_bytes() == before


def test_another_environment_is_refused_unless_the_run_is_finished(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    with monkeypatch.context() as stopped:
        stopped.setattr(training, "Stopper", StopAfter(2))
        with pytest.raises(SystemExit):
            run(file, config(4))
    elsewhere = training.environment("cpu") | {"threads": 77, "torch": "1.0"}
    with monkeypatch.context() as moved:
        moved.setattr(training, "environment", lambda device: elsewhere)
        with pytest.raises(
            ValueError, match=r"threads was \d+ and is 77; torch was .* and is 1\.0"
        ):
            run(file, config(4))
    run(file, config(4))
    monkeypatch.setattr(training, "environment", lambda device: elsewhere)
    assert len(run(file, config(4))[1]) == 4  # nothing left whose bits could differ


def test_steps_may_grow_with_a_constant_rate(tmp_path):
    settings = dict(lr_schedule="constant")
    grown, straight = tmp_path / "grown.safetensors", tmp_path / "straight.safetensors"
    run(grown, config(8, **settings))
    run(grown, config(20, **settings))
    run(straight, config(20, **settings))
    a, b = state(grown), state(straight)
    assert all(torch.equal(a[name], b[name]) for name in b)
    with pytest.raises(ValueError, match="steps was 20 and is 8") as error:
        run(grown, config(8, **settings))
    assert "cosine" not in str(error.value)


def test_steps_may_not_grow_with_a_cosine(tmp_path):
    file = tmp_path / "x.safetensors"
    run(file, config(8, lr_schedule="cosine"))
    with pytest.raises(ValueError, match=r"steps was 8 and is 20.*cosine learning rate depends on"):
        run(file, config(20, lr_schedule="cosine"))


def test_a_finished_run_is_reused_without_a_step(tmp_path, capsys):
    file = tmp_path / "x.safetensors"
    first, losses = run(file, config(5))
    before = file.read_bytes()

    def never(model, rng):
        raise AssertionError("a step was taken")

    again, same_losses = run(file, config(5), never, toy_model(seed=3))
    assert "all 5 steps were done earlier" in capsys.readouterr().out
    assert same_losses == pytest.approx(losses, rel=1e-6)  # stored as float32
    for name, weight in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    assert file.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_says_so(tmp_path, capsys, number):
    file = tmp_path / "x.safetensors"
    usual, taken = toy_loss(toy_data()), []

    def interrupted(model, rng):
        taken.append(1)
        if len(taken) == 4:
            os.kill(os.getpid(), number)
        return usual(model, rng)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as end:
        run(file, config(20), interrupted)
    assert end.value.code == 130
    assert "stopped after step 4; the same command goes on from there" in capsys.readouterr().out
    assert len(state(file)["losses"]) == 4
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_progress_is_saved_while_training(tmp_path, monkeypatch):
    """With a clock that runs a minute per look, every step is due."""
    clock, saves = [0.0], []

    def monotonic():
        clock[0] += 60
        return clock[0]

    monkeypatch.setattr(training.time, "monotonic", monotonic)
    original = training.State.save
    monkeypatch.setattr(
        training.State, "save", lambda self, *args: (saves.append(1), original(self, *args))
    )
    run(tmp_path / "x.safetensors", config(3))
    # the first is due after 10 s; it "takes" 60 s, so the next is due after 6,000
    assert len(saves) == 2


# ---------------------------------------------------------------- numbers that go wrong


def nan_from(step: int, dataset: Dataset):
    """The usual loss, until one batch has a NaN pixel."""
    usual = toy_loss(dataset)
    taken = []

    def batch_loss(model, rng):
        taken.append(1)
        value = usual(model, rng)
        return value * (torch.nan if len(taken) > step else 1)

    return batch_loss


def test_B6_the_first_nan_loss_stops_and_names_the_step(tmp_path):
    file = tmp_path / "expert_3.safetensors"
    with pytest.raises(FloatingPointError, match=r"expert_3: loss nan .* at step 5"):
        run(file, config(20), nan_from(5, toy_data()))


def test_B6_a_nan_leaves_the_last_good_resume_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    with monkeypatch.context() as stopped:
        stopped.setattr(training, "Stopper", StopAfter(6))
        with pytest.raises(SystemExit):
            run(file, config(20))
    before = file.read_bytes()
    with pytest.raises(FloatingPointError, match="at step 8"):
        run(file, config(20), nan_from(2, toy_data()))
    assert file.read_bytes() == before
    assert all(torch.isfinite(x).all() for x in state(file).values())


def test_B6_an_infinite_gradient_of_a_finite_loss_stops_too(tmp_path):
    def root(model, rng):
        return model.weight.abs().sqrt().sum()  # 0 at 0, with slope infinity

    with pytest.raises(FloatingPointError, match="loss 0 and gradient norm"):
        run(tmp_path / "x.safetensors", config(3), root, Scalar(0.0))


def test_B6_an_absurd_learning_rate_stops_with_finite_weights_or_ends(tmp_path):
    file = tmp_path / "x.safetensors"
    try:
        run(file, config(30, lr=1e6, warmup=0))
    except FloatingPointError as error:
        assert "at step" in str(error)
    if file.exists():
        assert all(torch.isfinite(x).all() for x in state(file).values())


def test_B5_gradients_below_the_limit_are_not_clipped_and_those_above_are(tmp_path, monkeypatch):
    seen = []
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        seen.append(self.param_groups[0]["params"][0].grad.item())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for i, slope in enumerate((0.5, 7.0)):
        run(
            tmp_path / f"{i}.safetensors",
            config(1),
            lambda m, _, s=slope: s * m.weight.sum(),
            Scalar(),
        )
    assert seen == pytest.approx([0.5, 1.0], rel=1e-5)


def test_B5_fp16_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fp16 training needs a GPU"):
        run(tmp_path / "x.safetensors", config(3, precision="fp16"))
    assert list(tmp_path.iterdir()) == []


def test_bf16_trains_close_to_fp32_and_keeps_fp32_weights(tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        file = tmp_path / f"{precision}.safetensors"
        losses[precision] = run(file, config(10, precision=precision))[1]
        assert state(file)["model.head.weight"].dtype == torch.float32
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)  # 8 bits of mantissa


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++"
)


@needs_compiler
def test_a_compiled_run_is_the_same_run_and_goes_on_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    plain, straight, parts = (tmp_path / f"{x}.safetensors" for x in ("plain", "straight", "parts"))
    _, losses = run(plain, config(6))
    _, compiled = run(straight, config(6, compile=True))
    assert compiled == pytest.approx(losses, rel=1e-4)  # float32 sums in another order
    run_in_parts(monkeypatch, parts, config(6, compile=True), [2, 4])
    a, b, c = state(parts), state(straight), state(plain)
    assert b.keys() == c.keys()  # names as without --compile
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not all(torch.equal(b[name], c[name]) for name in b)  # other kernels did run


def test_compile_belongs_to_the_environment_of_a_run(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    with monkeypatch.context() as stopped:
        stopped.setattr(training, "Stopper", StopAfter(2))
        with pytest.raises(SystemExit):
            run(file, config(4))
    with pytest.raises(ValueError, match="compile was False and is True"):
        run(file, config(4, compile=True))
    args = Namespace(lr=0.1, compile=True)
    assert describe(args, "abc") == {"lr": 0.1, "data": "abc"}


@pytest.mark.parametrize("script", ["train_expert.py", "train_router.py"])
def test_compile_without_a_compiler_is_one_sentence(tmp_path, script):
    partition.main(["--data", "digits", "--clusters", "2", "--run", str(tmp_path)])
    words = [script, "--run", str(tmp_path), "--steps", "2", "--device", "cpu", "--compile"]
    words += ["--cluster", "1"] if script == "train_expert.py" else []
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=Path(__file__).parent.parent,
        env=os.environ | caches | {"CXX": str(tmp_path / "no-compiler")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    error = ended.stderr.strip().splitlines()[-1]
    assert error.startswith("error: --compile finds no working compiler")
    assert error.endswith("install g++, or leave --compile out")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "resume" / "expert_1.safetensors").exists()


def test_G3_an_output_that_cannot_be_written_is_noticed_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("not a folder")

    def never(model, rng):
        raise AssertionError("a step was taken")

    with pytest.raises(OSError, match="file"):
        run(tmp_path / "file" / "resume" / "x.safetensors", config(3), never)


# ---------------------------------------------------------------- short runs, batches, labels


def test_B8_three_steps_of_one_image_each_end_cleanly(tmp_path):
    file = tmp_path / "x.safetensors"
    _, losses = run(file, config(3, warmup=100), toy_loss(toy_data(5), batch_size=1))
    assert len(losses) == 3
    assert len(state(file)["losses"]) == 3
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("warmup", [0, 1, 100])
@pytest.mark.parametrize("lr_schedule", ["cosine", "constant"])
def test_B8_a_single_step_is_a_run(tmp_path, warmup, lr_schedule):
    settings = config(1, warmup=warmup, lr_schedule=lr_schedule)
    _, losses = run(tmp_path / "x.safetensors", settings)
    assert len(losses) == 1


def test_A7_a_shard_smaller_than_the_batch_trains(tmp_path):
    _, losses = run(tmp_path / "x.safetensors", config(3), toy_loss(toy_data(5), batch_size=8))
    assert len(losses) == 3


def test_training_learns(tmp_path):
    """A least-squares problem with the answer 3."""
    file = tmp_path / "x.safetensors"
    ema, losses = run(
        file, config(200, lr=0.1, ema_decay=0.9),
        lambda model, rng: F.mse_loss(model.weight, torch.tensor([3.0])), Scalar(),
    )  # fmt: skip
    assert ema.weight.item() == pytest.approx(3, abs=0.01)
    assert losses[-1] < 1e-3 * losses[0]


def test_batches_are_uniform_over_the_images():
    dataset, num = toy_data(5), 20_000
    _, _, rows = draw_batch(dataset, num, np.random.default_rng(0))
    share = rows.bincount(minlength=5) / num
    assert (share - 0.2).abs().max() < 5 * (0.2 * 0.8 / num) ** 0.5  # 5 sigma


def test_batches_hold_image_and_label_of_the_same_row():
    dataset = toy_data()
    x0, labels, rows = draw_batch(dataset, 7, np.random.default_rng(0))
    assert x0.shape == (7, 3, 2, 4)
    assert x0.dtype == torch.float32
    assert torch.equal(x0, to_float(dataset.images[rows]))
    assert torch.equal(labels, dataset.labels[rows])


def test_half_of_the_images_are_mirrored_along_the_width():
    dataset = toy_data()
    x0, _, rows = draw_batch(dataset, 2000, np.random.default_rng(1), flip=True)
    straight = to_float(dataset.images[rows])
    same = (x0 == straight).flatten(1).all(1)
    mirrored = (x0 == straight.flip(-1)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert abs(mirrored.float().mean().item() - 0.5) < 5 * 0.5 / 2000**0.5


def test_latents_are_drawn_as_they_are():
    latents = torch.randn(6, 4, 2, 3) * 5
    x0, _, rows = draw_batch(
        Dataset(latents, torch.zeros(6).long(), []), 9, np.random.default_rng(0)
    )
    assert torch.equal(x0, latents[rows])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.7, 1.0])
def test_labels_are_dropped_at_their_rate(rate):
    num = 20_000
    labels = torch.arange(num) % 3
    dropped = drop_labels(labels, 3, rate, np.random.default_rng(0))
    changed = dropped != labels
    assert (dropped[changed] == 3).all()  # the null label is the class count
    sigma = (rate * (1 - rate) / num) ** 0.5
    assert abs(changed.double().mean().item() - rate) <= 5 * sigma


def test_noise_is_standard_normal_in_the_shape_of_x():
    x = torch.zeros(50, 3, 20, 30)
    eps = normal_like(x, np.random.default_rng(0))
    assert eps.shape == x.shape
    assert eps.dtype == torch.float32
    assert abs(eps.mean().item()) < 5 / eps.numel() ** 0.5
    assert abs(eps.var().item() - 1) < 5 * (2 / eps.numel()) ** 0.5


def test_places_do_not_belong_to_the_arguments_of_a_result():
    args = Namespace(data="digits", run=Path("a"), device="cpu", lr=0.1, time_interval=(0.0, 0.5))
    described = describe(args, "abc")
    assert described == {"lr": 0.1, "time_interval": [0.0, 0.5], "data": "abc"}
    moved = Namespace(**vars(args) | dict(data="npz:x", run=Path("b"), device="cuda"))
    assert describe(moved, "abc") == described


def test_resume_files_lie_in_their_own_folder():
    assert resume_file(Path("RUN/expert_0.safetensors")) == Path("RUN/resume/expert_0.safetensors")
