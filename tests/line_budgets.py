"""The line budgets of the design, which `make check` enforces: what a student has to read, in all.

Every line that is not blank counts, docstrings and comments included.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS = {  # name -> (most lines, files)
    "maths": (
        1200,
        "schedule analytic objectives conversion dit adaln_single router ensemble sampler fid",
    ),
    "plumbing": (900, "data features partition training expert figures"),
    "scripts": (600, "cli run train_expert train_router sample convert_ckpt"),
}


def count(name: str) -> int:
    """Lines of a module or script that are not blank; 0 if there is no such file."""
    files = [ROOT / "ddm_min" / f"{name}.py", ROOT / f"{name}.py"]
    text = "\n".join(file.read_text() for file in files if file.exists())
    return sum(1 for line in text.splitlines() if line.strip())


def main() -> None:
    """Print the counts; exit with 1 if a budget is exceeded or a module belongs to none."""
    wrong = False
    for name, (most, files) in BUDGETS.items():
        lines = {file: count(file) for file in files.split()}
        total = sum(lines.values())
        wrong |= total > most
        print(f"{name}: {total} of {most} lines", "" if total <= most else f"TOO MANY: {lines}")
    counted = {file for _, files in BUDGETS.values() for file in files.split()}
    found = {file.stem for file in [*ROOT.glob("ddm_min/*.py"), *ROOT.glob("*.py")]}
    for file in found - counted - {"__init__"}:
        wrong = True
        print(f"{file}.py has no budget: add it to {Path(__file__).name}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
