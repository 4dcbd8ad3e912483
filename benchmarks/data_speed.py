"""How fast and in how much memory large datasets are converted, loaded and trained on.

    python benchmarks/data_speed.py --images 200000 --folder /somewhere/with/room
    python benchmarks/data_speed.py --images 1281160 --sparse        # 15.7 GB that take no room

Writes ten synthetic archives in the layout of downsampled ImageNet (random pixels, one pickle or
.npz at a time), converts them through `data.load("imagenet64:...")` in a process of its own, and
trains on the result in another: the fingerprint, a shard, its statistics, and batches of 128. With
--sparse, archives and converted images are files of holes, which read as zeros: the real sizes for
`data.load` and training, but nothing is converted.

Every process may own --limit GB of memory (RLIMIT_DATA, which counts all that cannot be dropped
again; an archive is held twice while it is unpickled). The pages of the memory-mapped file can be
dropped, and are printed beside it.
"""

import argparse
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

GB = 1e9


def status(key: str) -> float:
    """A line of /proc/self/status, in GB: VmHWM, RssAnon, RssFile, VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024 / GB
    return float("nan")


def write_archives(root: Path, num: int, size: int, suffix: str) -> None:
    """Ten archives that together hold `num` images, with labels from 1 to 1000."""
    root.mkdir(parents=True, exist_ok=True)
    rng, count = np.random.default_rng(0), num // 10
    pixels = np.frombuffer(rng.bytes(count * 3 * size**2), np.uint8).reshape(count, -1)
    for number in range(1, 11):
        stored = {
            "data": pixels,
            "labels": rng.integers(1, 1001, count).tolist(),
            "mean": np.zeros(3 * size**2),
        }
        file = root / f"train_data_batch_{number}{suffix}"
        if suffix:
            np.savez(file, **stored)
        else:
            with open(file, "wb") as stream:
                pickle.dump(stored, stream, protocol=4)


def convert(name: str, args: argparse.Namespace) -> dict:
    """Load for the first time, which converts."""
    from ddm_min import data

    if args.sparse:

        def read_all(files, read, unit, sink):
            shape = [args.images, 3, args.image_size, args.image_size]
            sink.truncate(int(np.prod(shape)))
            return shape, (np.arange(args.images) % 1000).tolist()

        data.read_all = read_all
    before, start = status("RssAnon"), time.monotonic()
    dataset = data.load(name)
    seconds = time.monotonic() - start
    size = dataset.num_bytes / GB
    return dict(seconds=seconds, gb=size, gb_per_second=size / seconds, images=len(dataset)) | {
        "interpreter_gb": before
    }


def use(name: str, args: argparse.Namespace) -> dict:
    """What training does with a dataset: load, shard, statistics, batches."""
    import torch

    from ddm_min import data
    from ddm_min.router import ShardStats
    from ddm_min.training import draw_batch

    times = {}

    def timed(what: str, function):
        start = time.monotonic()
        result = function()
        times[what] = time.monotonic() - start
        return result

    dataset = timed("load", lambda: data.load(name))
    timed("fingerprint", dataset.fingerprint)
    shard = timed("subset", lambda: dataset.subset(torch.arange(len(dataset)) % args.shards == 0))
    timed(
        "statistics",
        lambda: ShardStats.measure(shard.images, shard.labels, 1000, as_floats=data.to_float),
    )
    anonymous = status("RssAnon")
    rng = np.random.default_rng(0)
    for who, source in (("all", dataset), ("shard", shard)):
        timed(
            f"200 batches of 128, {who}",
            lambda s=source: [len(draw_batch(s, 128, rng)) for _ in range(200)],
        )
    return dict(times, rss_anon_after_statistics_gb=anonymous)


def child(name: str, args: argparse.Namespace) -> None:
    """One step in this process, under the cap."""
    limit = args.limit
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit * GB), int(limit * GB)))
    row = {"convert": convert, "use": use}[args.step](name, args)
    row |= {"peak_rss_gb": status("VmHWM"), "rss_anon_gb": status("RssAnon")}
    row |= {"rss_file_gb": status("RssFile"), "limit_gb": limit}
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--image-size", type=int, default=64, choices=(32, 64))
    parser.add_argument("--suffix", default="", choices=("", ".npz"), help="pickles, or .npz")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/data_speed"), help="for the files"
    )
    parser.add_argument("--sparse", action="store_true", help="files of holes, of any size")
    parser.add_argument("--shards", type=int, default=8, help="the shard is one of so many")
    parser.add_argument("--limit", type=float, default=5.0, help="GB that a process may own")
    parser.add_argument("--step", choices=("convert", "use"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    source = args.folder / "source"
    name = f"imagenet{args.image_size}:{source}"
    if args.step:
        return child(name, args)

    start = time.monotonic()
    if args.sparse:
        source.mkdir(parents=True, exist_ok=True)
        for number in range(1, 11):
            with open(source / f"train_data_batch_{number}", "wb") as file:
                file.truncate(args.images // 10 * 3 * args.image_size**2)
    else:
        write_archives(source, args.images, args.image_size, args.suffix)
    gb = sum(file.stat().st_size for file in source.iterdir()) / GB
    print(f"wrote {gb:.2f} GB of archives in {time.monotonic() - start:.0f} s")
    environment = os.environ | {"DDM_MIN_CACHE": str(args.folder / "cache")}
    rows = {}
    for step in ("convert", "use"):
        command = [sys.executable, __file__, *sys.argv[1:], "--step", step]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            break
        rows[step] = json.loads(done.stdout.splitlines()[-1])
        for key, value in rows[step].items():
            print(f"{step:8} {key:32} {value:10.3f}")
    (args.folder / "data_speed.json").write_text(json.dumps(rows, indent=2))
    shutil.rmtree(source)
    shutil.rmtree(args.folder / "cache")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
