"""Would the tests notice one wrong sign? Mutation testing of the arithmetic, resumable.

    python benchmarks/mutation.py [--module schedule] [--limit 20] [--list-survivors]

A mutant is a module with one operator, comparison or number changed; the tests in TESTS run on it
until one fails (killed, as is a hang) or all pass (survived). Strings, messages and type hints are
left alone. Each runs in a fork of this process, which has the heavy packages imported but not
ddm_min; an import hook there serves the mutated code, so files on disk are never touched. Results
go to a JSON-lines file, keyed by module, tests and mutation: a rerun does what is missing.
"""

import argparse
import ast
import copy
import hashlib
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # those that check the module, cheap ones first; a file that is not there is passed over
    "schedule": ["schedule", "objectives", "analytic", "sampler", "theorem"],
    "objectives": ["objectives", "analytic", "sampler", "theorem"],
    "conversion": ["ensemble", "sampler", "theorem"],
    "ensemble": ["ensemble", "router", "sampler", "theorem"],
    "router": ["router", "ensemble"],
}
EXCLUDED = {"LearnedRouter"}  # a network, not a formula
PRELOAD = "numpy hypothesis scipy.linalg sklearn.datasets einops safetensors.torch tqdm pytest"
# Survivors that no test of what is right can kill: (module, source line, mutation) -> reason.
EQUIVALENT = {
    ("router", "torch.manual_seed(0)", "torch.manual_seed(0) -> torch.manual_seed(1)"): (
        "arbitrary: another random start of the approximate SVD is as right as this one"
    ),
    (
        "router",
        "_, singular, basis = torch.svd_lowrank(within, q=rank, niter=4)",
        "niter=4 -> niter=5",
    ): "a choice of accuracy: one more iteration only refines the approximate SVD",
    (
        "router",
        "def measure(cls, images, labels: Tensor, num_classes: int, rank=64, as_floats=None):",
        "64 -> 65",
    ): "a default, not a law",
    (
        "ensemble",
        "for low, high in [*intervals, (1.0, 1.0)]:",
        "(1.0, 1.0) -> (1.0, 0)",
    ): "the sentinel starts at 1, so where it ends is never read",
    (
        "ensemble",
        "for low, high in [*intervals, (1.0, 1.0)]:",
        "(1.0, 1.0) -> (1.0, 2)",
    ): "the sentinel starts at 1, so where it ends is never read",
    ("router", "number = -1", "-1 -> -0"): "any number that no strategy takes says invalid",
    ("router", "number = -1", "-1 -> -2"): "any number that no strategy takes says invalid",
}
SWAPS = {
    **{ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult]},
    **{ast.Pow: [ast.Mult], ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd]},
    **{ast.And: [ast.Or], ast.Or: [ast.And], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq]},
    **{ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt]},
    **{ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt]},
    **{ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.In: [ast.NotIn], ast.NotIn: [ast.In]},
}
EXTREMES = {"min": "max", "max": "min"}


def variants(node: ast.AST) -> list[ast.AST]:
    """The same node, broken in each way that we know of."""

    def but(field: str, value) -> ast.AST:
        changed = copy.copy(node)
        setattr(changed, field, value)
        return changed

    match node:
        case ast.BinOp(op=old) | ast.AugAssign(op=old) | ast.BoolOp(op=old):
            return [but("op", new()) for new in SWAPS.get(type(old), [])]
        case ast.Compare(ops=ops):
            places = [(i, new()) for i, old in enumerate(ops) for new in SWAPS[type(old)]]
            return [but("ops", [*ops[:i], new, *ops[i + 1 :]]) for i, new in places]
        case ast.UnaryOp():  # -x, ~x, not x -> x
            return [node.operand]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return [but("value", new) for new in ([0, 2] if number == 1 else [number + 1])]
    # min(a, b), x.min(), x.clamp(min=0)
    field = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}.get(type(node))
    name = getattr(node, field) if field else None
    return [but(field, EXTREMES[name])] if name in EXTREMES else []


def sites(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index, child) of every executable node below `node`."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            match child:
                case ast.Raise() | ast.JoinedStr():  # messages
                    continue
                case ast.Assign(value=ast.BinOp(op=ast.BitOr())) if isinstance(node, ast.Module):
                    continue  # Schedule = Linear | Cosine | Betas
                case ast.ClassDef(name=name) if name in EXCLUDED:
                    continue
                case ast.AST() if field not in ("annotation", "returns"):
                    yield node, field, index if isinstance(value, list) else None, child
                    yield from sites(child)


class Mutant(NamedTuple):
    """A module's syntax tree, and the one change that `put(*change)` would make in it."""

    module: str
    tests: list[str]
    tree: ast.Module
    key: str
    change: tuple | None = None
    line: int = 0
    text: str = ""
    mutation: str = ""


def put(parent: ast.AST, field: str, index: int | None, child: ast.AST) -> None:
    """Set the child at a site."""
    if index is None:
        setattr(parent, field, child)
    else:
        getattr(parent, field)[index] = child


def mutants_of(module: str) -> list[Mutant]:
    """First the unmutated module, which the tests must pass, then all its mutants."""
    source = (ROOT / "ddm_min" / f"{module}.py").read_text()
    tests = [file for name in TESTS[module] if (file := ROOT / f"tests/test_{name}.py").exists()]
    shared = list((ROOT / "tests").glob("conftest.py"))
    content = source.encode() + b"".join(file.read_bytes() for file in tests + shared)
    key = f"{module}:{hashlib.sha256(content).hexdigest()[:16]}"
    found = [Mutant(module, [str(file) for file in tests], ast.parse(source), key)]
    for parent, field, index, child in sites(found[0].tree):
        # "2 -> 3" says little: a number is shown with what it stands in
        alone = not isinstance(child, ast.Constant) or isinstance(parent, ast.arguments)
        for new in variants(child):
            before = ast.unparse(child if alone else parent)
            put(parent, field, index, new)
            mutation = f"{before} -> {ast.unparse(new if alone else parent)}"
            put(parent, field, index, child)
            found.append(
                found[0]._replace(
                    key=f"{key}:{child.lineno}:{child.col_offset}:{mutation}",
                    change=(parent, field, index, new),
                    line=child.lineno,
                    text=source.splitlines()[child.lineno - 1].strip(),
                    mutation=mutation,
                )
            )
    return found


