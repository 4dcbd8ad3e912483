"""Predictions, losses and their weights against 2 x 2 systems, autograd and closed forms."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddm_min.conversion import velocity_on
from ddm_min.objectives import (
    DDPM,
    FLOW,
    PREDICTIONS,
    Objective,
    draw_times,
    implicit_weight,
    loss,
    target,
    to_x0_eps,
)
from ddm_min.schedule import Betas, Cosine, Linear, add_noise, expand

SCHEDULES = [Linear(), Cosine(), Betas.ddpm()]
SHAPE = (2, 4, 3)  # C, H, W; batches below have other sizes
INSIDE = st.floats(0.001, 0.999)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def answering(output: torch.Tensor):
    """A network that says `output`, whatever it is asked."""
    return lambda x_t, t, labels: output


def pair_coefficients(prediction: str, schedule, t: torch.Tensor) -> tuple[float, float]:
    """(a, b) of prediction = a x0 + b eps at one t; derivatives by autograd."""
    t = t.clone().requires_grad_()
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    (d_alpha,) = torch.autograd.grad(alpha.sum(), t)
    (d_sigma,) = torch.autograd.grad(sigma.sum(), t)
    alpha, sigma = alpha.item(), sigma.item()
    return {
        "eps": (0.0, 1.0),
        "x0": (1.0, 0.0),
        "v": (-sigma, alpha),
        "velocity": (d_alpha.item(), d_sigma.item()),
    }[prediction]


def weight_of(space: str, schedule, t: torch.Tensor) -> float:
    """loss = weight |x0_hat - x0|^2, from the definitions (HDDM proposition 1 for eps, velocity).

    At fixed x_t, an error d of x0 is -alpha / sigma d of eps, so -(sigma + alpha^2 / sigma) d of v
    and, on the linear path at its own time s of equal log-SNR, -d / s of the velocity.
    """
    alpha, sigma = schedule.alpha(t).item(), schedule.sigma(t).item()
    s = sigma / (alpha + sigma)  # there (1 - s) / s = alpha / sigma
    return {
        "eps": alpha**2 / sigma**2,
        "x0": 1.0,
        "v": (sigma + alpha**2 / sigma) ** 2,
        "velocity": 1 / s**2,
    }[space]


def all_cases():
    """Every (prediction, loss space, schedule): 48 of them."""
    return [(p, s, schedule) for p in PREDICTIONS for s in PREDICTIONS for schedule in SCHEDULES]


@given(INSIDE, st.sampled_from(PREDICTIONS), st.sampled_from(SCHEDULES), st.integers(0, 99))
def test_target_is_its_combination_of_x0_and_eps(value, prediction, schedule, seed):
    """target = a x0 + b eps, with the velocity's a, b from autograd of alpha and sigma."""
    x0, eps, t = normal(seed, 1, *SHAPE), normal(seed + 100, 1, *SHAPE), f64(value)
    a, b = pair_coefficients(prediction, schedule, t)
    found = target(x0, eps, t, Objective(prediction, schedule))
    assert torch.allclose(found, a * x0 + b * eps, rtol=1e-12, atol=1e-12)


@given(
    st.lists(INSIDE, min_size=5, max_size=5),
    st.sampled_from(PREDICTIONS),
    st.sampled_from(SCHEDULES),
    st.integers(0, 99),
)
def test_round_trip(times, prediction, schedule, seed):
    """(x0, eps) -> target -> (x0, eps), each image at its own t."""
    x0, eps, t = normal(seed, 5, *SHAPE), normal(seed + 100, 5, *SHAPE), f64(*times)
    objective = Objective(prediction, schedule)
    x_t = add_noise(x0, eps, t, schedule)
    found_x0, found_eps = to_x0_eps(target(x0, eps, t, objective), x_t, t, objective)
    # Rounding of about 1e-15 is divided by alpha or sigma, which are at least 1e-3 here.
    assert torch.allclose(found_x0, x0, rtol=0, atol=1e-11)
    assert torch.allclose(found_eps, eps, rtol=0, atol=1e-11)


