"""Every command in the README runs: in order, in an empty folder, made small."""

import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
SMALL = {  # what is appended to a script's arguments, to make it quick
    "train_expert": ["--steps", "2", "--batch-size", "4"],
    "train_router": ["--steps", "2", "--batch-size", "4"],
    "sample": ["--num-steps", "2", "--num", "20"],
}


def readme_commands() -> list[str]:
    """The lines of the README's bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def run_python(command: str) -> None:
    """Run `python script.py ...` or `python -m module ...` in this process, made small."""
    words = shlex.split(command)[1:]
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
    arguments = words[2:] if words[0] == "-m" else words[1:]
    if module == "ddm_min.fid":
        module = "ddm_min.features"
    import_module(module).main(arguments + SMALL.get(module, []))


def make_photos(folder: Path) -> None:
    """A folder with a subfolder per class, as the README asks for."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(30):
            pixels = rng.integers(0, 256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def test_every_python_command_of_the_readme_runs(tmp_path, monkeypatch):
    """A newcomer types them one after the other: none may fail, each leaves what it names."""
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos")
    commands = [line for line in readme_commands() if line.startswith("python ")]
    assert len(commands) > 15
    for command in commands:
        run_python(command)
        out = re.search(r"--out (\S+)", command)
        assert out is None or (tmp_path / out[1]).exists(), command


def test_make_targets_of_the_readme_exist():
    """`make demo` and `make test` are there, and the demo runs the README's own commands."""
    makes = [line for line in readme_commands() if line.startswith("make ")]
    assert {"make demo", "make test"} <= set(makes)
    shown = subprocess.run(
        ["make", "-n", "demo", "BIN=x"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    in_readme = {line.replace("python ", "", 1) for line in readme_commands()}
    for line in re.findall(r"^x/python (.*)$", shown, flags=re.MULTILINE):
        assert line in in_readme, line
