"""Damaged files of every kind: a right answer or one sentence, in 1,080 inputs; see the benchmark.

`python -m benchmarks.fuzz --num 10000` tries more.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import fuzz


def test_a_thousand_damaged_files_end_in_a_right_answer_or_a_sentence():
    num = 60 * len(fuzz.TARGETS)
    outcomes = fuzz.fuzz(num, seed=1)
    print(outcomes)
    assert sum(outcomes.values()) == num >= 1000
    by_outcome = Counter()
    for (_, outcome), count in outcomes.items():
        by_outcome[outcome] += count
    assert by_outcome["refused"] > num / 2  # the damage is real
    assert by_outcome["right"] > num / 50  # and not everything is refused
    for name in fuzz.TARGETS:
        assert outcomes[name, "refused"] > 10, name


def test_inputs_repeat():
    for name in ("expert", "png"):
        assert fuzz.fuzz(5, 3, 10, [name]) == fuzz.fuzz(5, 3, 10, [name])
    damaged = [fuzz.damage_bytes(bytes(range(200)), random.Random("1 2")) for _ in range(2)]
    assert damaged[0] == damaged[1]


def crash(file):
    raise KeyError("config")


def nameless(file):
    raise ValueError("something is wrong")


def two_lines(file):
    raise ValueError(f"{file} is\nwrong")


def forever(file):
    while True:
        pass


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (crash, "KeyError"),
        (nameless, "no name"),
        (two_lines, "not one line"),
        (forever, "TooSlow"),
        (lambda file: 5, "read as something else"),
    ],
    ids=["crash", "nameless", "two lines", "forever", "silent"],
)
def test_the_fuzzer_notices(monkeypatch, load, words):
    good = fuzz.TARGETS["npz"]
    target = replace(good, load=lambda f: load(f) if "damaged" in str(f) else good.load(f))
    monkeypatch.setitem(fuzz.TARGETS, "npz", target)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    with pytest.raises(AssertionError, match=words):
        fuzz.fuzz(20, 0, 0, ["npz"])
