"""The arithmetic of the benchmarks, where a mistake would look like a result."""

import numpy as np
import pytest
import torch

from benchmarks import pilot, table_intervals, table_objectives, trials
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
