"""Solvers: direction of time, number of steps, the noisy end, numbers that are not finite."""

import numpy as np
import pytest
import torch

from ddm_min.analytic import EmpiricalFlow
from ddm_min.conversion import velocity_on
from ddm_min.objectives import DDPM
from ddm_min.sampler import sample, sample_ddim, start_noise
from ddm_min.schedule import Betas, Cosine, Linear

SHAPE = (2, 3, 4)  # C, H, W


def noise(batch: int = 5, seed: int = 3) -> torch.Tensor:
    return start_noise(SHAPE, [(seed, i) for i in range(batch)])


def point() -> torch.Tensor:
    return torch.linspace(-0.9, 0.8, 24).reshape(1, *SHAPE)


class Counter:
    """A velocity that remembers the times it was asked at."""

    def __init__(self, velocity=lambda x, t: 0.1 * x):
        self.velocity, self.times = velocity, []

    def __call__(self, x, t):
        assert t.shape == (len(x),)
        assert (t == t[0]).all()
        self.times.append(t[0].item())
        return self.velocity(x, t)


# ---------------------------------------------------------------- direction


@pytest.mark.parametrize("method", ["euler", "heun"])
@pytest.mark.parametrize("schedule", [Linear(), Cosine()])
def test_D4_the_flow_lands_on_the_only_data_point(method, schedule):
    velocity = EmpiricalFlow(point(), schedule).velocity
    x = sample(velocity, noise(), 100, method)
    assert torch.allclose(x, point().expand_as(x), atol=1e-3 if schedule == Linear() else 0.05)


def test_D4_ddim_lands_on_the_only_data_point():
    """Each DDIM step is exact when x0_hat is."""
    velocity = EmpiricalFlow(point(), Cosine()).velocity
    x = sample_ddim(velocity, noise(), 7, Cosine())
    assert torch.allclose(x, point().expand_as(x), atol=1e-3)


@pytest.mark.parametrize("method", ["euler", "heun"])
def test_D4_integrating_back_returns_to_the_start(method):
    """Straight lines between noise and point, so both ways are exact; t = 0 forgets the noise."""
    velocity = EmpiricalFlow(point().double(), Linear()).velocity
    start = noise().double()
    near = sample(velocity, start, 20, method, t_end=0.01)
    assert torch.allclose(near, 0.99 * point().double() + 0.01 * start, atol=1e-9)
    # float64 rounding times 1 / sigma = 100
    assert torch.allclose(sample(velocity, near, 20, method, t_start=0.01, t_end=1.0), start)


def test_D4_velocity_points_from_data_to_noise():
    velocity = EmpiricalFlow(point(), Linear()).velocity
    x_t, t = noise(), torch.full((5,), 0.5)
    ahead = x_t + 0.1 * velocity(x_t, t)
    distance = [(x - point()).flatten(1).norm(dim=1) for x in (x_t, ahead)]
    assert (distance[1] > distance[0]).all()


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2)])
def test_error_falls_with_the_order_of_the_method(method, order):
    """dx/dt = x cos(7 t) has x(0.2) = x(1) exp((sin 1.4 - sin 7) / 7)."""

    def error(num_steps):
        x = sample(lambda x, t: x * torch.cos(7 * t)[:, None, None, None], noise().double(),
                   num_steps, method, t_end=0.2)  # fmt: skip
        exact = noise().double() * np.exp((np.sin(1.4) - np.sin(7)) / 7)
        return (x - exact).abs().max().item()

    assert error(160) / error(320) == pytest.approx(2**order, rel=0.05)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("num_steps", [1, 7, 53, 300, 1000])
def test_D8_exactly_as_many_steps_as_asked(num_steps):
    velocity, told = Counter(), []
    sample(velocity, noise(1), num_steps, on_step=told.append)
    assert told == list(range(num_steps))
    assert np.allclose(velocity.times, 1 - np.arange(num_steps) / num_steps, atol=1e-6)

    velocity, told = Counter(), []
    sample_ddim(velocity, noise(1), num_steps, Betas.ddpm(1000), on_step=told.append)
    assert told == list(range(num_steps))
    assert np.allclose(velocity.times, 1 - np.arange(num_steps) / num_steps, atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 7])
