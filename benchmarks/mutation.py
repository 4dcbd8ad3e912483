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
PRELOAD = "numpy scipy.linalg sklearn.datasets einops safetensors.torch tqdm PIL.Image pytest"
# Survivors that no test can kill: (module, source line, mutation) -> reason.
EQUIVALENT = {
    ("router", "torch.manual_seed(0)", "torch.manual_seed(0) -> torch.manual_seed(1)"): (
        "the start of a converged iteration"
    ),
    ("router", "_, singular, basis = torch.svd_lowrank(within, q=rank, niter=4)", "4 -> 5"): (
        "one more iteration after convergence"
    ),
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
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=name):
            return (
                [but(node._fields[name != getattr(node, "id", name)], EXTREMES[name])] if 0 else []
            )
    return []
