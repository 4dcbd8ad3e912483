"""The line budgets of the design, which `make check` enforces: how much program a student reads.

The design says "about", which is read here as at most 20 % more. Counted are lines of code. Blank
lines, comments and docstrings are printed beside them and do not count: a budget that charged for
an equation in a docstring would be paid by leaving it out.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABOUT = 1.2
BUDGETS = {  # name -> (most lines of code, files)
    "maths": (
        1200,
        "schedule analytic objectives conversion dit adaln_single dialects router ensemble "
        "distillation sampler kmeans fid",
    ),
    "plumbing": (900, "data features partition training expert figures"),
    "scripts": (600, "cli run train_expert train_router sample convert_ckpt checkpoint"),
}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(text: str) -> set[int]:
    """The lines that docstrings of the module, its classes and functions stand on."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def count(name: str) -> tuple[int, int]:
    """(lines of code, all lines) of a module or script; zeros if there is no such file."""
    files = [ROOT / "ddm_min" / f"{name}.py", ROOT / f"{name}.py"]
    text = "".join(file.read_text() for file in files if file.exists())
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstring_lines(text)), len(text.splitlines())


def main() -> None:
    """Print the counts; exit with 1 if a budget is exceeded or a module belongs to none."""
    wrong = False
    for name, (most, files) in BUDGETS.items():
        counts = {file: count(file) for file in files.split()}
        code, lines = (sum(pair) for pair in zip(*counts.values(), strict=True))
        wrong |= code > ABOUT * most
        print(f"{name}: {code} of about {most} lines of code ({lines} lines in all)")
        if code > ABOUT * most:
            print(f"  TOO MANY: { {file: pair[0] for file, pair in counts.items()} }")
    counted = {file for _, files in BUDGETS.values() for file in files.split()}
    found = {file.stem for file in [*ROOT.glob("ddm_min/*.py"), *ROOT.glob("*.py")]}
    for file in sorted(found - counted - {"__init__"}):
        wrong = True
        print(f"{file}.py has no budget: add it to {Path(__file__).name}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
