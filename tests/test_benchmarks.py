"""The arithmetic of the benchmarks, where a mistake would look like a result."""

import json

import numpy as np
import pytest
import torch

from benchmarks import (
    pilot,
    table_cifar,
    table_distillation,
    table_intervals,
    table_objectives,
    table_routing,
    table_width,
    trials,
)
from ddm_min.analytic import EmpiricalFlow
from ddm_min.conversion import velocity_on
from ddm_min.data import load, to_float
from ddm_min.dit import DiTConfig
from ddm_min.expert import Expert
from ddm_min.objectives import DDPM
from ddm_min.schedule import Linear


def test_proposal_finds_three_plateaus_and_gives_the_slow_one_its_share():
    tau = np.array([300.0, 290, 100, 105, 95, 100, 600, 590])
    borders, shares = pilot.propose(tau, 3)
    assert borders == [0.0, 0.25, 0.75, 1.0]
    np.testing.assert_allclose(shares, np.array([300, 105, 600]) / 1005)


def test_one_expert_gets_everything():
    assert pilot.propose(np.arange(1.0, 9.0), 1) == ([0.0, 1.0], [1.0])


def test_time_to_converge_reads_ninety_percent_of_the_fall():
    steps = [0, 10, 20, 100]
    # 90 % of the fall from 1 to 0 is reached at step 20; of a straight line from 1 to 0, at 90; a
    # loss that rises once is held at its lowest.
    curves = np.array([[1.0, 1.0, 1.0], [0.5, 0.9, 0.1], [0.1, 0.8, 0.7], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(pilot.times_to_converge(steps, curves), [20, 90, 10])


def test_equal_quality_inverts_a_power_law():
    budgets = [500, 1000, 2000]
    distances = [3 * b**-0.7 for b in budgets]
    assert table_intervals.steps_for(3 * 777**-0.7, budgets, distances) == pytest.approx(777)


def test_papers_conversion_is_ours_where_no_guard_acts():
    """Below t = .85, with alpha > .01 and x0 within [-20, 20], the guards do nothing."""
    images = to_float(load("digits").images[:40]).double()
    network = EmpiricalFlow(images, DDPM.schedule).expert(DDPM)
    model = torch.nn.Module()
    model.forward, model.config = network, DiTConfig(1, (8, 8))
    expert = Expert(model, DDPM)
    t = torch.linspace(0.05, 0.84, 12, dtype=torch.float64)
    x_t = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.zeros(12, dtype=torch.long)
    for align in (True, False):
        ours = velocity_on(Linear(), network, DDPM, x_t, t, labels, align)
        guarded = table_objectives.Guarded(expert, align)(x_t, t, labels)
        # Naive answers can leave [-20, 20], where the clamp acts: compare the rows that stay.
        x0 = x_t - t[:, None, None, None] * ours
        inside = x0.abs().flatten(1).amax(1) < 20
        assert inside.sum() > 6
        torch.testing.assert_close(guarded[inside], ours[inside], rtol=1e-10, atol=1e-10)


def test_guard_bounds_the_velocity_near_noise():
    images = to_float(load("digits").images[:40]).double()
    network = EmpiricalFlow(images, DDPM.schedule).expert(DDPM)
    model = torch.nn.Module()
    model.forward = lambda x_t, t, labels: network(x_t, t, labels) + 3  # an expert that errs
    model.config = DiTConfig(1, (8, 8))
    x_t = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    t = torch.full((6,), 0.97, dtype=torch.float64)
    guarded = table_objectives.Guarded(Expert(model, DDPM), True)
    size = guarded(x_t, t, torch.zeros(6, dtype=torch.long)).flatten(1).square().mean(1).sqrt()
    limit = torch.full((6,), table_objectives.LARGEST_VELOCITY, dtype=torch.float64)
    torch.testing.assert_close(size, limit)


def test_nearest_distance_and_diversity_by_hand():
    black, white = torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.full((1, 1, 2, 2), 255).byte()
    # Black is -1 and white +1 in each pixel: their distance per pixel is 2.
    assert trials.nearest_distance(torch.cat([black, white]), black) == pytest.approx(1.0)
    images = torch.cat([black, white, black, black])
    labels = torch.tensor([0, 0, 1, 1])
    assert trials.diversity(images, labels) == pytest.approx((2.0 + 0.0) / 2)


TABLES = [table_routing, table_width, table_objectives, table_intervals, table_distillation]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_table_puts_what_was_measured_where_it_belongs(table, tmp_path, monkeypatch):
    """Its whole main, with stand-ins for hours of training: a measurement that names its run and
    seed must come out in the JSON under that row, in the order of the seeds."""
    monkeypatch.setattr("sys.argv", ["table"])
    monkeypatch.setattr(trials, "HOME", tmp_path / "runs")
    monkeypatch.setattr(table, "HOME", tmp_path / "runs")
    for module in {trials, table}:
        if hasattr(module, "RESULTS"):
            monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    pilot_result = {"borders": [0, 0.25, 0.875, 1], "shares": [0.3, 0.5, 0.2]}
    (tmp_path / "results" / "pilot_0.json").write_text(json.dumps(pilot_result))
    for name in ("train_experts", "train_the_router", "gather"):
        if hasattr(table, name):
            monkeypatch.setattr(table, name, lambda *_, **__: None)
    if hasattr(table, "split_run"):
        monkeypatch.setattr(table, "split_run", lambda run, *_: run)
    if table is table_width:
        part = {"error": 1.0, "loss, train": 2.0, "loss, held-out": 3.0}
        both = {"learned": part, "exact": part}
        monkeypatch.setattr(table, "taken_apart", lambda *_: both)

    numbers = {}

    def stand_in(run, judge, reread=None, **how):
        key = f"{run.name} {sorted(how.items())}"
        number = numbers.setdefault(key, 1.0 + len(numbers))
        keys = ("to_train", "to_heldout", "class_shares_off", "as_asked", "nearest", "diversity")
        return dict.fromkeys((*keys, "forwards", "switches", "seconds"), number)

    monkeypatch.setattr(trials, "measured", stand_in)
    table.main()
    results = [json.loads(x.read_text()) for x in tmp_path.glob("results/*.json")]
    rows = [row for result in results for row in result.get("rows", []) if "to held-out" in row]
    found = [value for row in rows for value in row["to held-out"]]
    assert set(found) == set(numbers.values())  # all that was measured is shown
    for row in rows:  # seeds follow each other: three measurements in a row, or a single one
        values = row["to held-out"]
        assert values == [values[0] + k for k in range(len(values))]
        assert len(values) in (1, 3)
    assert list(tmp_path.glob("results/*.png"))


def test_cifar_table_puts_both_seeds_where_they_belong(tmp_path, monkeypatch):
    """Its main with stand-ins: training, sampling and distances of a second data set of noise."""
    weights = tmp_path / "cifar" / "cnn.safetensors"
    weights.parent.mkdir()
    weights.touch()
    images = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3), dtype=np.uint8)
    for name in ("train", "held"):
        np.savez(weights.parent / f"{name}.npz", arr_0=images, arr_1=np.arange(50) % 10)
    numbers = {name: 1.0 + n for n, (name, *_) in enumerate(table_cifar.ROWS)}

    def sample_all(home, seed, target):
        assert home == tmp_path / "runs" / f"s{seed}"
        keys = ("to held-out", "diversity", "forwards", "switches", "seconds")
        return {name: dict.fromkeys(keys, n + seed / 10) for name, n in numbers.items()}

    for name, value in {
        "WEIGHTS": weights, "HOME": tmp_path / "runs", "sample_all": sample_all,
        "train_all": lambda home, source, seed: 30.0 + seed, "moments": lambda images: None,
        "frechet": lambda a, b: 0.5, "within_class": lambda *_: 2.0,
        "sample_strips": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(table_cifar, name, value)
    monkeypatch.setattr(trials, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["table"])
    table_cifar.main()
    result = json.loads((tmp_path / "results" / "cifar.json").read_text())
    assert "61 core-minutes" in result["note"]
    for row in result["rows"]:
        assert row["diversity"] == [numbers[row["name"]], numbers[row["name"]] + 0.1]
    assert (tmp_path / "results" / "cifar.png").exists()


def test_a_stopped_training_keeps_the_seconds_it_took(tmp_path, monkeypatch):
    """Two parts of 30 and 12 seconds are 42; a finished training is not asked again."""
    clock, calls = [0.0], []

    def train(argv):
        calls.append(argv)
        clock[0] += (30, 12)[len(calls) - 1]
        if len(calls) == 1:
            raise SystemExit(130)

    monkeypatch.setattr(trials.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(trials.train_expert, "main", train)
    with pytest.raises(SystemExit):
        trials.train_experts(tmp_path, "digits", [3], 0, "--flip")
    for _ in range(2):
        seconds = trials.train_experts(tmp_path, "digits", [3], 0, "--flip")
        assert seconds == {"3 --flip": 42.0}
    assert len(calls) == 2
