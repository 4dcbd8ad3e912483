"""Kill a training run again and again, and see whether it ends in the same weights to the last bit.

    python -m benchmarks.kill_loop                 # 200 kills, then what checkpoints cost
    python -m benchmarks.kill_loop --kills 20 --seconds 30

A run is a fork of this process, in which everything is loaded already; so it starts in a moment. It
saves after every step and tells through a pipe when the writing of a file begins and when a save
has ended, so that SIGKILL comes while it starts, at a random moment of a random step or, six times
of ten, in the writing: none, some or all of the bytes are then in the temporary file, which has not
been renamed.
The same command follows until it ends by itself. At the end the second number: the share of
the time that saving takes with the usual interval.
"""

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import train_expert
from ddm_min import expert, partition, training

MOST_SAVES = 4  # that a run makes between two kills, each after one step


def fork(work: Callable[[], None], log: Path) -> int:
    """Start work() in a copy of this process and return its id; what it prints goes to `log`."""
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        sys.stdout = sys.stderr = log.open("a", buffering=1)
        work()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int, seconds: float = 60) -> int:
    """The exit status of a process (minus the signal that ended it); a hanging one is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} did not end within {seconds} s")


def saving_every_step(
    main: Callable, argv: list[str], report: int,
    cut: int | None = None, share: float = 1, most: float = math.inf,
) -> Callable[[], None]:  # fmt: skip
    """main(argv) with a save after every step, which reports "(" before it writes, ")" after it.

    report: where to, a file descriptor. cut: the number of the write that stops with a `share` of
    its bytes in the file, and waits to be killed. most: after so many saves it waits as well.
    """

    def work():
        save, save_file, begun, ended = training.State.save, expert.save_file, [0], [0]

        def reported_save(self, *args):
            save(self, *args)
            os.write(report, b")")
            ended[0] += 1
            if ended[0] >= most:
                time.sleep(60)

        def reported_save_file(tensors, file, metadata):
            begun[0] += 1
            if begun[0] == cut:
                save_file(tensors, file, metadata)
                os.truncate(file, round(share * os.path.getsize(file)))
                os.write(report, b"(")
                time.sleep(60)  # until the kill
            os.write(report, b"(")
            save_file(tensors, file, metadata)

        training.SAVE_EVERY = 0
        training.State.save, expert.save_file = reported_save, reported_save_file
        main(argv)

    return work


def cut_files(run: Path) -> list[Path]:
    """Temporary files: of a write that goes on, or of a process that was killed in one."""
    return list(run.rglob(".*.tmp.*"))


def kill_once(main: Callable, argv: list[str], run: Path, rng: random.Random) -> bool:
    """Start main(argv), kill it at a random moment. False if it had ended by itself."""
    ear, mouth = os.pipe()
    # Begins and ends of writing to wait for; 0: killed while starting; odd: while writing.
    moments = rng.choice((0, 1, 1, 2, 3, 3, 4, 5, 5, 6))
    cut = (moments + 1) // 2 if moments % 2 else None
    share = rng.choice((0, rng.random(), 1))
    pid = fork(saving_every_step(main, argv, mouth, cut, share, MOST_SAVES), run / "log")
    os.close(mouth)
    heard = sum(len(os.read(ear, 1)) for _ in range(moments))
    if cut is None:
        time.sleep(rng.uniform(0, 0.005) if moments else rng.uniform(0, 0.2))
    os.kill(pid, signal.SIGKILL)
    killed = heard == moments and wait(pid) == -signal.SIGKILL
    os.close(ear)
    return killed


def kill_loop(main: Callable, argv: list[str], run: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill main(argv) `kills` times, then let it end; what happened, in numbers.

    Raises RuntimeError if it ends before all kills are done (give it more steps) or fails.
    """
    rng, log, in_writing = random.Random(seed), run / "log", 0
    for number in range(kills):
        before = set(cut_files(run))
        if not kill_once(main, argv, run, rng):
            raise RuntimeError(f"it ended before kill {number + 1}: {log.read_text()[-500:]}")
        in_writing += bool(set(cut_files(run)) - before)  # a new one: its name tells the process
    status = wait(fork(lambda: main(argv), log), 300)
    if status:
        raise RuntimeError(f"it failed with {status}: {log.read_text()[-500:]}")
    resumed = log.read_text().count("goes on at step")
    return {"kills": kills, "in_writing": in_writing, "resumed": resumed}


def share_of_saving(main: Callable, argv: list[str], seconds: float) -> tuple[float, int]:
    """(share of the time that saves take, number of saves) of main(argv), stopped after so long."""
    spent, original, start = [], training.State.save, time.monotonic()

    def save(self, *args):
        begin = time.monotonic()
        original(self, *args)
        spent.append(time.monotonic() - begin)

    training.State.save = save
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        main(argv)
    except SystemExit:
        pass  # the usual end of a run that is stopped
    finally:
        training.State.save = original
    return sum(spent) / (time.monotonic() - start), len(spent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120, help="length of the second part")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        killed, straight, usual = (Path(folder) / name for name in ("killed", "straight", "usual"))
        for run in (killed, straight, usual):
            partition.main(["--data", "digits", "--clusters", "3", "--run", str(run)])

        def argv(run: Path, steps: int) -> list[str]:
            return f"--run {run} --cluster 0 --steps {steps} --device cpu".split()

        steps = MOST_SAVES * args.kills + 10
        train_expert.main(argv(straight, steps))
        start = time.monotonic()
        result = kill_loop(train_expert.main, argv(killed, steps), killed, args.kills, args.seed)
        seconds = time.monotonic() - start
        name = "expert_0.safetensors"
        same = all(
            (killed / place).read_bytes() == (straight / place).read_bytes()
            for place in (name, f"resume/{name}")
        )
        leftovers = len(cut_files(killed))
        print(f"{result} in {seconds:.0f} s; same bytes: {same}; leftovers: {leftovers}")
        share, saves = share_of_saving(train_expert.main, argv(usual, 10**6), args.seconds)
        print(f"{saves} saves took {share:.2%} of {args.seconds:.0f} s")
        sys.exit(not same or leftovers > 0 or share > 0.01)


if __name__ == "__main__":
    main()
