"""Checkpoints from elsewhere, opened without running their code: tensors by key, memory-mapped."""

import json
import re
import zipfile
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddm_min.dit import PRESETS

PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")  # left by DataParallel and by torch.compile


def find(path: Path) -> Path:
    """The file of weights: `path` itself, or the only one in a diffusers folder."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint {path.resolve()}")
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ValueError(f"{folder} must hold one .safetensors or .bin file and holds {names}")
    return files[0]


def is_ours(file: Path) -> bool:
    """Whether `expert.write_file` wrote this file; False for what cannot be read at all."""
    if file.suffix != ".safetensors":
        return False
    with suppress(SafetensorError), safe_open(file, framework="pt") as archive:
        return "ddm_min" in (archive.metadata() or {})
    return False


def unpickle(file: Path):
    """torch.load without running code: tensors, plain types, and the Namespace of DiT's `args`."""
    try:
        with torch.serialization.safe_globals([Namespace]):
            # Files of before 2020 are no zip archives and cannot be memory-mapped.
            mapped = zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except (
        Exception
    ) as error:  # a damaged file can make pickle, zip and torch raise nearly anything
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        if forbidden:
            raise ValueError(
                f"{file} holds {forbidden[1]}, neither tensor nor plain data: unpickling it "
                f"could run code, so it is refused; save the state dict alone and convert that"
            ) from None
        raise ValueError(f"{file} is damaged or no PyTorch file ({type(error).__name__})") from None


def read(path: Path, raw: bool) -> tuple[dict[str, Tensor], str, dict]:
    """(tensors by key, which weights they are, hints): memory-mapped, on the CPU.

    Of a training file (model, ema, opt, args) the EMA unless `raw`. hints: what a config.json
    beside the weights, or `args`, tells of heads, depth, image_size and num_classes.
    """
    file = find(path)
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt", device="cpu") as archive:
                stored = {key: archive.get_tensor(key) for key in archive.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or no safetensors file ({error})") from None
    else:
        stored = unpickle(file)
    if not isinstance(stored, dict):
        raise ValueError(f"{file} holds a {type(stored).__name__} and no weights by name")

    which, hints = "the file's only", {}
    config, args = file.parent / "config.json", stored.get("args")
    if config.is_file():
        hints = read_config(config)
    if isinstance(args, Namespace):
        preset = PRESETS.get(str(getattr(args, "model", None)), {})
        hints |= preset | {"num_classes": getattr(args, "num_classes", None)}
    sets = {"EMA": stored.get("ema"), "raw": stored.get("model")}
    sets = {name: weights for name, weights in sets.items() if isinstance(weights, dict)}
    if sets:
        which = "raw" if raw or "EMA" not in sets else "EMA"
        if which not in sets:
            raise ValueError(f"{file} has EMA weights only: leave --raw out")
        stored = sets[which]
    state = {PREFIXES.sub("", str(key)): x for key, x in stored.items()}
    return state, which, {k: x for k, x in hints.items() if isinstance(x, int) and x > 0}


def read_config(file: Path) -> dict:
    """Hints from diffusers' config.json. Raises ValueError for networks that compute otherwise."""
    try:
        config = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no JSON object ({error})") from None
    if config.get("activation_fn", "gelu-approximate") != "gelu-approximate":
        raise ValueError(f"{file}: activation_fn must be gelu-approximate, as DiT's is")
    names = dict(
        num_attention_heads="heads",
        num_layers="depth",
        sample_size="image_size",
        num_embeds_ada_norm="num_classes",
    )
    return {ours: config.get(theirs) for theirs, ours in names.items()}