class MutatedModule(SourceFileLoader):
    """Import hook: finds and loads one module of ddm_min from a syntax tree."""

    tree: ast.Module

    def find_spec(self, name: str, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str):
        return compile(ast.fix_missing_locations(self.tree), self.path, "exec")


def preload() -> None:
    """Import what the tests need, except ddm_min, in one thread: forks then start at once."""
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in PRELOAD.split():
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


class Unshrunk:
    """pytest plugin: keeps the hypothesis profile of the tests but shrinks no example."""

    def pytest_collection(self) -> None:
        from hypothesis import HealthCheck, Phase, settings

        phases, checks = [Phase.explicit, Phase.generate], list(HealthCheck)  # checks of speed
        quick = settings(settings(), phases=phases, suppress_health_check=checks)
        settings.register_profile("unshrunk", quick)
        settings.load_profile("unshrunk")


def run_child(mutant: Mutant, log: str) -> None:
    """In the fork: serve the mutant, run its tests, leave with pytest's exit code."""
    code = 1  # an import that fails is a kill too
    try:
        os.setsid()  # so that a hang can be ended with all that it started
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (6 * 2**30, 6 * 2**30))
        if mutant.change:
            put(*mutant.change)
        hook = MutatedModule(f"ddm_min.{mutant.module}", f"{ROOT}/ddm_min/{mutant.module}.py")
        hook.tree = mutant.tree
        sys.meta_path.insert(0, hook)
        importlib.import_module(hook.name)
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--no-header"]
        pytest = importlib.import_module("pytest")
        code = int(pytest.main([*options, *mutant.tests], plugins=[Unshrunk()]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def run(queue: list[Mutant], timeout: float, jobs: int) -> Iterator[dict]:
    """Run the mutants, `jobs` at a time; yields each one's result as it ends."""
    queue, running = queue[::-1], {}  # pid -> (mutant, when it started, log)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while queue or running:
                while queue and len(running) < jobs:
                    mutant, log = queue.pop(), f"{folder}/{len(queue)}"
                    pid = os.fork()
                    if pid == 0:
                        run_child(mutant, log)
                    running[pid] = (mutant, time.monotonic(), log)
                time.sleep(0.02)
                for pid, (mutant, started, log) in list(running.items()):
                    seconds = time.monotonic() - started
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if not ended and seconds < timeout:
                        continue
                    del running[pid]
                    code = os.waitstatus_to_exitcode(status) if ended else "timeout"
                    if not ended:
                        os.killpg(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    text = Path(log).read_text(errors="replace").splitlines()
                    failed = [s for s in text if s.startswith(("FAILED", "ERROR"))] or text[-1:]
                    by = failed[0][:200] if failed and code else ""
                    yield dict(key=mutant.key, code=code, seconds=round(seconds, 1), by=by)
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def report(found: list[Mutant], results: dict[str, dict], list_survivors: bool) -> None:
    """How many mutants of a module were killed and, if asked, which were not."""
    done = [mutant for mutant in found if mutant.key in results]
    alive = [mutant for mutant in done if results[mutant.key]["code"] == 0]
    reasons = [EQUIVALENT.get((m.module, m.text, m.mutation)) for m in alive]
    share = (len(done) - len(alive)) / max(len(done), 1)
    print(
        f"{found[0].module:11} {len(done)} of {len(found)} mutants run, {share:.1%} killed, "
        f"{len(alive)} survived; {sum(map(bool, reasons))} of these are equivalent"
    )
    for mutant, reason in zip(alive, reasons, strict=True) if list_survivors else []:
        print(f"  {mutant.module}.py:{mutant.line}  {mutant.text}\n      {mutant.mutation}")
        print(f"      {reason or 'NOT EXPLAINED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing of the arithmetic; resumable.")
    parser.add_argument("--module", choices=list(TESTS), nargs="+", default=list(TESTS))
    parser.add_argument("--limit", type=int, default=10**9, help="new mutants; 0 only reports")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=Path, default=ROOT / "runs" / "mutation.jsonl")
    parser.add_argument("--list-survivors", action="store_true")
    args = parser.parse_args()

    preload()
    args.record.parent.mkdir(parents=True, exist_ok=True)
    args.record.touch()
    results = {line["key"]: line for line in map(json.loads, args.record.open())}

    def run_all(queue: list[Mutant], timeout: float) -> None:
        for result in run(queue, timeout, args.jobs):
            results[result["key"]] = result
            with args.record.open("a") as file:
                file.write(json.dumps(result) + "\n")

    for module in args.module:
        unmutated, *found = mutants_of(module)
        missing = [mutant for mutant in found if mutant.key not in results][: args.limit]
        args.limit -= len(missing)
        if missing:
            if results.get(unmutated.key, {}).get("code") != 0:
                run_all([unmutated], timeout=600)
            passed = results[unmutated.key]
            if passed["code"] != 0:
                print(f"{module}: the tests fail without any mutation: {passed['by']}")
                continue
            run_all(missing, timeout=10 + 5 * passed["seconds"])
        report(found, results, args.list_survivors)


if __name__ == "__main__":
    main()
