"""The theorem: isolated experts and a router are one model, whatever each expert was trained on.

DDM eq. 4 for velocities and scores, the objective behind it, mixed predictions and schedules, and
what the samplers make of them. Float64; every expert is exact, so errors are rounding.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.conversion import matching_point, velocity_on
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert
from ddm_min.objectives import FLOW, PREDICTIONS, Objective, loss
from ddm_min.sampler import sample, sample_ddim, start_noise
from ddm_min.schedule import Betas, Cosine, Linear, add_noise

SCHEDULES = [Linear(), Cosine(), Betas.ddpm()]
OBJECTIVES = [Objective(p, schedule) for p in PREDICTIONS for schedule in SCHEDULES]
SHAPE = (2, 4, 3)  # C, H, W
TIMES = (1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-3)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def column(per_sample: torch.Tensor) -> torch.Tensor:
    return per_sample[:, None, None, None]


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The worst image's |found - truth| / |truth|."""
    return ((found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max().item()


def digits() -> torch.Tensor:
    return data.to_float(data.load("digits").images).double()


def unequal_shards(images: torch.Tensor, num_shards: int) -> list[torch.Tensor]:
    """Neighbours along one direction, in sizes that grow as 1, 2, 3, ..."""
    order = images.flatten(1)[:, ::5].sum(1).argsort()
    total = num_shards * (num_shards + 1) / 2
    ends = [round(len(images) * k * (k + 1) / 2 / total) for k in range(num_shards + 1)]
    shards = [images[order[low:high]] for low, high in itertools.pairwise(ends)]
    assert len({len(shard) for shard in shards}) == num_shards
    return shards


def on_path(images: torch.Tensor, schedule, t: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """x_t of images drawn from all over the dataset, one per t."""
    rows = np.random.default_rng(seed).integers(len(images), size=len(t))
    return add_noise(images[rows], normal(seed + 1, len(t), *images.shape[1:]), t, schedule)


def ensemble_of(shards, objectives, path=Linear(), align=True) -> Ensemble:
    """An expert per shard, each on its own objective, under the exact router; no statistics."""
    experts = [
        Expert(EmpiricalFlow(shard, path).expert(objective), objective, cluster=k)
        for k, (shard, objective) in enumerate(zip(shards, objectives, strict=True))
    ]
    return Ensemble(experts, exact_router(shards, path), path, align=align)


def full(ensemble: Ensemble, num: int):
    """The velocity of `num` unconditional trajectories under strategy "full"."""
    return ensemble.field(torch.zeros(num, dtype=torch.long), "full")


# 1. DDM eq. 4


def mixture_errors(shards, schedule, x_t, t) -> tuple[float, float]:
    """Errors of sum_k p(k | x_t, t) u_k and of the same sum of scores, against all images' own."""
    probs = exact_router(shards, schedule)(x_t, t, None).exp()
    flows = [EmpiricalFlow(shard, schedule) for shard in shards]
    whole = EmpiricalFlow(torch.cat(shards), schedule)
    velocity = sum(column(probs[:, k]) * flow.velocity(x_t, t) for k, flow in enumerate(flows))
    score = sum(column(probs[:, k]) * flow.score(x_t, t) for k, flow in enumerate(flows))
    return (
        relative_error(velocity, whole.velocity(x_t, t)),
        relative_error(score, whole.score(x_t, t)),
    )


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_eq_4_on_digits(num_shards):
    """The mixture is the marginal velocity, and the score (appendix A), on real images."""
    images, t = digits(), f64(*TIMES)
    shards = unequal_shards(images, num_shards)
    for schedule in SCHEDULES:
        errors = mixture_errors(shards, schedule, on_path(images, schedule, t), t)
        assert max(errors) <= 1e-10, (schedule, errors)
        # away from the data only where sigma is large: distances^2 / sigma^2 are what is rounded
        late = t[2:]
        errors = mixture_errors(shards, schedule, 2 * normal(5, len(late), 1, 8, 8), late)
        assert max(errors) <= 1e-10, (schedule, errors)


@settings(max_examples=25)
@given(
    st.sampled_from([2, 3, 8]),
    st.lists(st.floats(1e-3, 1 - 1e-3), min_size=5, max_size=5),
    st.sampled_from(SCHEDULES),
    st.integers(0, 9999),
)
def test_eq_4_on_random_data(num_shards, times, schedule, seed):
    """The same for any data and any times, B, C, H, W all different."""
    images, t = normal(seed, 72, *SHAPE), f64(*times)  # 72 = 2 (1 + 2 + ... + 8)
    shards = unequal_shards(images, num_shards)
    errors = mixture_errors(shards, schedule, on_path(images, schedule, t, seed), t)
    assert max(errors) <= 1e-10, errors
    errors = mixture_errors(shards, schedule, 3 * normal(seed + 1, 5, *SHAPE), t.clamp(min=0.1))
    assert max(errors) <= 1e-10, errors


def test_eq_4_needs_the_prior_and_the_evidence():
    """The same experts under equal weights, or under the shards' sizes, are far off."""
    images, t = digits(), f64(0.3, 0.5, 0.7)
    shards, x_t = unequal_shards(images, 3), on_path(images, Linear(), t)
    truth = EmpiricalFlow(images, Linear()).velocity(x_t, t)
    velocities = [EmpiricalFlow(shard, Linear()).velocity(x_t, t) for shard in shards]
    for weights in ([1 / 3] * 3, [1 / 6, 2 / 6, 3 / 6]):
        wrong = sum(w * u for w, u in zip(weights, velocities, strict=True))
        assert relative_error(wrong, truth) > 0.01


# 2. The objective


def small_world():
    """Six one-by-two images in three unequal shards, and a grid of x_t on which to add up losses.

    Returns images [6, 1, 1, 2], shard of each, x_t [81, 1, 1, 2] and t, and the joint probability
    of image and grid point [6, 81], from the normal density written out.
    """
    images, shard_of = normal(0, 6, 1, 1, 2), torch.tensor([0, 1, 1, 2, 2, 2])
    line = torch.linspace(-2, 2, 9, dtype=torch.float64)
    x_t, t = torch.cartesian_prod(line, line).reshape(81, 1, 1, 2), 0.6
    square = (x_t[None] - (1 - t) * images[:, None]).flatten(2).square().sum(-1)
    joint = torch.exp(-square / (2 * t**2))
    return images, shard_of, x_t, t, joint / joint.sum()


def table_loss(table, images, x_t, t, joint) -> torch.Tensor:
    """Flow matching's expected loss of a network that is a table over the grid, by objectives.loss.

    Every pair of an image and a grid point is one training example: eps is what leads there.
    """
    pairs = torch.cartesian_prod(torch.arange(len(images)), torch.arange(len(x_t)))
    x0 = images[pairs[:, 0]]
    eps = (x_t[pairs[:, 1]] - (1 - t) * x0) / t
    times = torch.full((len(pairs),), t, dtype=torch.float64)
    losses = loss(lambda x, s, y: table[pairs[:, 1]], x0, eps, times, None, FLOW)
    return (joint.flatten() * losses).sum()


def gradient_of(function, at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


def newton_minimum(function, start: torch.Tensor) -> torch.Tensor:
    """The minimiser of a separable quadratic: one Newton step with its diagonal of curvatures."""
    slope = gradient_of(function, start)
    curvature = gradient_of(function, start + 1) - slope
    return start - slope / curvature


def test_minimisers_of_the_parts_minimise_the_whole():
    """Train experts and router apart, to their minima: combined, they minimise the one loss.

    Experts by Newton's step on their shard's loss, the router by Newton's steps on its
    cross-entropy (DDM algorithm 1); nothing here knows the posterior.
    """
    images, shard_of, x_t, t, joint = small_world()
    start = torch.zeros(81, 1, 1, 2, dtype=torch.float64)

    experts = []
    for k in range(3):
        part = shard_of == k
        shard_loss = partial(table_loss, images=images[part], x_t=x_t, t=t, joint=joint[part])
        experts.append(newton_minimum(shard_loss, start))

    cluster_mass = torch.stack([joint[shard_of == k].sum(0) for k in range(3)], dim=1)  # 81 3

    def cross_entropy(logits):
        return -(cluster_mass * logits.log_softmax(1)).sum()

    logits = torch.zeros(81, 3, dtype=torch.float64)
    for _ in range(60):  # damped Newton on each grid point's own 3 x 3 problem
        probs = logits.softmax(1)
        slope = gradient_of(cross_entropy, logits) / cluster_mass.sum(1, keepdim=True)
        hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
        # + 1 fixes what softmax leaves open: a constant on all three logits of a point
        step = torch.linalg.solve(hessian + 1, slope[:, :, None])[:, :, 0]
        logits = logits - step / step.abs().amax(1, keepdim=True).clamp(min=1)
    assert gradient_of(cross_entropy, logits).abs().max() < 1e-15

    probs = logits.softmax(1)
    combined = sum(column(probs[:, k]) * experts[k] for k in range(3))
    whole_loss = partial(table_loss, images=images, x_t=x_t, t=t, joint=joint)
    least = whole_loss(combined)
    assert gradient_of(whole_loss, combined).abs().max() < 1e-14
    assert relative_error(combined, newton_minimum(whole_loss, start)) < 1e-9
    for seed in range(50):  # any change makes it worse, by exactly its own squared size
        change = 0.1 * normal(seed, *combined.shape)
        size = (joint.sum(0) * change.flatten(1).square().mean(1)).sum()
        assert (whole_loss(combined + change) - least).item() == pytest.approx(
            size.item(), rel=1e-9
        )

    # and this minimum, found by training, is the closed form of analytic.py
    truth = EmpiricalFlow(images, Linear()).velocity(x_t, torch.full((81,), t, dtype=torch.float64))
    assert relative_error(combined, truth) < 1e-9


def test_gradients_of_the_parts_add_up_to_the_whole():
    """At any output of any model: grad = sum_k p(k | x_t, t) grad of shard k's loss."""
    images, t = digits()[::9], f64(0.1, 0.3, 0.5, 0.7, 0.9)
    shards, x_t = unequal_shards(images, 3), on_path(images, Linear(), t)
    output = normal(7, *x_t.shape)

    def gradient(part):
        """Of E[|output - u|^2 | x_t, image in part], the posterior by the normal density."""
        square = (x_t[:, None] - column(1 - t)[:, None] * part[None]).flatten(2).square().sum(2)
        posterior = (-square / (2 * t[:, None] ** 2)).softmax(1)
        eps = (x_t[:, None] - column(1 - t)[:, None] * part[None]) / column(t)[:, None]

        def expected_loss(out):
            errors = (out[:, None] - (eps - part[None])).square().flatten(2).mean(2)
            return (posterior * errors).sum()

        return gradient_of(expected_loss, output)

    probs = exact_router(shards, Linear())(x_t, t, None).exp()
    mixed = sum(column(probs[:, k]) * gradient(shard) for k, shard in enumerate(shards))
    assert relative_error(mixed, gradient(images)) < 1e-10


# 3. Heterogeneous mixtures


def test_every_assignment_of_objectives_to_two_shards():
    """HDDM: all 144 pairs of four predictions x three schedules give the one marginal velocity.

    Times stay inside the table's log-SNR range. Asked naively, at the same (x_t, t), every pair
    with an expert of another schedule is off by more than 1 %.
    """
    images, path = normal(0, 9, *SHAPE), Linear()
    shards = list(images.split([3, 6]))
    t = f64(0.02, 0.1, 0.3, 0.7, 0.9, 0.98)
    x_t = on_path(images, path, t)
    truth = EmpiricalFlow(images, path).velocity(x_t, t)
    naive_errors = []
    for objectives in itertools.product(OBJECTIVES, repeat=2):
        aligned = full(ensemble_of(shards, objectives, path), 6)(x_t, t)
        assert relative_error(aligned, truth) <= 1e-10, objectives
        naive = full(ensemble_of(shards, objectives, path, align=False), 6)(x_t, t)
        if all(objective.schedule == path for objective in objectives):
            assert relative_error(naive, truth) <= 1e-10, objectives
        else:
            naive_errors.append(relative_error(naive, truth))
    assert len(naive_errors) == 144 - 16 and min(naive_errors) > 0.01


def test_heterogeneous_mixture_of_digits():
    """Four shards of real images, twelve objectives handed round: aligned exact, naive 20 % off."""
    images, t = digits(), f64(0.02, 0.3, 0.7, 0.98)
    shards, x_t = unequal_shards(images, 4), on_path(images, Linear(), t)
    truth = EmpiricalFlow(images, Linear()).velocity(x_t, t)
    for first in range(12):
        objectives = [OBJECTIVES[(first + 5 * k) % 12] for k in range(4)]
        aligned = full(ensemble_of(shards, objectives), 4)(x_t, t)
        assert relative_error(aligned, truth) <= 1e-10, objectives
        naive = full(ensemble_of(shards, objectives, align=False), 4)(x_t, t)
        assert relative_error(naive, truth) > 0.2, objectives


@given(st.sampled_from(OBJECTIVES), st.sampled_from(SCHEDULES), st.floats(0.02, 0.98))
def test_change_of_schedule_for_any_pair(objective, path, value):
    """One exact expert of any objective gives the exact velocity of any path."""
    images = normal(0, 7, *SHAPE)
    t = path.time_at(2 * torch.log((1 - f64(value)) / f64(value)))
    x_t = on_path(images, path, t)
    model = EmpiricalFlow(images, Linear()).expert(objective)
    found = velocity_on(path, model, objective, x_t, t, None)
    assert relative_error(found, EmpiricalFlow(images, path).velocity(x_t, t)) <= 1e-10


def test_matching_point_inside_the_range():
    """alpha_A(s) / alpha_B(t) = sigma_A(s) / sigma_B(t) = c: the same picture in other units."""
    t = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    for path, schedule in itertools.product(SCHEDULES, SCHEDULES):
        inside = t if path == Linear() else path.time_at(Linear().log_snr(t))
        s, c = matching_point(path, schedule, inside)
        assert torch.allclose(schedule.alpha(s) / path.alpha(inside), c, rtol=1e-12)
        assert torch.allclose(schedule.sigma(s) / path.sigma(inside), c, rtol=1e-12)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_outside_a_table_its_end_is_held(prediction):
    """t = 0, .003, .998, 1 on the linear path: asked at s = 0 or 1, finite, read as said there."""
    images, t = normal(0, 7, *SHAPE), f64(0, 0.003, 0.998, 1)
    objective, asked = Objective(prediction, Betas.ddpm()), []
    exact = EmpiricalFlow(images, Linear()).expert(objective)

    def model(x_s, s, labels):
        asked.append((x_s, s))
        return exact(x_s, s, labels)

    x_t = on_path(images, Linear(), t)
    found = velocity_on(Linear(), model, objective, x_t, t, None)
    (x_s, s), size = asked[0], ((1 - t) ** 2 + t**2).sqrt()
    assert s.tolist() == [0, 0, 1, 1]
    assert torch.allclose(x_s, x_t / column(size), rtol=1e-14)
    flow = EmpiricalFlow(images, Betas.ddpm())
    truth = flow.eps(x_s, s) - flow.x0(x_s, s)  # the expert's own x0 and eps there
    assert torch.isfinite(found).all() and relative_error(found, truth) < 1e-10


# The singular ends of conversion


def test_eps_at_pure_noise_takes_the_mean_image():
    """t = 1: eps knows nothing of x0; with the data's mean the velocity is the exact one."""
    images, t, x_t = normal(0, 7, *SHAPE), torch.ones(5).double(), normal(1, 5, *SHAPE)
    truth = EmpiricalFlow(images, Linear()).velocity(x_t, t)
    mean = images.mean(0).expand_as(x_t)
    for schedule in (Linear(), Cosine()):
        objective = Objective("eps", schedule)
        model = EmpiricalFlow(images, Linear()).expert(objective)
        found = velocity_on(Linear(), model, objective, x_t, t, None, x0_at_noise=mean)
        assert relative_error(found, truth) < 1e-14
        found = velocity_on(Linear(), model, objective, x_t, t, None)
        assert torch.allclose(found, x_t, rtol=1e-14)  # without it, zeros: eps - 0


@pytest.mark.parametrize("prediction", ["x0", "v", "velocity"])
def test_other_predictions_are_exact_at_both_ends(prediction):
    """t = 0 and t = 1: the exact velocity -x0 and x_t - mean, without any stand-in for x0."""
    images, t = normal(0, 7, *SHAPE), f64(0, 1)
    x_t = torch.cat([images[3:4], normal(1, 1, *SHAPE)])
    truth = torch.cat([-images[3:4], x_t[1:] - images.mean(0)])
    for schedule in (Linear(), Cosine()):
        objective = Objective(prediction, schedule)
        model = EmpiricalFlow(images, Linear()).expert(objective)
        found = velocity_on(Linear(), model, objective, x_t, t, None)
        assert relative_error(found, truth) < 1e-14


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_x0_range_clamps_and_keeps_x_t(objective):
    """Whatever a network says, x0 ends inside the range and alpha x0 + sigma eps is still x_t."""
    t, x_t = f64(0.02, 0.3, 0.5, 0.8, 0.99), normal(0, 5, *SHAPE)
    free = velocity_on(Linear(), lambda x, s, y: 3 * x, objective, x_t, t, None)
    found = velocity_on(
        Linear(), lambda x, s, y: 3 * x, objective, x_t, t, None, x0_range=(-0.5, 0.75)
    )
    # on the linear path x0 = x_t - t u and eps = x_t + (1 - t) u, so x_t is kept by any u
    x0_free, x0 = x_t - column(t) * free, x_t - column(t) * found
    assert ((x0_free < -0.6) | (x0_free > 0.8)).any()
    assert torch.allclose(x0, x0_free.clamp(-0.5, 0.75), rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_x0_range_is_finite_at_both_ends(objective):
    """At t = 0 there is no eps to recompute, at t = 1 nothing to divide by: no infinities."""
    x_t, t = 2 * torch.ones(2, *SHAPE, dtype=torch.float64), f64(0, 1)
    found = velocity_on(Linear(), lambda x, s, y: x, objective, x_t, t, None, x0_range=(-1, 1))
    assert torch.isfinite(found).all()


# 6. Sampling: same noise, same picture; orders of convergence


@pytest.mark.parametrize("method", ["euler", "heun"])
def test_same_noise_same_picture(method):
    """DDM figure 5 without training: mixture and monolith end in the same images, 50 steps."""
    images, noise = digits(), normal(3, 9, 1, 8, 8)
    shards = unequal_shards(images, 4)
    monolith = sample(EmpiricalFlow(images, Linear()).velocity, noise, 50, method)
    objectives = [
        FLOW,
        Objective("x0", Cosine()),
        Objective("v", Cosine()),
        Objective("v", Linear()),
    ]
    mixture = sample(full(ensemble_of(shards, objectives), 9), noise, 50, method)
    # rounding of 1e-15 per step, times what the flow stretches on its way (measured: about 1e-14)
    assert (mixture - monolith).abs().max() < 1e-11
    # each ends in the dataset, and not all in the same image
    distance = torch.cdist(mixture.flatten(1), images.flatten(1))
    assert distance.min(1).values.max() < 0.05
    assert len(distance.argmin(1).unique()) > 5


def observed_orders(errors: list[float]) -> list[float]:
    """log2 of the ratio of neighbours, as steps double: 1 for an error ~ 1 / n."""
    return [math.log2(a / b) for a, b in itertools.pairwise(errors)]


MEAN, SPREAD = 0.4, 0.5  # of the Gaussian pixels below, whose flow is known


def gaussian_x0(x_t: torch.Tensor, t: torch.Tensor, schedule) -> torch.Tensor:
    """E[x0 | x_t] for pixels N(MEAN, SPREAD^2)."""
    alpha, sigma = column(schedule.alpha(t)), column(schedule.sigma(t))
    gain = alpha * SPREAD**2 / (alpha**2 * SPREAD**2 + sigma**2)
    return MEAN + gain * (x_t - alpha * MEAN)


def gaussian_at(z: torch.Tensor, t: float, schedule) -> torch.Tensor:
    """Where the flow carries the normal z: alpha MEAN + sqrt(alpha^2 SPREAD^2 + sigma^2) z."""
    alpha, sigma = schedule.alpha(f64(t)), schedule.sigma(f64(t))
    return alpha * MEAN + (alpha**2 * SPREAD**2 + sigma**2).sqrt() * z


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2)])
def test_order_on_a_gaussian(method, order):
    """From t = 1 to .5 against the closed form: error ~ 1 / n for Euler, 1 / n^2 for Heun."""

    def velocity(x, t):
        x0 = gaussian_x0(x, t, Linear())
        return (x - x0) / column(t)  # eps - x0 with eps = (x - (1 - t) x0) / t

    noise = normal(0, 5, *SHAPE)
    truth = gaussian_at(noise, 0.5, Linear())
    errors = [
        (sample(velocity, noise, n, method, t_end=0.5) - truth).abs().max().item()
        for n in (64, 128, 256)
    ]
    assert all(abs(found - order) < 0.05 for found in observed_orders(errors)), errors
    assert errors[-1] < 1e-2 / 256 ** (order - 1)


def test_order_on_a_mixture():
    """The same on a heterogeneous mixture of exact experts, against the monolith, extrapolated."""
    images = normal(0, 12, *SHAPE)
    objectives = [FLOW, Objective("x0", Cosine()), Objective("v", Cosine())]
    shards, noise = list(images.split([2, 4, 6])), normal(1, 5, *SHAPE)
    monolith = EmpiricalFlow(images, Linear()).velocity
    coarse, fine = (sample(monolith, noise, n, "heun", t_end=0.5) for n in (256, 512))
    truth = (4 * fine - coarse) / 3  # Richardson: what is left is far below Heun's own error
    field = full(ensemble_of(shards, objectives), 5)
    for method, order in (("euler", 1), ("heun", 2)):
        ends = [sample(field, noise, n, method, t_end=0.5) for n in (64, 128, 256)]
        errors = [(end - truth).norm().item() for end in ends]
        assert all(abs(found - order) < 0.1 for found in observed_orders(errors)), errors


def test_heun_ends_with_euler():
    """Nothing is asked at t = 0, where velocities may be singular; Heun asks 2 n - 1 times."""
    asked = []

    def velocity(x, t):
        asked.append(t[0].item())
        return x

    sample(velocity, torch.ones(1, *SHAPE, dtype=torch.float64), 4, "heun")
    assert asked == [1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]


def test_one_step_is_enough_and_none_is_refused():
    """One Euler step from t = 1 to 0 is x - velocity; no step, or another method, is an error."""
    noise = normal(0, 5, *SHAPE)
    assert torch.equal(sample(lambda x, t: 3 * x, noise, 1), noise - 3 * noise)
    for num_steps, method in ((0, "euler"), (4, "rk4")):
        with pytest.raises(ValueError, match="euler or heun"):
            sample(lambda x, t: x, noise, num_steps, method)


# 7. A lone epsilon expert


@pytest.mark.parametrize("schedule", [Cosine(), Betas.ddpm()])
def test_ddim_and_the_converted_flow_meet(schedule):
    """DDIM on the expert's own schedule, Euler on the linear path: one image as steps grow.

    Both start at the log-SNR of s = 1 or, where that is infinite, of s = .98, in their own units,
    and end at the log-SNR of t = .2. Gaussian data, whose flow has a closed form.
    """
    objective = Objective("eps", schedule)

    def model(x_s, s, labels):
        alpha, sigma = column(schedule.alpha(s)), column(schedule.sigma(s))
        return (x_s - alpha * gaussian_x0(x_s, s, schedule)) / sigma

    def own(x, s):
        return velocity_on(schedule, model, objective, x, s, None)

    def converted(x, t):
        return velocity_on(Linear(), model, objective, x, t, None)

    s_start = 0.98 if schedule == Cosine() else 1.0
    log_snr = schedule.log_snr(f64(s_start))
    t_start, t_end = (1 / (1 + torch.exp(log_snr / 2))).item(), 0.2
    s_end = schedule.time_at(f64(2 * math.log(0.8 / 0.2))).item()
    z = normal(0, 5, *SHAPE)
    truth = gaussian_at(z, t_end, Linear())
    unit = 0.8 / schedule.alpha(f64(s_end)).item()  # x on the linear path per x on the schedule
    gaps, ddim_errors, euler_errors = [], [], []
    for n in (25, 50, 100, 200):
        start = gaussian_at(z, s_start, schedule)
        ddim = unit * sample_ddim(own, start, n, schedule, t_start=s_start, t_end=s_end)
        start = gaussian_at(z, t_start, Linear())
        euler = sample(converted, start, n, t_start=t_start, t_end=t_end)
        gaps.append((ddim - euler).abs().max().item())
        ddim_errors.append((ddim - truth).abs().max().item())
        euler_errors.append((euler - truth).abs().max().item())
    for errors in (gaps, ddim_errors, euler_errors):
        assert all(abs(order - 1) < 0.15 for order in observed_orders(errors)), errors
    assert max(ddim_errors[-1], euler_errors[-1]) < 1e-2


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_one_ddim_step_is_song_eq_12(eta):
    """alpha' x0 + sqrt(sigma'^2 - s^2) eps + s z, with eta = 1 the posterior of a DDPM step."""
    x, x0 = normal(0, 40, 5, 6, 7), normal(1, 40, 5, 6, 7)
    seeds = [(0, index) for index in range(40)]
    for schedule, t, t_next in ((Cosine(), 0.7, 0.5), (Betas.ddpm(), 0.4, 0.1), (Cosine(), 1, 0.9)):
        alpha, sigma = schedule.alpha(f64(t)).item(), schedule.sigma(f64(t)).item()
        alpha_next, sigma_next = (c(f64(t_next)).item() for c in (schedule.alpha, schedule.sigma))
        d_alpha, d_sigma = (d.item() for d in schedule.derivatives(f64(t)))
        eps = (x - alpha * x0) / sigma
        velocity = d_alpha * x0 + d_sigma * eps
        found = sample_ddim(
            lambda x, t, u=velocity: u, x, 1, schedule, eta, seeds, t_start=t, t_end=t_next
        )
        # q(x' | x, x0): the variance of x given x' is that of the steps between them
        between = sigma**2 - (alpha / alpha_next) ** 2 * sigma_next**2
        std = eta * math.sqrt(between) * sigma_next / sigma
        mean = alpha_next * x0 + math.sqrt(sigma_next**2 - std**2) * eps
        if eta == 1 and alpha > 0:  # the same mean as a mixture of x and x0 (Ho et al. 2020, eq. 7)
            ho = (alpha / alpha_next) * sigma_next**2 / sigma**2 * x
            ho = ho + alpha_next * between / sigma**2 * x0
            assert torch.allclose(mean, ho, rtol=0, atol=1e-12)
        residual = found - mean
        if eta == 0:
            assert residual.abs().max() < 1e-12
        else:  # 8,400 normal numbers: their mean and their variance to 4.5 standard errors
            assert abs(residual.mean().item()) < 4.5 * std / math.sqrt(8400)
            ratio = residual.square().mean().item() / std**2
            assert abs(ratio - 1) < 4.5 * math.sqrt(2 / 8400)


def ddpm_moments(num_steps: int) -> tuple[float, float]:
    """Mean and variance that DDPM sampling on Cosine ends with, for the Gaussian pixels above.

    Each step is x' = slope x + constant + noise, so both follow by arithmetic.
    """
    mean, variance = 0.0, 1.0
    for t, t_next in itertools.pairwise(np.linspace(1, 0, num_steps + 1)):
        a, s = math.cos(math.pi / 2 * t), math.sin(math.pi / 2 * t)
        a_next, s_next = math.cos(math.pi / 2 * t_next), math.sin(math.pi / 2 * t_next)
        between = s**2 - (a / a_next) ** 2 * s_next**2
        gain = a * SPREAD**2 / (a**2 * SPREAD**2 + s**2)
        on_x, on_x0 = (a / a_next) * s_next**2 / s**2, a_next * between / s**2
        mean = (on_x + on_x0 * gain) * mean + on_x0 * MEAN * (1 - gain * a)
        variance = (on_x + on_x0 * gain) ** 2 * variance + between * s_next**2 / s**2
    return mean, variance


def test_ddpm_tends_to_the_data():
    """The recursion's mean is the data's at once, its variance as 1 / n: 11 % short in 60 steps."""
    short = []
    for num_steps in (60, 600, 6000):
        mean, variance = ddpm_moments(num_steps)
        assert abs(mean - MEAN) < 1e-9
        short.append(1 - variance / SPREAD**2)
    assert 0.1 < short[0] < 0.12 and short[1] < 0.014 and short[2] < 0.0014, short


def test_ddpm_sampling_has_the_right_marginal():
    """eta = 1 on Gaussian pixels: mean and variance of 21,000 samples, as arithmetic has them."""
    schedule, num_steps = Cosine(), 60
    seeds = [(1, index) for index in range(100)]
    noise = start_noise((5, 6, 7), seeds).double()

    def own(x, s):
        x0 = gaussian_x0(x, s, schedule)
        alpha, sigma = column(schedule.alpha(s)), column(schedule.sigma(s))
        d_alpha, d_sigma = (column(d) for d in schedule.derivatives(s))
        return d_alpha * x0 + d_sigma * (x - alpha * x0) / sigma

    found = sample_ddim(own, noise, num_steps, schedule, 1.0, seeds)
    mean, variance = ddpm_moments(num_steps)
    assert abs(found.mean().item() - mean) < 4.5 * math.sqrt(variance / 21_000)
    assert abs(found.var().item() / variance - 1) < 4.5 * math.sqrt(2 / 21_000)