def test_heun_evaluates_twice_per_step_but_never_at_t_0(num_steps):
    velocity = Counter()
    sample(velocity, noise(1), num_steps, "heun")
    assert len(velocity.times) == 2 * num_steps - 1
    assert min(velocity.times) == pytest.approx(1 / num_steps)  # the last step is Euler


def test_a_single_step_of_heun_is_euler():
    assert torch.equal(
        sample(lambda x, t: x.sin(), noise(), 1, "heun"), sample(lambda x, t: x.sin(), noise(), 1)
    )


def test_steps_are_announced_to_a_velocity_that_wants_to_know():
    class Field(Counter):
        def begin_step(self, step):
            self.times.append(f"step {step}")

    field = Field()
    sample(field, noise(1), 2, "heun")
    assert field.times == ["step 0", 1.0, 0.5, "step 1", 0.5]


@pytest.mark.parametrize(("method", "num_steps"), [("rk4", 5), ("euler", 0), ("heun", -1)])
def test_impossible_requests_are_refused(method, num_steps):
    with pytest.raises(ValueError, match="use euler or heun, >= 1 step"):
        sample(Counter(), noise(1), num_steps, method)


# ---------------------------------------------------------------- the noisy end


def predictor(answer):
    """An epsilon expert on the cosine schedule, clamped as sampling clamps, as linear velocity."""
    return lambda x, t: velocity_on(
        Linear(), answer, DDPM, x, t, torch.zeros(len(x), dtype=torch.long), x0_range=(-1.0, 1.0)
    )


def test_D7_a_small_error_at_the_last_of_1000_indices_stays_small():
    """eps off by .001 at index 999, t = .999: 1 / alpha = 637 would amplify it unclamped."""
    flow = EmpiricalFlow(point(), Cosine())
    t = torch.full((5,), 0.999)
    x0, eps = point().expand(5, *SHAPE), noise()
    s = Cosine().time_at(Linear().log_snr(t))
    wrong = predictor(lambda x, s, labels: flow.eps(x, s) + 1e-3)
    velocity = wrong((1 - t)[0] * x0 + t[0] * eps, t)
    assert torch.isfinite(velocity).all()
    assert Cosine().alpha(s).max() < 0.002  # the end is indeed nearly singular
    # x0 is off by 1e-3 sigma / alpha = 1 at most (clamped), eps by 1e-3: velocity = eps - x0
    assert (velocity - (eps - x0)).abs().max() < 1.05


@pytest.mark.parametrize("num_steps", [3, 50, 1000])
@pytest.mark.parametrize("method", ["euler", "heun"])
def test_D7_iterates_stay_bounded_for_any_prediction_up_to_5(num_steps, method):
    rng = np.random.default_rng(4)
    largest = []

    def hostile(x, s, labels):
        largest.append(x.abs().max().item())
        return torch.from_numpy(rng.choice([-5.0, 5.0], size=x.shape)).float()

    if num_steps == 1000:  # the case's own number, once is enough
        method = "euler"
    x = sample(predictor(hostile), noise(2), num_steps, method)
    assert max(largest) < 10
    assert x.abs().max() < 10


@pytest.mark.parametrize("schedule", [Cosine(), Betas.ddpm(50)])
def test_D6_a_zero_prediction_stays_finite_to_the_end(schedule):
    for num_steps in (10, 250):
        x = sample_ddim(lambda x, t: torch.zeros_like(x), noise(2), num_steps, schedule)
        assert torch.isfinite(x).all()


# ---------------------------------------------------------------- not finite


def test_D12_nan_stops_and_names_step_and_time():
    def broken(x, t):
        return torch.where(t[:, None, None, None] > 0.5, torch.nan, x)

    for method in ("euler", "heun"):
        with pytest.raises(FloatingPointError, match="step 1 at t = 1"):
            sample(broken, noise(), 10, method)
    with pytest.raises(FloatingPointError, match="step 1 at t = 1"):
        sample_ddim(broken, noise(), 10, Cosine())


def test_D12_one_bad_image_of_a_batch_in_the_middle_is_enough():
    def broken(x, t):
        bad = (t < 0.55) & (torch.arange(len(x)) == 3)
        return torch.where(bad[:, None, None, None], torch.inf, x)

    with pytest.raises(FloatingPointError, match=r"step 6 at t = 0\.5"):
        sample(broken, noise(), 10)


