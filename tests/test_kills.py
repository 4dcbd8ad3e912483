"""Islands that die and come back: SIGKILL at any moment, and the result has the same bits.

Runs are forks of this process, where everything is loaded: see `benchmarks/kill_loop.py`, which
also kills 200 times and measures what checkpoints cost.
"""

import os
import signal
import time

import pytest
import torch

import train_expert
import train_router
from benchmarks.kill_loop import MOST_SAVES, fork, kill_loop, saving_every_step, wait
from ddm_min import partition, training
from ddm_min.expert import read_file, replacing

EXPERT = "--cluster 0 --model router --objective ddpm --weight-decay 0.1 --warmup 20"
EXPERT_BF16 = "--cluster 1 --model router --lr-schedule constant --flip --precision bf16"
CASES = {
    "expert": (train_expert.main, EXPERT, "expert_0.safetensors", 8),
    "expert in bf16": (train_expert.main, EXPERT_BF16, "expert_1.safetensors", 5),
    "router": (train_router.main, "--lr 0.01", "router.safetensors", 7),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads do not survive a fork, so none may be needed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A partition; and a step is made, so that all that a fork needs is imported here."""
    folder = tmp_path_factory.mktemp("split")
    partition.main(["--data", "digits", "--clusters", "3", "--run", str(folder)])
    train_expert.main(arguments(folder, "--cluster all", 1))
    return folder / "partition.safetensors"


def new_run(folder, split):
    folder.mkdir()
    (folder / split.name).write_bytes(split.read_bytes())
    return folder


def arguments(run, words: str, steps: int) -> list[str]:
    return f"--run {run} --steps {steps} --batch-size 8 --device cpu {words}".split()


@pytest.mark.parametrize("case", CASES)
def test_C7_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path, split, case):
    main, words, name, kills = CASES[case]
    straight, killed = (new_run(tmp_path / folder, split) for folder in ("straight", "killed"))
    steps = MOST_SAVES * kills + 4
    assert wait(fork(lambda: main(arguments(straight, words, steps)), tmp_path / "log")) == 0
    happened = kill_loop(main, arguments(killed, words, steps), killed, kills, seed=len(case))
    print(happened)
    assert happened["kills"] == kills
    assert happened["resumed"] >= 1
    assert happened["in_writing"] >= kills / 3  # a cut temporary file lay beside the whole one
    for place in (name, f"resume/{name}"):
        assert (killed / place).read_bytes() == (straight / place).read_bytes(), place
    assert list(killed.rglob(".*.tmp.*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_signal_saves_and_says_so_and_the_run_goes_on(tmp_path, split, number):
    run, log = new_run(tmp_path / "run", split), tmp_path / "log"
    argv, (ear, mouth) = arguments(run, "--cluster 0", 400), os.pipe()
    pid = fork(saving_every_step(train_expert.main, argv, mouth), log)
    os.close(mouth)
    for _ in range(9):
        os.read(ear, 1)  # the fifth save has begun
    os.kill(pid, number)
    os.kill(pid, number)  # an impatient user: the last save is not disturbed
    assert wait(pid) == 130
    os.close(ear)
    tensors, metadata = read_file(run / "resume" / "expert_0.safetensors", "resume")
    step = metadata["step"]
    assert 5 <= step < 400
    assert len(tensors["losses"]) == step
    text = log.read_text()
    assert f"expert_0: stopped after step {step}; the same command goes on from there" in text
    assert "Traceback" not in text
    assert not (run / "expert_0.safetensors").exists()  # nothing that looks finished

    # ... and goes on where it stopped
    ear, mouth = os.pipe()
    pid = fork(saving_every_step(train_expert.main, argv, mouth), log)
    os.close(mouth)
    os.read(ear, 1)
    os.kill(pid, number)
    assert wait(pid) == 130
    assert f"expert_0: goes on at step {step}" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_ends_without_a_traceback(tmp_path, number):
    """Ctrl-C while the data is read: nothing is lost, and nothing to be read ten lines about."""
    log = tmp_path / "log"

    def slow(argv):
        def load(*_):
            (tmp_path / "loading").touch()
            time.sleep(30)

        train_expert.data.load = load
        train_expert.main(argv)

    pid = fork(lambda: slow(["--run", str(tmp_path), "--cluster", "all"]), log)
    while not (tmp_path / "loading").exists():
        time.sleep(0.005)
    os.kill(pid, number)
    assert wait(pid) == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in log.read_text()


def test_leftovers_of_a_kill_are_removed_by_the_next_write(tmp_path):
    file = tmp_path / "expert_0.safetensors"
    mine = [".expert_0.123.tmp.safetensors", ".expert_0.99999.tmp.safetensors"]
    others = [".expert_01.123.tmp.safetensors", ".expert_0.tmp", "expert_0.old.safetensors"]
    for name in mine + others:
        (tmp_path / name).write_text("half")
    with replacing(file) as temporary:
        temporary.write_text("whole")
    assert file.read_text() == "whole"
    assert sorted(x.name for x in tmp_path.iterdir()) == sorted([file.name, *others])


def test_checkpoints_cost_at_most_one_percent(tmp_path, monkeypatch):
    """By a clock on which a step takes 1 s and a save 0.5 s: no more than a save in 100 steps.

    The first save is assumed to take 0.1 s, so that it comes after 20 s already.
    """
    clock, steps, saved_at = [0.0], [0], []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

    def loss(model, rng):
        clock[0] += 1
        steps[0] += 1
        return (model.weight - 1).square().sum()

    def save(self, *args):
        clock[0] += 0.5
        saved_at.append(steps[0])

    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(training.State, "save", save)
    settings = training.TrainConfig(steps=1000, lr=1e-3)
    training.train(Model(), loss, settings, tmp_path / "x.safetensors", {})
    assert saved_at[0] == 21
    assert all(
        later - earlier >= 100 for earlier, later in zip(saved_at[:-2], saved_at[1:-1], strict=True)
    )
    assert saved_at[-1] == 1000
    assert 0.5 * len(saved_at) / clock[0] < 0.01