@given(INSIDE, st.sampled_from(PREDICTIONS), st.sampled_from(SCHEDULES), st.integers(0, 99))
def test_to_x0_eps_solves_the_two_by_two_system(value, prediction, schedule, seed):
    """For any prediction, right or wrong, numpy.linalg.solve gives the same (x0, eps)."""
    output, x_t, t = normal(seed, 1, *SHAPE), normal(seed + 100, 1, *SHAPE), f64(value)
    a, b = pair_coefficients(prediction, schedule, t)
    system = np.array([[a, b], [schedule.alpha(t).item(), schedule.sigma(t).item()]])
    right = np.stack([output.numpy().ravel(), x_t.numpy().ravel()])
    truth = np.linalg.solve(system, right).reshape(2, 1, *SHAPE)
    found = to_x0_eps(output, x_t, t, Objective(prediction, schedule))
    for name, a, b in zip(("x0", "eps"), found, truth, strict=True):
        # the condition number, up to 1,000, times EPS, relative to the largest value
        assert np.abs(a.numpy() - b).max() < 1e-12 * max(np.abs(truth).max(), 1), name


def test_singular_ends_are_infinite_here():
    """eps says nothing of x0 at t = 1, x0 nothing of eps at t = 0: `conversion` decides there."""
    ones = torch.ones(1, *SHAPE, dtype=torch.float64)
    for schedule in (Linear(), Cosine()):
        x0, _ = to_x0_eps(2 * ones, ones, f64(1), Objective("eps", schedule))
        _, eps = to_x0_eps(2 * ones, ones, f64(0), Objective("x0", schedule))
        assert not torch.isfinite(x0).any() and not torch.isfinite(eps).any()
        for prediction in ("v", "velocity"):
            both = to_x0_eps(
                torch.cat([ones, ones]),
                torch.cat([ones, ones]),
                f64(0, 1),
                Objective(prediction, schedule),
            )
            assert all(torch.isfinite(x).all() for x in both)


def test_implicit_weight_is_the_closed_form():
    """All spaces and schedules at nine times: eps alpha^2 / sigma^2, velocity 1 / s^2, ..."""
    for prediction, space, schedule in all_cases():
        for value in np.linspace(0.02, 0.98, 9):
            found = implicit_weight(Objective(prediction, schedule, space), f64(value)).item()
            assert found == pytest.approx(weight_of(space, schedule, f64(value)), rel=1e-12)


def test_proposition_1():
    """HDDM: on the linear path velocity weighs 1 / sigma^2, and 1 / alpha^2 times what eps does."""
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    eps = implicit_weight(Objective("eps", Linear()), t)
    velocity = implicit_weight(FLOW, t)
    assert torch.allclose(velocity, 1 / t**2, rtol=1e-13)
    assert torch.allclose(velocity / eps, 1 / (1 - t) ** 2, rtol=1e-12)


def test_loss_is_weight_times_squared_error_of_x0():
    """By evaluation, all 48 cases: x0_hat solved from the output by numpy, then compared."""
    t = f64(0.02, 0.3, 0.5, 0.7, 0.98)
    x0, eps, noise = normal(0, 5, *SHAPE), normal(1, 5, *SHAPE), normal(2, 5, *SHAPE)
    for prediction, space, schedule in all_cases():
        objective = Objective(prediction, schedule, space)
        output = target(x0, eps, t, objective) + noise
        found = loss(answering(output), x0, eps, t, None, objective)
        assert found.shape == (5,)
        for i in range(5):
            a, b = pair_coefficients(prediction, schedule, t[i : i + 1])
            alpha, sigma = schedule.alpha(t[i]).item(), schedule.sigma(t[i]).item()
            x_t = alpha * x0[i] + sigma * eps[i]
            right = np.stack([output[i].numpy().ravel(), x_t.numpy().ravel()])
            x0_hat = np.linalg.solve(np.array([[a, b], [alpha, sigma]]), right)[0]
            error = ((x0_hat - x0[i].numpy().ravel()) ** 2).mean()
            truth = weight_of(space, schedule, t[i : i + 1]) * error
            # the difference x0_hat - x0 keeps the digits that 1 / alpha = 160 leaves of it
            assert found[i].item() == pytest.approx(truth, rel=1e-10), objective