def test_D12_a_stiff_velocity_takes_the_asked_steps_or_stops():
    with pytest.raises(FloatingPointError, match="left the finite numbers in step"):
        sample(lambda x, t: -1e20 * x, noise(), 10)


# ---------------------------------------------------------------- noise


def test_start_noise_belongs_to_the_image_not_to_the_batch():
    keys = [(7, i) for i in range(5)]
    whole = start_noise(SHAPE, keys)
    assert whole.shape == (5, *SHAPE)
    assert whole.dtype == torch.float32
    for size in (1, 2):
        parts = [start_noise(SHAPE, keys[i : i + size]) for i in range(0, 5, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(start_noise(SHAPE, keys[::-1]), whole.flip(0))


def test_start_noise_is_standard_and_differs_by_seed_and_index():
    x = start_noise((3, 20, 30), [(0, i) for i in range(20)])  # 36,000 values
    assert abs(x.mean().item()) < 5 / 36_000**0.5
    assert abs(x.var().item() - 1) < 5 * (2 / 36_000) ** 0.5
    assert not torch.equal(x[0], x[1])
    assert not torch.equal(x[:1], start_noise((3, 20, 30), [(1, 0)]))


# ---------------------------------------------------------------- DDIM


def test_ddim_without_eta_is_deterministic_and_needs_no_seeds():
    velocity = EmpiricalFlow(torch.cat([point(), -point()]), Cosine()).velocity
    assert torch.equal(
        sample_ddim(velocity, noise(), 5, Cosine()), sample_ddim(velocity, noise(), 5, Cosine())
    )


def test_ddpm_noise_belongs_to_the_image():
    data = torch.randn(9, *SHAPE, generator=torch.Generator().manual_seed(0))
    velocity = EmpiricalFlow(data, Cosine()).velocity
    keys = [(3, i) for i in range(5)]

    def draw(keys, start):
        return sample_ddim(velocity, start, 6, Cosine(), 1.0, keys, t_end=0.2)

    whole = draw(keys, noise())
    assert torch.allclose(draw(keys[2:4], noise()[2:4]), whole[2:4], atol=1e-5)
    other = draw([(4, i) for i in range(5)], noise())
    assert not torch.allclose(other, whole, atol=0.1)


def test_ddim_step_is_the_formula():
    """One step from t = .6 to t = .3 with eta = .7, by hand, for a zero-mean Gaussian's x0_hat."""
    schedule = Cosine()
    t, t_next = torch.tensor(0.6), torch.tensor(0.3)
    a, s, a_next, s_next = schedule.alpha(t), schedule.sigma(t), *(
        f(t_next) for f in (schedule.alpha, schedule.sigma)
    )  # fmt: skip
    x = noise()
    x0_hat = 0.5 * x
    eps_hat = (x - a * x0_hat) / s
    d_a, d_s = schedule.derivatives(t)
    found = sample_ddim(
        lambda x, _: d_a * 0.5 * x + d_s * (x - a * 0.5 * x) / s,
        x, 1, schedule, 0.7, [(3, i) for i in range(5)], t_start=0.6, t_end=0.3,
    )  # fmt: skip
    spread = 0.7 * (s_next**2 / s**2 * (1 - a**2 / a_next**2)).sqrt()
    z = start_noise(SHAPE, [(3, i, 1) for i in range(5)])
    expected = a_next * x0_hat + (s_next**2 - spread**2).sqrt() * eps_hat + spread * z
    assert torch.allclose(found, expected, atol=1e-5)


def test_ddpm_step_has_the_posterior_variance():
    """eta = 1: given x0, x' must be distributed as q(x' | x_t, x0), so over noise as q(x' | x0)."""
    schedule, x0 = Cosine(), 0.7
    flow = EmpiricalFlow(torch.full((1, 1, 1, 1), x0), schedule)
    keys = [(5, i) for i in range(4000)]
    t = torch.tensor(0.8)
    x_t = schedule.alpha(t) * x0 + schedule.sigma(t) * start_noise((1, 1, 1), keys)
    x = sample_ddim(flow.velocity, x_t, 3, schedule, 1.0, keys, t_start=0.8, t_end=0.4)
    end = torch.tensor(0.4)
    assert x.mean().item() == pytest.approx((schedule.alpha(end) * x0).item(), abs=0.05)
    assert x.std().item() == pytest.approx(schedule.sigma(end).item(), rel=0.06)  # 5 / sqrt(2 N)
