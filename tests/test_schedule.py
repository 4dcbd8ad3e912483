"""Schedules against their formulas, autograd and the published DDPM table; all in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ddm_min.schedule import Betas, Cosine, Linear, add_noise, expand

EPS = torch.finfo(torch.float64).eps
ODD_TABLES = [
    Betas((0.5, 0.001)),  # the shortest, falling
    Betas((1e-4, 0.9, 1e-4, 0.9, 0.02)),  # up and down
    Betas((0.999,) * 9),  # nearly all noise after one step
    Betas.ddpm(7, 0.3, 0.05),  # falling
]
SCHEDULES = [Linear(), Cosine(), Betas.ddpm(), *ODD_TABLES]
BETAS = st.lists(st.floats(1e-5, 0.999), min_size=2, max_size=40)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numpy_log_snr(betas) -> np.ndarray:
    """log(alpha_bar / (1 - alpha_bar)) of a table, by numpy's cumulative sum."""
    log_alpha_bar = np.cumsum(np.log1p(-np.array(betas)))
    return log_alpha_bar - np.log(-np.expm1(log_alpha_bar))


def rounding_of_time(schedule) -> float:
    """How far time_at(log_snr(t)) may be from t: log_snr is rounded, and t is that over its slope.

    On the two curves |d log_snr / dt| >= 2 log_snr, so the error of t is a few EPS. A table's
    slope can be smaller than the size of its entries; then rounding costs as much more.
    """
    if isinstance(schedule, Linear | Cosine):
        return 8 * EPS
    table = numpy_log_snr(schedule.betas)
    slope = np.abs(np.diff(table)).min() * (len(table) - 1)
    return 8 * EPS * (1 + np.abs(table).max() / slope)


def test_linear_and_cosine_are_their_formulas():
    """alpha, sigma, derivatives and log-SNR, point by point with the math module."""
    for value in np.linspace(0.001, 0.999, 97):
        t, angle = f64(value), math.pi / 2 * value
        linear = (1 - value, value, -1, 1, math.log((1 - value) ** 2 / value**2))
        cosine = (math.cos(angle), math.sin(angle))
        cosine += (-math.pi / 2 * math.sin(angle), math.pi / 2 * math.cos(angle))
        cosine += (-2 * math.log(math.tan(angle)),)
        for schedule, expected in ((Linear(), linear), (Cosine(), cosine)):
            found = (schedule.alpha(t), schedule.sigma(t), *schedule.derivatives(t))
            found += (schedule.log_snr(t),)
            for a, b in zip(found, expected, strict=True):
                # 1 - t and cos round absolutely, and the log of alpha = 1e-3 sees that 1,000 fold
                assert abs(a.item() - b) < 1e-12, (schedule, value)


@given(st.floats(0, 1), st.sampled_from(SCHEDULES))
def test_derivatives_equal_autograd(value, schedule):
    """(d_alpha, d_sigma), also between table entries, where the table's log-SNR is a line."""
    t = f64(value).requires_grad_()
    for coefficient, derivative in zip(
        (schedule.alpha, schedule.sigma), schedule.derivatives(t.detach()), strict=True
    ):
        truth = torch.zeros_like(t)
        if coefficient(t).requires_grad:
            (truth,) = torch.autograd.grad(coefficient(t).sum(), t)
        assert torch.allclose(derivative, truth, rtol=1e-12, atol=1e-12)