def test_implicit_weight_by_autograd():
    """All 48 cases: d loss / d x0_hat = 2 weight (x0_hat - x0) / pixels, with that very weight."""
    t = f64(0.02, 0.3, 0.5, 0.7, 0.98)
    x0, eps = normal(0, 5, *SHAPE), normal(1, 5, *SHAPE)
    for prediction, space, schedule in all_cases():
        objective = Objective(prediction, schedule, space)
        x0_hat = normal(2, 5, *SHAPE).requires_grad_()
        alpha, sigma = expand(schedule.alpha(t), x0), expand(schedule.sigma(t), x0)
        eps_hat = (alpha * x0 + sigma * eps - alpha * x0_hat) / sigma
        pairs = [pair_coefficients(prediction, schedule, t[i : i + 1]) for i in range(5)]
        a, b = (expand(f64(*column), x0) for column in zip(*pairs, strict=True))
        output = a * x0_hat + b * eps_hat  # what a network with this x0_hat would have said
        total = loss(answering(output), x0, eps, t, None, objective).sum()
        (gradient,) = torch.autograd.grad(total, x0_hat)
        pixels = x0[0].numel()
        measured = gradient * pixels / (2 * (x0_hat - x0).detach())
        closed = f64(*[weight_of(space, schedule, t[i : i + 1]) for i in range(5)])
        # elementwise, so a small x0_hat - x0 loses some digits
        assert torch.allclose(measured, expand(closed, x0).expand_as(x0), rtol=1e-9), objective
        assert torch.allclose(implicit_weight(objective, t), closed, rtol=1e-12)


def test_the_loss_of_the_two_papers():
    """FLOW is mean |u - (eps - x0)|^2 (DDM eq. 6) and DDPM mean |e - eps|^2, at the right x_t."""
    x0, eps, t, labels = normal(0, 5, *SHAPE), normal(1, 5, *SHAPE), normal(2, 5).sigmoid(), [7]
    calls = []

    def model(x_t, time, y):
        calls.append((x_t, time, y))
        return 0.3 * x_t

    x_linear = (1 - t)[:, None, None, None] * x0 + t[:, None, None, None] * eps
    angle = (torch.pi / 2 * t)[:, None, None, None]
    x_cosine = angle.cos() * x0 + angle.sin() * eps
    flow = ((0.3 * x_linear - (eps - x0)) ** 2).mean((1, 2, 3))
    ddpm = ((0.3 * x_cosine - eps) ** 2).mean((1, 2, 3))
    assert torch.allclose(loss(model, x0, eps, t, labels, FLOW), flow, rtol=1e-13)
    assert torch.allclose(loss(model, x0, eps, t, labels, DDPM), ddpm, rtol=1e-13)
    for (x_t, time, y), expected in zip(calls, (x_linear, x_cosine), strict=True):
        assert torch.allclose(x_t, expected, rtol=1e-13, atol=1e-13)
        assert time is t and y is labels


@given(st.sampled_from(all_cases()), st.floats(0.02, 0.98), st.floats(0.01, 100))
def test_max_weight_caps_exactly(case, value, cap):
    """The factor on the own squared error is min(weight, cap): untouched below it, cap above."""
    prediction, space, schedule = case
    objective, t = Objective(prediction, schedule, space), f64(value)
    x0, eps, noise = (normal(seed, 1, *SHAPE) for seed in range(3))
    model = answering(target(x0, eps, t, objective) + noise)
    own = weight_of(prediction, schedule, t)
    if prediction == "velocity":  # along its own schedule, not along the linear path
        alpha, sigma = schedule.alpha(t).item(), schedule.sigma(t).item()
        d_alpha, d_sigma = pair_coefficients("velocity", schedule, t)
        own = (d_alpha - d_sigma * alpha / sigma) ** 2
    weight = weight_of(space, schedule, t) / own
    truth = min(weight, cap) * noise.square().mean().item()
    found = loss(model, x0, eps, t, None, objective, max_weight=cap).item()
    assert found == pytest.approx(truth, rel=1e-10)


def test_max_weight_bounds_what_has_no_mean():
    """eps measured as velocity weighs 1 / (1 - t)^2: infinite at t = 1, and the cap is finite."""
    x0, eps, t = normal(0, 2, *SHAPE), normal(1, 2, *SHAPE), f64(1, 1 - 1e-9)
    objective = Objective("eps", Linear(), "velocity")
    model = answering(eps + 2)
    assert loss(model, x0, eps, t, None, objective)[0].isinf()
    assert loss(model, x0, eps, t, None, objective, max_weight=5).tolist() == pytest.approx(
        [20, 20]
    )


def test_the_diagonal_is_finite_at_singular_ends():
    """A loss in its own space is the plain squared error, also where x0 or eps is undefined."""
    x0, eps, t = normal(0, 2, *SHAPE), normal(1, 2, *SHAPE), f64(0, 1)
    for prediction in PREDICTIONS:
        for schedule in (Linear(), Cosine()):
            objective = Objective(prediction, schedule)
            model = answering(target(x0, eps, t, objective) + 3)
            found = loss(model, x0, eps, t, None, objective)
            # the cosine path's own velocity is pi / 2 times the linear one at both ends
            unit = 4 / torch.pi**2 if (prediction, schedule) == ("velocity", Cosine()) else 1
            assert torch.allclose(found, f64(9 * unit, 9 * unit), rtol=1e-13)


