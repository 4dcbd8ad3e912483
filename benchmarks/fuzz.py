"""Feed damaged files to everything that reads files: a right answer, or one sentence with the name.

    python -m benchmarks.fuzz --num 10000
    python -m benchmarks.fuzz --num 2000 --only expert resume

Half of the damage is to bytes (flipped, cut, overwritten, repeated), as disks and networks do it:
what is accepted after that must be what was written, where the format has a checksum. The other
half is to the contents, inside an intact file with a right checksum: metadata of wrong types and
absurd sizes, tensors that are missing or of other shapes, as another program might write them.

Every input is made from (seed, number) alone, so that `--seed S --first N --num 1` repeats one.
"""

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import signal
import struct
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import convert_ckpt
from ddm_min import data, dialects, training
from ddm_min.data import Dataset
from ddm_min.dit import DiT, DiTConfig
from ddm_min.expert import Expert, load_router, read_file, save_router, write_file
from ddm_min.objectives import FLOW
from ddm_min.partition import Partition, exported_shard, partition
from ddm_min.router import LearnedRouter, ShardStats
from ddm_min.run import load_run

NAMES = ["cat", "cow", "dog"]
CONFIG = DiTConfig(1, (4, 6), num_classes=3, patch_size=2, width=8, depth=2, heads=2)
NASTY = [
    None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.5, 2.0, float("nan"), float("inf"), 1e308, 1e-320,
    10**9, 2**31, 2**63, 10**30, "", "x", "0", "all", "Linear", "../x", "\u00e9\u20ac", "9" * 400,
    [], [0], [1, 2], [2, 2], [[]], ["x"], [None], {}, {"name": "Betas", "betas": [0.5] * 3},
]  # fmt: skip
MOST_MEMORY, SECONDS = 4 * 2**30, 5  # that reading one file may take
DTYPES = [torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]


# ---------------------------------------------------------------- one good file of each kind


def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (12, 1, 4, 6), dtype=np.uint8))
    return Dataset(images, torch.arange(12) % 3, NAMES)


SPLIT = partition(dataset(), 2, "random", None, seed=0)


def make_expert(file: Path, cluster: int = 0) -> None:
    torch.manual_seed(cluster)
    shard = dataset().subset(SPLIT.assignment == cluster)
    stats = ShardStats.measure(data.to_float(shard.images), shard.labels, 3)
    made = Expert(DiT(CONFIG), FLOW, cluster, (0.0, 1.0), stats, NAMES, SPLIT.fingerprint, 0.1)
    made.save(file)


def make_router(file: Path) -> None:
    torch.manual_seed(2)
    save_router(file, LearnedRouter(CONFIG, 2), SPLIT.counts, fingerprint=SPLIT.fingerprint)


def make_run(file: Path) -> None:
    """The damaged file is one of two experts beside a router."""
    make_expert(file)
    make_expert(file.with_name("expert_1.safetensors"), 1)
    make_router(file.with_name("router.safetensors"))


class Tiny(torch.nn.Module):
    """Two parameters: quick to train, and enough for every part of a resume file."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(3))
        self.b = torch.nn.Parameter(torch.ones(2, 2))


def train(file: Path) -> torch.nn.Module:
    """Three steps, or what is left of them after the resume file."""
    settings = training.TrainConfig(steps=3, batch_size=2, lr_schedule="constant")
    given = {"steps": 3, "data": "abc", "time_interval": [0.0, 0.5]}
    loss = lambda model, rng: model.a.square().sum() + model.b.square().sum()  # noqa: E731
    return training.train(Tiny(), loss, settings, file, given)[0]


def make_classes(file: Path) -> None:
    """What `partition --export` writes for an island, made by hand for cluster 0."""
    text = {
        "class_names": NAMES,
        "image_shape": [1, 4, 6],
        "counts": SPLIT.counts.tolist(),
        "fingerprint": SPLIT.fingerprint,
    }
    file.write_text(json.dumps(text))


def foreign_state(layout: dict[str, str]) -> dict[str, torch.Tensor]:
    """A random network under other people's keys."""
    config = DiTConfig(
        3, (4, 4), 3, patch_size=2, width=8, depth=2, heads=2, modulation="per-block"
    )
    torch.manual_seed(3)
    state = {}
    for name, weights in DiT(config).state_dict().items():
        keys = dialects.source_keys(name, layout, config.depth)
        state |= dict(zip(keys, weights.clone().chunk(len(keys)), strict=True))
    kernel = layout["trunk.patch_embed"] + ".weight"
    state[kernel] = state[kernel].reshape(8, 3, 2, 2)
    return {key: x.contiguous() for key, x in state.items()}


