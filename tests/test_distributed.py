"""One island on several processes: the batch and the losses are those of a single process.

All but one test fork this process, where everything is loaded; they meet on 127.0.0.1 through gloo,
as torchrun's processes do. One test starts torchrun itself.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_expert
import train_router
from benchmarks.kill_loop import fork, wait
from ddm_min import partition
from ddm_min.expert import read_file
from ddm_min.training import my_share, rank_and_world

ROOT = Path(__file__).parent.parent
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
EXPERT = "--cluster 0 --flip --steps 8 --batch-size 12 --model router --device cpu"
ROUTER = "--steps 8 --batch-size 12 --device cpu"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One thread, which is what torchrun gives each process, and no launcher to begin with."""
    torch.set_num_threads(1)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A RUN folder with a partition, and an expert and a router of one process."""
    run = tmp_path_factory.mktemp("single")
    partition.main(["--data", "digits", "--clusters", "3", "--run", str(run)])
    train_expert.main(f"--run {run} {EXPERT}".split())
    train_router.main(f"--run {run} {ROUTER}".split())
    return run


def new_run(folder: Path, single: Path) -> Path:
    folder.mkdir()
    file = "partition.safetensors"
    (folder / file).write_bytes((single / file).read_bytes())
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(main, argv: list[str], world: int, logs: Path) -> list[int]:
    """Start main(argv) in `world` processes, as torchrun would; returns their ids."""
    port = free_port()

    def work(rank: int):
        numbers = (rank, world, rank, "127.0.0.1", port)
        os.environ.update(zip(LAUNCHER, map(str, numbers), strict=True))
        main(argv)

    return [fork(lambda rank=rank: work(rank), logs / f"log{rank}") for rank in range(world)]


def together(main, argv: list[str], world: int, logs: Path) -> list[int]:
    """The exit statuses of main(argv) in `world` processes, which torchrun ends when one fails."""
    pids, statuses = launch(main, argv, world, logs), {}
    while not statuses.keys() >= set(pids):
        pid, status = os.waitpid(-1, 0)
        statuses[pid] = os.waitstatus_to_exitcode(status)
        for other in set(pids) - set(statuses) if statuses[pid] else ():
            os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in pids]


def all_said(logs: Path) -> str:
    """What any process has printed; one that was ended early may have no log."""
    return "".join(file.read_text() for file in logs.glob("log*"))


def losses(run: Path, name: str) -> list[float]:
    tensors, _ = read_file(run / "resume" / f"{name}.safetensors", "resume")
    return tensors["losses"].tolist()


# ---------------------------------------------------------------- one model, several processes


EXPERT_ON = (train_expert.main, EXPERT, "expert_0")
ROUTER_ON = (train_router.main, ROUTER, "router")


@pytest.mark.parametrize(
    ("main", "argv", "name", "world"),
    [(*EXPERT_ON, 2), (*EXPERT_ON, 3), (*ROUTER_ON, 2)],
    ids=["expert on 2", "expert on 3", "router on 2"],
)
def test_H2_losses_agree_with_a_single_process_step_by_step(
    tmp_path, single, main, argv, name, world
):
    run = new_run(tmp_path / "run", single)
    assert together(main, f"--run {run} {argv}".split(), world, tmp_path) == [0] * world
    assert losses(run, name) == pytest.approx(losses(single, name), rel=1e-5)
    assert len(losses(run, name)) == 8
    # the files are those of one process: the same names, no prefix of a wrapper
    for place in (f"{name}.safetensors", f"resume/{name}.safetensors"):
        kind = "resume" if "resume" in place else name.split("_")[0]
        alone, _ = read_file(single / place, kind)
        shared, _ = read_file(run / place, kind)
        assert alone.keys() == shared.keys()
        for key, x in alone.items():
            assert torch.allclose(x.float(), shared[key].float(), atol=1e-3), key
    # only the first process speaks and draws progress
    assert "it/s" in (tmp_path / "log0").read_text()
    for rank in range(1, world):
        assert (tmp_path / f"log{rank}").read_text() == ""


def test_H1_G2_torchrun_with_two_processes(tmp_path, single):
    """New interpreters, which inherit nothing. Without "--", torchrun takes --run for its own."""
    run = new_run(tmp_path / "run", single)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--", "train_expert.py"]
    done = subprocess.run(
        [*command, "--run", run, *EXPERT.split()], cwd=ROOT, capture_output=True, text=True,
        timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert losses(run, "expert_0") == pytest.approx(losses(single, "expert_0"), rel=1e-5)


def test_H1_a_launcher_with_one_process_is_a_plain_start(tmp_path, single):
    run = new_run(tmp_path / "run", single)
    assert together(train_expert.main, f"--run {run} {EXPERT}".split(), 1, tmp_path) == [0]
    for place in ("expert_0.safetensors", "resume/expert_0.safetensors"):
        assert (run / place).read_bytes() == (single / place).read_bytes()


def test_H1_a_plain_start_is_process_0_of_1():
    assert rank_and_world() == (0, 1)
    batch = torch.arange(10)
    (share,) = my_share(batch)
    assert torch.equal(share, batch)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_H3_shares_are_disjoint_and_complete(monkeypatch, world):
    """There are no epochs: batches are drawn with replacement, and each is cut among processes."""
    x, labels = torch.randn(12, 1, 2, 3), torch.arange(12)
    shares = []
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(my_share(x, labels))
        assert len(shares[-1][0]) == 12 // world
    assert torch.equal(torch.cat([share[0] for share in shares]), x)
    assert torch.equal(torch.cat([share[1] for share in shares]), labels)


def test_H4_processes_see_different_images_noise_and_times(tmp_path, single):
    """Each writes down what its network was asked in two steps; a single process does, too."""
    original = train_expert.loss

    def noted(main_argv, folder):
        def loss(model, x0, eps, t, labels, *more):
            with open(folder / f"asked{rank_and_world()[0]}", "ab") as file:
                for x in (x0, eps, t):
                    np.save(file, x.numpy())
            return original(model, x0, eps, t, labels, *more)

        train_expert.loss = loss  # in the fork only
        train_expert.main(main_argv)

    asked = {}
    for world in (1, 2):
        run = new_run(tmp_path / f"run{world}", single)
        argv = f"--run {run} {EXPERT} --steps 2".split()
        statuses = together(lambda a, run=run: noted(a, run), argv, world, tmp_path)
        assert statuses == [0] * world
        for rank in range(world):
            with open(run / f"asked{rank}", "rb") as file:
                asked[world, rank] = [np.load(file) for _ in range(6)]
    for whole, first, second in zip(asked[1, 0], asked[2, 0], asked[2, 1], strict=True):
        assert np.array_equal(np.concatenate([first, second]), whole)
    _, eps, t, _, later_eps, _ = asked[1, 0]
    assert len({row.tobytes() for row in eps}) == len(set(t.tolist())) == 12
    assert not np.array_equal(eps, later_eps)  # each step draws anew


@pytest.mark.parametrize(("batch_size", "world"), [(6, 4), (2, 4)])
def test_H5_a_batch_that_does_not_divide_is_refused_with_both_numbers(
    tmp_path, single, batch_size, world
):
    run = new_run(tmp_path / "run", single)
    argv = f"--run {run} {EXPERT} --batch-size {batch_size}".split()
    statuses = together(train_expert.main, argv, world, tmp_path)
    assert 2 in statuses
    assert 0 not in statuses
    said = all_said(tmp_path)
    assert f"{batch_size} images do not divide among {world} processes" in said
    assert [x.name for x in run.iterdir() if x.name != "resume"] == ["partition.safetensors"]


# ---------------------------------------------------------------- stopping and going on


def test_a_signal_to_one_process_stops_all_at_the_same_step_and_they_go_on(tmp_path, single):
    run = new_run(tmp_path / "run", single)
    argv = f"--run {run} {EXPERT} --steps 3000".split()
    pids = launch(train_expert.main, argv, 2, tmp_path)
    while "loss=" not in (tmp_path / "log0").read_text():
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGTERM)  # the one that writes nothing
    assert [wait(pid) for pid in pids] == [130, 0]
    done = len(losses(run, "expert_0"))
    assert 0 < done < 3000
    assert f"stopped after step {done}; the same" in (tmp_path / "log0").read_text()

    _, metadata = read_file(run / "resume" / "expert_0.safetensors", "resume")
    assert metadata["environment"]["processes"] == 2
    alone = fork(lambda: train_expert.main(argv), tmp_path / "alone")
    assert wait(alone) == 2  # sums in another order: other last bits
    assert "processes was 2 and is 1" in (tmp_path / "alone").read_text()

    pids = launch(train_expert.main, argv, 2, tmp_path)
    while "loss=" not in (tmp_path / "log0").read_text().partition("goes on at step")[2]:
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGTERM)
    assert [wait(pid) for pid in pids] == [130, 0]
    assert (tmp_path / "log1").read_text() == ""


def test_processes_that_see_different_resume_files_are_refused(tmp_path, single):
    """Two machines whose RUN is not the same folder: the second would start from the beginning."""
    first = new_run(tmp_path / "first", single)
    other = new_run(tmp_path / "other", single)
    argv = f"{EXPERT} --lr-schedule constant --run".split()
    assert together(train_expert.main, [*argv, str(first)], 2, tmp_path) == [0, 0]

    def main(argv):
        train_expert.main([*argv, str((first, other)[rank_and_world()[0]]), "--steps", "12"])

    statuses = together(main, argv, 2, tmp_path)
    assert 2 in statuses
    assert 0 not in statuses
    assert "see different files" in all_said(tmp_path)


def test_B6_a_nan_on_one_process_stops_all(tmp_path, single):
    run = new_run(tmp_path / "run", single)
    original = train_expert.loss

    def main(argv):
        steps = []

        def loss(*arguments):
            steps.append(1)
            bad = len(steps) == 4 and rank_and_world()[0] == 1
            return original(*arguments) * (torch.nan if bad else 1)

        train_expert.loss = loss
        train_expert.main(argv)

    assert 0 not in together(main, f"--run {run} {EXPERT}".split(), 2, tmp_path)
    assert re.search("loss nan .* at step 3", all_said(tmp_path))
    assert not (run / "resume" / "expert_0.safetensors").exists()