def test_a_table_between_entries():
    """log_snr is linear between entries; derivatives agree with a central difference there."""
    for schedule in (Betas.ddpm(), *ODD_TABLES):
        table, last = numpy_log_snr(schedule.betas), len(schedule.betas) - 1
        for n, fraction in ((0, 0.25), (last - 1, 0.75), (last // 2, 0.5)):
            if n == last:
                continue
            t, h = f64((n + fraction) / last), 1e-6 / last
            expected = (1 - fraction) * table[n] + fraction * table[n + 1]
            # n / last * last is n up to EPS n, times the slope per entry
            size = 1 + abs(expected) + abs(table[n + 1] - table[n]) * last
            assert abs(schedule.log_snr(t).item() - expected) < 8 * EPS * size
            for coefficient, derivative in zip(
                (schedule.alpha, schedule.sigma), schedule.derivatives(t), strict=True
            ):
                difference = (coefficient(t + h) - coefficient(t - h)) / (2 * h)
                # rounding EPS / h and truncation (slope h)^2, as the slope per entry is below 7
                assert (derivative - difference).abs().item() < 1e-8 * last


@given(st.floats(0, 1), st.sampled_from(SCHEDULES))
@example(0.0, Linear())
@example(1.0, Cosine())
def test_time_at_inverts_log_snr(value, schedule):
    """time_at(log_snr(t)) == t on every schedule, ends included."""
    t = f64(value)
    found = schedule.time_at(schedule.log_snr(t))
    assert (found - t).abs().item() <= rounding_of_time(schedule)


@given(BETAS, st.floats(0, 1))
def test_time_at_inverts_any_table(betas, value):
    """The same for tables that nobody would train on, at any t and at every entry."""
    schedule = Betas(tuple(betas))
    t = torch.cat([f64(value), torch.linspace(0, 1, len(betas), dtype=torch.float64)])
    found = schedule.time_at(schedule.log_snr(t))
    assert (found - t).abs().max().item() <= rounding_of_time(schedule)


@given(st.floats(-9, 9), st.sampled_from([Linear(), Cosine(), Betas.ddpm()]))
def test_log_snr_inverts_time_at(log_snr, schedule):
    """log_snr(time_at(l)) == l inside every range: two schedules meet at equal noise."""
    found = schedule.log_snr(schedule.time_at(f64(log_snr)))
    # t is rounded to EPS, and at |l| = 9 the smaller of alpha, sigma is e^-4.5: 90 EPS, or less
    assert abs(found.item() - log_snr) < 1e-13


def test_ddpm_is_the_published_table():
    """alpha^2 at t = n / 999 is alpha_bar_n of Ho et al. 2020, all 1,000 entries, by numpy."""
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 2e-2, 1000))
    assert abs(alpha_bar[0] - 0.9999) < 1e-15 and abs(alpha_bar[999] - 4.0358e-5) < 5e-10
    schedule, t = Betas.ddpm(), torch.arange(1000, dtype=torch.float64) / 999
    # 1,000 rounded products, and 1 - alpha_bar = 1e-4 keeps twelve digits of them
    np.testing.assert_allclose(schedule.alpha(t) ** 2, alpha_bar, rtol=1e-11)
    np.testing.assert_allclose(schedule.sigma(t) ** 2, 1 - alpha_bar, rtol=1e-11)
    # a float32 t misses n by 999 * 6e-8, and an entry's alpha_bar changes by at most 2 %
    np.testing.assert_allclose(schedule.alpha(t.float()).double() ** 2, alpha_bar, rtol=1e-4)


@given(BETAS)
def test_entry_n_is_hit_at_n_over_last(betas):
    """t = n / (N - 1) is entry n of any table, by numpy's cumulative product."""
    alpha_bar = np.cumprod(1 - np.array(betas))
    schedule, t = Betas(tuple(betas)), torch.arange(len(betas)).double() / (len(betas) - 1)
    np.testing.assert_allclose(schedule.alpha(t) ** 2, alpha_bar, rtol=1e-10)
    np.testing.assert_allclose(schedule.sigma(t) ** 2, 1 - alpha_bar, rtol=1e-10)


@given(st.floats(0, 1), st.sampled_from(SCHEDULES))
def test_variance_is_preserved(value, schedule):
    """alpha^2 + sigma^2 = 1 on cosine and tables; alpha + sigma = 1 on the linear path."""
    alpha, sigma = schedule.alpha(f64(value)), schedule.sigma(f64(value))
    total = alpha + sigma if schedule == Linear() else alpha**2 + sigma**2
    assert (total - 1).abs().item() <= 4 * EPS
    assert alpha.item() >= 0 and sigma.item() >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_are_exact(dtype):
    """Data at t = 0, noise at t = 1, to the bit; infinite log-SNR is one of the two."""
    ends, infinities = torch.tensor([0, 1], dtype=dtype), torch.tensor([1, -1], dtype=dtype)
    infinities = infinities * torch.inf
    for schedule in (Linear(), Cosine()):
        assert schedule.alpha(ends).tolist() == [1, 0]
        assert schedule.sigma(ends).tolist() == [0, 1]
        assert schedule.log_snr(ends).tolist() == [math.inf, -math.inf]
    for schedule in SCHEDULES:
        assert schedule.time_at(infinities).tolist() == [0, 1]
        assert all(torch.isfinite(d).all() for d in schedule.derivatives(ends))
        assert schedule.time_at(infinities).dtype == schedule.alpha(ends).dtype == dtype