def make_pickle(file: Path) -> None:
    state = foreign_state(dialects.FACEBOOK)
    args = argparse.Namespace(model="DiT-S/2", num_classes=3)
    del args.model
    torch.save({"model": state, "ema": state, "args": args}, file)


def make_foreign(file: Path) -> None:
    save_file(foreign_state(dialects.FACEBOOK), file)


def convert(file: Path) -> dict[str, torch.Tensor]:
    args = convert_ckpt.parse([str(file), "x.safetensors", "--heads", "2", "--image-size", "4"])
    return convert_ckpt.load(file, args)[1]


def picture(mode: str, dtype=np.uint8) -> Image.Image:
    gray = np.random.default_rng(1).integers(0, np.iinfo(dtype).max, (16, 24), dtype=dtype)
    return Image.fromarray(gray) if mode == "I;16" else Image.fromarray(gray).convert(mode)


def folder_of(mode: str, dtype=np.uint8, **options) -> Callable[[Path], None]:
    return lambda file: picture(mode, dtype).save(file, **options)


def make_npz(file: Path, save=np.savez) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    save(file, arr_0=images, arr_1=np.array([0, 2, 1, 1, 0]))


@dataclass
class Target:
    """A reader of files: how a good one is made, how it is read, and what is known of its format.

    kind: of our own files, whose contents are damaged too. exact: byte damage cannot go unnoticed.
    named: a refusal names the file; convert_ckpt, which reads a single one, may name its keys only.
    """

    name: str
    make: Callable[[Path], object]
    load: Callable[[Path], object]
    kind: str = ""
    exact: bool = True
    named: bool = True


def load_folder(file: Path) -> Dataset:
    return data.load(f"folder:{file.parent}")


def load_npz(file: Path) -> Dataset:
    return data.load(f"npz:{file}")


TARGETS = {
    "expert": Target("x.safetensors", make_expert, Expert.load, "expert"),
    "router": Target("router.safetensors", make_router, load_router, "router"),
    "partition": Target(
        "partition.safetensors", SPLIT.save, lambda f: Partition.load(f, dataset()), "partition"
    ),
    "resume": Target("x.safetensors", train, train, "resume"),
    "run": Target(
        "expert_0.safetensors", make_run, lambda f: load_run(f.parent, None, "cpu"), "expert"
    ),
    "classes": Target(
        "classes.json", make_classes,
        lambda f: exported_shard(dataset().subset(SPLIT.assignment == 0), f, "0"), "json", False,
    ),
    "pt": Target("x.pt", make_pickle, convert, exact=False, named=False),
    "foreign": Target("x.safetensors", make_foreign, convert, exact=False, named=False),
    "npz": Target("x.npz", make_npz, load_npz),
    "npz, packed": Target("x.npz", lambda f: make_npz(f, np.savez_compressed), load_npz),
    "png": Target("x.png", folder_of("RGB"), load_folder, exact=False),
    "png, 16 bits": Target("x.png", folder_of("I;16", np.uint16), load_folder, exact=False),
    "png, palette": Target("x.png", folder_of("P"), load_folder, exact=False),
    "jpg": Target("x.jpg", folder_of("CMYK"), load_folder, exact=False),
    "gif": Target("x.gif", folder_of("P"), load_folder, exact=False),
    "bmp": Target("x.bmp", folder_of("1"), load_folder, exact=False),
    "tif": Target("x.tif", folder_of("RGBA"), load_folder, exact=False),
    "webp": Target("x.webp", folder_of("RGB"), load_folder, exact=False),
}  # fmt: skip