def test_velocity_space_is_the_velocity_of_the_linear_path():
    """Whatever the prediction and schedule: move both answers to the linear path and compare."""
    s = f64(0.05, 0.3, 0.5, 0.7, 0.95)
    x0, eps, noise = normal(0, 5, *SHAPE), normal(1, 5, *SHAPE), normal(2, 5, *SHAPE)
    for prediction in PREDICTIONS:
        for schedule in SCHEDULES:
            objective = Objective(prediction, schedule, "velocity")
            output = target(x0, eps, s, objective) + noise
            model = answering(output)
            t = schedule.sigma(s) / (schedule.alpha(s) + schedule.sigma(s))  # equal log-SNR
            x_t = add_noise(x0, eps, t, Linear())
            velocity = velocity_on(Linear(), model, objective, x_t, t, None)
            truth = (velocity - (eps - x0)).square().mean((1, 2, 3))
            found = loss(model, x0, eps, s, None, objective)
            assert torch.allclose(found, truth, rtol=1e-10), objective


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("interval", [(0.0, 1.0), (0.0, 0.33), (0.33, 0.67), (0.67, 1.0)])
def test_draw_times_fills_its_interval_evenly(schedule, interval):
    """Uniform in (a, b] of its own clock, where a and b name noise levels of the linear path."""
    t = draw_times(20_000, schedule, interval, np.random.default_rng(3))
    assert t.dtype == torch.float32 and t.shape == (20_000,)
    ratio = [(1 - end) / end if end > 0 else np.inf for end in interval]  # alpha / sigma
    if isinstance(schedule, Linear):
        low, high = interval
    elif isinstance(schedule, Cosine):
        low, high = (2 / np.pi * np.arctan(1 / r) if r > 0 else 1.0 for r in ratio)
    else:  # bisection in alpha / sigma, which falls with t; a table is held at its ends
        low, high = (bisect(schedule, r) for r in ratio)
    t = t.double()
    # float32 rounds the ends
    assert low < t.min() and t.max() <= high + 6e-8
    share = (t - low) / (high - low)
    # Kolmogorov-Smirnov: the largest gap to a uniform is below 1.95 / sqrt(n) in 99.9 % of draws
    ideal = torch.linspace(0, 1, 20_000, dtype=torch.float64)
    assert (share.sort().values - ideal).abs().max() < 1.95 / 20_000**0.5


def bisect(schedule, ratio: float) -> float:
    """t with alpha / sigma = ratio, or the end nearest to it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        larger = schedule.alpha(f64(middle)) > ratio * schedule.sigma(f64(middle))
        low, high = (middle, high) if larger else (low, middle)
    return (low + high) / 2


def always(value: float) -> SimpleNamespace:
    """Stands in for a generator that happens to draw `value` each time."""
    return SimpleNamespace(random=lambda num, dtype: np.full(num, value, dtype=dtype))


def test_draw_times_is_half_open():
    """The upper end can be drawn and the lower cannot: t = 1 yes, t = 0 no."""
    below_one = np.nextafter(np.float32(1), np.float32(0))
    for schedule in (Linear(), Cosine()):
        assert draw_times(3, schedule, (0.0, 1.0), always(0.0)).tolist() == [1, 1, 1]
        assert (draw_times(3, schedule, (0.0, 1.0), always(below_one)) > 0).all()


def test_draw_times_belongs_to_its_generator():
    """Equal seeds draw equal times, other seeds others."""
    first, again, other = (
        draw_times(9, Cosine(), (0.2, 0.6), np.random.default_rng(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_unknown_names_are_refused():
    """A name outside the four is a ValueError that lists them; loss_space follows prediction."""
    for arguments in (("epsilon", Linear()), ("eps", Linear(), "noise"), ("", Cosine())):
        with pytest.raises(ValueError, match="eps, x0, v, velocity"):
            Objective(*arguments)
    assert Objective("v", Cosine()).loss_space == "v"
    assert (FLOW.prediction, FLOW.loss_space, FLOW.schedule) == ("velocity", "velocity", Linear())
    assert (DDPM.prediction, DDPM.loss_space, DDPM.schedule) == ("eps", "eps", Cosine())