def test_a_table_is_held_at_its_ends():
    """Outside its range, about +9.2 to -10.1 for DDPM, the nearest end answers."""
    schedule = Betas.ddpm()
    low, high = schedule.log_snr(f64(1)).item(), schedule.log_snr(f64(0)).item()
    assert abs(high - math.log(0.9999 / 1e-4)) < 1e-11 and abs(low + 10.118) < 1e-3
    outside = f64(high + 1e-9, high + 3, 800, low - 1e-9, low - 3, -800)
    assert schedule.time_at(outside).tolist() == [0, 0, 0, 1, 1, 1]
    inside = schedule.time_at(f64(high - 1e-6, low + 1e-6))
    assert 0 < inside[0] < 1e-3 and 1 - 1e-3 < inside[1] < 1
    on_linear = Linear().time_at(f64(high, low))
    assert abs(on_linear[0].item() - 0.010) < 1e-3 and abs(on_linear[1].item() - 0.994) < 1e-3


@pytest.mark.parametrize("num_steps", [10, 250, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosine_never_leaves_the_unit_interval(num_steps, dtype):
    """Case D6: every alpha^2 lies strictly between 0 and 1 and falls; nothing is NaN."""
    t = torch.linspace(0, 1, num_steps + 1, dtype=dtype)
    alpha_bar = Cosine().alpha(t) ** 2
    assert ((alpha_bar[1:-1] > 0) & (alpha_bar[1:-1] < 1)).all()
    assert (alpha_bar.diff() < 0).all()
    assert torch.isfinite(Cosine().log_snr(t[1:-1])).all()


@pytest.mark.parametrize(
    "betas", [(), (0.1,), (0.1, 0.0), (0.1, 1.0), (-0.1, 0.1), (0.1, math.nan)]
)
def test_impossible_tables_are_refused(betas):
    """A table needs two entries or more, all strictly between 0 and 1."""
    with pytest.raises(ValueError, match="beta table"):
        Betas(betas)


def test_add_noise_pairs_each_image_with_its_own_time():
    """x_t = alpha(t_b) x0 + sigma(t_b) eps, by loops; B, C, H, W all different."""
    rng = np.random.default_rng(0)
    x0, eps = rng.standard_normal((2, 5, 2, 4, 3))
    t = np.array([0.0, 0.2, 0.5, 0.9, 1.0])
    for schedule in SCHEDULES:
        found = add_noise(*map(torch.from_numpy, (x0, eps, t)), schedule)
        for b in range(5):
            alpha, sigma = schedule.alpha(f64(t[b])).item(), schedule.sigma(f64(t[b])).item()
            for c, h, w in np.ndindex(2, 4, 3):
                expected = alpha * x0[b, c, h, w] + sigma * eps[b, c, h, w]
                assert abs(found[b, c, h, w].item() - expected) < 1e-14


def test_expand_adds_the_axes_of_an_image():
    """[B] becomes [B, 1, 1, 1] against an image and [B, 1] against a row."""
    per_sample = torch.arange(5.0)
    assert expand(per_sample, torch.zeros(5, 2, 4, 3)).shape == (5, 1, 1, 1)
    assert expand(per_sample, torch.zeros(5, 7)).shape == (5, 1)
    assert expand(per_sample, torch.zeros(5, 7))[:, 0].tolist() == per_sample.tolist()


def test_a_table_whose_log_snr_does_not_fall_is_refused():
    """1 - 1e-18 rounds to 1: the entry would repeat its predecessor and have no time of its own."""
    with pytest.raises(ValueError, match="lower log-SNR"):
        Betas((0.5, 1e-18))
    with pytest.raises(ValueError, match="lower log-SNR"):
        Betas((0.0, 0.5))  # no noise at all at n = 0: an infinite log-SNR cannot be interpolated