# ---------------------------------------------------------------- damage


def damage_bytes(whole: bytes, rng: random.Random) -> bytes:
    """One to three accidents. The start is hit more often: headers are where the trouble is."""
    damaged = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        size = len(damaged)
        place = rng.randrange(min(size, rng.choice((16, 200, size))) or 1)
        length = rng.choice((1, 2, 4, 8, rng.randrange(1, 200)))
        match rng.randrange(7):
            case 0 | 1 if size:
                damaged[min(place, size - 1)] ^= 1 << rng.randrange(8)
            case 2:
                del damaged[rng.randrange(size + 1) :]
            case 3:
                damaged[place : place + length] = rng.randbytes(length)
            case 4:
                damaged[place : place + length] = rng.choice((b"\0", b"\xff")) * length
            case 5:
                del damaged[place : place + length]
            case 6:
                damaged[place:place] = damaged[place : place + length]
    return bytes(damaged)


def damage_json(value, rng: random.Random):
    """Replace or remove something at a random depth, or put one thing in the place of another."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        damaged = copy.deepcopy(value)
        key = rng.choice(list(damaged)) if isinstance(value, dict) else rng.randrange(len(value))
        if rng.random() < 0.15:
            del damaged[key]
        else:
            damaged[key] = damage_json(damaged[key], rng)
        return damaged
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice((value + 1, -value, value * 10**9, value - 1, float(value), str(value)))
    return copy.deepcopy(rng.choice(NASTY))


def damage_tensors(tensors: dict[str, torch.Tensor], rng: random.Random) -> None:
    """Drop, add, cut, reshape, retype or overwrite one of them."""
    name = rng.choice(sorted(tensors))
    x = tensors[name]
    match rng.randrange(8):
        case 0:
            del tensors[name]
        case 1:
            tensors[name + "x"] = tensors.pop(name)
        case 2:
            tensors[name] = x.reshape(-1)[: rng.randrange(x.numel() + 1)].clone()
        case 3:
            tensors[name] = x.reshape((1, *x.shape, 1)[rng.randrange(2) :])
        case 4:
            tensors[name] = x.to(rng.choice(DTYPES))
        case 5:
            tensors[name] = torch.full_like(x, rng.choice((0, 1, 5, 100)))
        case 6:
            tensors[name] = x.flip(0) * -1 if x.ndim and x.dtype != torch.bool else x.new_zeros(0)
        case 7:
            other = rng.choice(sorted(tensors))
            tensors[name], tensors[other] = tensors[other].clone(), x.clone()


def damage_contents(file: Path, kind: str, rng: random.Random) -> None:
    """Rewrite one of our files as another program might have: whole, but with odd contents."""
    if kind == "json":
        file.write_text(json.dumps(damage_json(json.loads(file.read_text()), rng)))
        return
    tensors, metadata = read_file(file, kind)
    metadata = {k: x for k, x in metadata.items() if k not in ("kind", "format_version")}
    if rng.random() < 0.7:
        metadata = damage_json(metadata, rng)
    if not isinstance(metadata, dict) or rng.random() < 0.05:
        text = json.dumps(damage_json({"format_version": 1, "kind": kind, "x": metadata}, rng))
        save_file(tensors, file, metadata={"ddm_min": text})
        return
    if rng.random() < 0.4:
        damage_tensors(tensors, rng)
    write_file(file, kind, tensors, metadata)


def damage_header(whole: bytes, rng: random.Random) -> bytes:
    """Rewrite the header of a safetensors file: other shapes, types and places of the tensors."""
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.dumps(damage_json(json.loads(whole[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + whole[8 + length :]


# ---------------------------------------------------------------- what is right


def digest(value) -> str:
    """A hash of everything in a loaded object."""
    sha = hashlib.sha256()

    def add(x):
        if isinstance(x, torch.nn.Module):
            x = x.state_dict()
        if isinstance(x, torch.Tensor):
            sha.update(repr((x.dtype, tuple(x.shape))).encode())
            sha.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, dict):
            for key in sorted(x):
                add(key), add(x[key])
        elif isinstance(x, list | tuple):
            for part in x:
                add(part)
        elif hasattr(x, "__dict__") and not callable(x):
            add(vars(x))
        elif not callable(x):
            sha.update(repr(x).encode())

    add(value)
    return sha.hexdigest()


class TooSlowError(BaseException):
    """Not caught by any reader, unlike an Exception."""


def too_slow(*_):
    raise TooSlowError


@contextlib.contextmanager
def limits():
    """No reader may take long or much memory: a file that asks for it is to be refused before."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_MEMORY
    before = signal.signal(signal.SIGALRM, too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield lambda: signal.alarm(SECONDS)
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def one_input(name: str, number: int, seed: int, folder: Path, start_clock: Callable) -> str:
    """Damage a good file of target `name` and read it: "right", "other" or "refused".

    "other": read, though not as what was written; only where nothing could tell. Raises
    AssertionError with what happened for everything else.
    """
    target, rng = TARGETS[name], random.Random(f"{seed} {number}")
    place = folder / name
    good, file = place / "good" / target.name, place / "damaged" / target.name
    if not good.exists():
        for path in (good, file):
            path.parent.mkdir(parents=True)
            target.make(path)
    original = digest(target.load(good))
    file.unlink(missing_ok=True)
    by_bytes = not target.kind or rng.random() < 0.5
    if not by_bytes:
        file.write_bytes(good.read_bytes())
        damage_contents(file, target.kind, rng)
    elif target.name.endswith("safetensors") and rng.random() < 0.3:
        file.write_bytes(damage_header(good.read_bytes(), rng))
    else:
        file.write_bytes(damage_bytes(good.read_bytes(), rng))

    which = f"{name}, --seed {seed} --first {number} --num 1"
    start_clock()
    try:
        loaded = digest(target.load(file))
    except (ValueError, OSError) as error:
        text = str(error)
        shown = str(file.parent) in text or str(file) in text
        assert shown or not target.named, f"{which}: no name in {text!r}"
        assert "\n" not in text, f"{which}: not one line: {text!r}"
        return "refused"
    except (Exception, TooSlowError) as error:
        raise AssertionError(f"{which}: {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
    assert loaded == original or not (by_bytes and target.exact), f"{which}: read as something else"
    return "right" if loaded == original else "other"


def fuzz(num: int, seed: int = 0, first: int = 0, only: list[str] | None = None) -> Counter:
    """Try `num` inputs, the targets by turns; returns {(target, outcome): how many}."""
    names, outcomes = only or list(TARGETS), Counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
        limits() as start_clock,
    ):
        warnings.simplefilter("ignore")
        for number in range(first, first + num):
            name = names[number % len(names)]
            outcomes[name, one_input(name, number, seed, Path(folder), start_clock)] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", nargs="+", choices=TARGETS, help="some of the readers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    outcomes = fuzz(args.num, args.seed, args.first, args.only)
    for name in TARGETS:
        counts = {outcome: n for (of, outcome), n in outcomes.items() if of == name}
        if counts:
            print(f"{name:14}", counts)
    print(f"{sum(outcomes.values())} inputs in {time.monotonic() - start:.0f} s: no accident")


if __name__ == "__main__":
    main()
