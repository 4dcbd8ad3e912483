"""What a conversion at real size costs: seconds and peak memory for a float32 DiT-XL/2.

    python benchmarks/convert_xl.py [--out convert_xl.json]

Writes a random checkpoint of 2.7 GB in facebook's, then in diffusers' keys to a temporary
folder, converts it as it is and to AdaLN-Single, and deletes it: about 5 minutes on one core. Each
conversion is a process of its own; its memory is the peak resident size above that of the
interpreter with all modules imported, pages of memory-mapped files included (Linux:
/proc/self/status). The limit is 1.3 x the checkpoint.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from ddm_min.dialects import DIFFUSERS, EMBEDDER, FACEBOOK, source_keys
from ddm_min.dit import PRESETS, DiT, DiTConfig, position_table

ROOT = Path(__file__).parent.parent
CONFIG = DiTConfig(4, (32, 32), 1000, modulation="per-block", **PRESETS["DiT-XL/2"])
CONVERT = """
import sys, time, convert_ckpt
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
imported, start = peak(), time.perf_counter()
convert_ckpt.main(sys.argv[1:])
print("measured", time.perf_counter() - start, peak() - imported)
"""


def random_state(layout: dict[str, str]) -> dict[str, torch.Tensor]:
    """A random XL/2 with learned sigma, under the keys of `layout`."""
    width, size, state = CONFIG.width, CONFIG.patch_size, {}
    with torch.device("meta"):  # shapes without memory
        shapes = {name: x.shape for name, x in DiT(CONFIG).state_dict().items()}
    for name, shape in shapes.items():
        keys = source_keys(name, layout, CONFIG.depth)
        rows = shape[0] // len(keys) * (2 if name.startswith("head") else 1)
        for key in keys:
            state[key] = 0.02 * torch.randn(rows, *shape[1:])
    patches = source_keys("trunk.patch_embed.weight", layout, 1)[0]
    state[patches] = state[patches].reshape(width, -1, size, size)
    if layout is FACEBOOK:
        state["pos_embed"] = position_table(16, 16, width)[None]
    for key in [key for key in state if key.startswith(EMBEDDER)]:
        for block in range(1, CONFIG.depth):
            state[key.replace(".0.", f".{block}.", 1)] = state[key].clone()
    return state


def make(dialect: str, folder: Path) -> None:
    """Write the checkpoint; called in a process of its own, whose memory does not count."""
    torch.manual_seed(0)
    if dialect == "facebook":
        torch.save(random_state(FACEBOOK), folder / "model.pt")
    else:
        save_file(random_state(DIFFUSERS), folder / "model.safetensors")
        config = {
            "sample_size": 32,
            "num_attention_heads": CONFIG.heads,
            "num_layers": CONFIG.depth,
        }
        (folder / "config.json").write_text(json.dumps(config))


def measure(dialect: str, modulation: str, folder: Path) -> dict:
    """One conversion in a fresh interpreter."""
    (file,) = folder.glob("model.*")
    options = [str(file), str(folder / "expert.safetensors"), "--modulation", modulation]
    run = subprocess.run(
        [sys.executable, "-c", CONVERT, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, memory = map(float, run.stdout.split("measured")[1].split())
    size = file.stat().st_size
    return {
        "dialect": dialect,
        "modulation": modulation,
        "checkpoint_gb": size / 1e9,
        "expert_gb": (folder / "expert.safetensors").stat().st_size / 1e9,
        "seconds": seconds,
        "peak_gb": memory / 1e9,
        "peak_over_checkpoint": memory / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make[0], Path(args.make[1]))
        return
    rows, start = [], time.perf_counter()
    print(
        f"{'keys':10} {'modulation':10}  {'file':>8} {'expert':>8} {'seconds':>8} {'peak/file':>9}"
    )
    for dialect in ("facebook", "diffusers"):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, __file__, "--make", dialect, folder], cwd=ROOT, check=True
            )
            for modulation in ("per-block", "single"):
                row = measure(dialect, modulation, Path(folder))
                rows.append(row)
                print(
                    f"{dialect:10} {modulation:10}  {row['checkpoint_gb']:5.2f} GB "
                    f"{row['expert_gb']:5.2f} GB {row['seconds']:8.1f} "
                    f"{row['peak_over_checkpoint']:9.3f}"
                )
    print(f"{time.perf_counter() - start:.0f} seconds in all; the limit of the last column is 1.3")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(any(row["peak_over_checkpoint"] > 1.3 for row in rows))


if __name__ == "__main__":
    main()
