"""The ground truth itself, against brute force: loops, autograd, conservation of mass."""

import math
import time

import numpy as np
import pytest
import torch

from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.objectives import PREDICTIONS, Objective
from ddm_min.schedule import Betas, Cosine, Linear

SCHEDULES = [Linear(), Cosine(), Betas.ddpm()]
SHAPE = (2, 4, 3)  # C, H, W; five images and six queries


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def queries(data: torch.Tensor, schedule, t: torch.Tensor) -> torch.Tensor:
    """One x_t per time, on the path from some image of the data."""
    noise = normal(99, len(t), *data.shape[1:])
    alpha, sigma = (c(t)[:, None, None, None] for c in (schedule.alpha, schedule.sigma))
    return alpha * data[torch.arange(len(t)) % len(data)].double() + sigma * noise


def density_by_loops(x_t, image, alpha: float, sigma: float) -> float:
    """N(x_t; alpha image, sigma^2 I), pixel by pixel."""
    density = 1.0
    for x, y in zip(x_t.ravel(), image.ravel(), strict=True):
        density *= math.exp(-((x - alpha * y) ** 2) / (2 * sigma**2)) / (
            sigma * math.sqrt(2 * math.pi)
        )
    return density


def brute_force(data, schedule, x_t, t: float) -> tuple[np.ndarray, np.ndarray, float]:
    """(E[x0 | x_t], E[eps | x_t], p_t(x_t)) of one query by Bayes' rule, image by image."""
    alpha, sigma = schedule.alpha(f64(t)).item(), schedule.sigma(f64(t)).item()
    density, x0, eps = 0.0, 0.0, 0.0
    for image in data:
        joint = density_by_loops(x_t, image, alpha, sigma) / len(data)
        density += joint
        x0 = x0 + joint * image
        eps = eps + joint * (x_t - alpha * image) / sigma
    return x0 / density, eps / density, density


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_flow_is_bayes_rule(schedule):
    """x0, eps, velocity, score and density of six queries, each at its own t, in plain numpy."""
    data, t = 0.5 * normal(0, 5, *SHAPE), f64(0.2, 0.4, 0.5, 0.6, 0.8, 0.95)
    x_t, flow = queries(data, schedule, t), EmpiricalFlow(data, schedule)
    d_alpha, d_sigma = schedule.derivatives(t)
    for i, value in enumerate(t.tolist()):
        x0, eps, density = brute_force(data.numpy(), schedule, x_t[i].numpy(), value)
        velocity = d_alpha[i].item() * x0 + d_sigma[i].item() * eps
        score = -eps / schedule.sigma(t[i]).item()
        one, time_ = x_t[i : i + 1], t[i : i + 1]
        for batch, single, truth in (
            (flow.x0(x_t, t), flow.x0(one, time_), x0),
            (flow.eps(x_t, t), flow.eps(one, time_), eps),
            (flow.velocity(x_t, t), flow.velocity(one, time_), velocity),
            (flow.score(x_t, t), flow.score(one, time_), score),
        ):
            # the exponent, of the size of 24 pixels, is rounded; d_alpha reaches 5 on the table
            np.testing.assert_allclose(batch[i], truth, rtol=0, atol=1e-12 * np.abs(truth).max())
            np.testing.assert_allclose(single[0], truth, rtol=0, atol=1e-12 * np.abs(truth).max())
        assert flow.log_density(x_t, t)[i].item() == pytest.approx(math.log(density), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_score_is_the_gradient_of_the_log_density(schedule):
    """score = grad log p_t by autograd, on the path and away from it (DDM appendix A)."""
    data, t = 0.5 * normal(0, 5, *SHAPE), f64(0.05, 0.2, 0.4, 0.6, 0.8, 1)
    flow = EmpiricalFlow(data, schedule)
    for x_t in (queries(data, schedule, t), 2 * normal(7, 6, *SHAPE)):
        x_t.requires_grad_()
        (gradient,) = torch.autograd.grad(flow.log_density(x_t, t).sum(), x_t)
        score = flow.score(x_t.detach(), t)
        assert torch.allclose(score, gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_velocity_conserves_mass(schedule):
    """d log p / dt + div u + u . score = 0: this velocity, and no multiple, carries p_t along."""
    data, shape = normal(0, 5, 1, 2, 3), (1, 2, 3)
    flow = EmpiricalFlow(data, schedule)
    for value in (0.3, 0.5, 0.8):
        t, h = f64(value), 1e-5
        x_t = queries(data, schedule, t)
        rate = (flow.log_density(x_t, t + h) - flow.log_density(x_t, t - h)) / (2 * h)
        jacobian = torch.autograd.functional.jacobian(lambda x: flow.velocity(x, t), x_t)  # noqa: B023
        divergence = jacobian.reshape(math.prod(shape), -1).trace()
        transport = (flow.velocity(x_t, t) * flow.score(x_t, t)).sum()
        scale = max(abs(divergence.item()), abs(transport.item()), 1)
        # the central difference is off by h^2 = 1e-10 times a third derivative
        assert abs((rate + divergence + transport).item()) < 1e-6 * scale


def test_identities_between_x0_eps_and_velocity():
    """x_t = alpha x0 + sigma eps and velocity = d_alpha x0 + d_sigma eps = eps - x0 on Linear."""
    data, t = normal(0, 5, *SHAPE), torch.linspace(0.01, 0.99, 6, dtype=torch.float64)
    for schedule in SCHEDULES:
        flow, x_t = EmpiricalFlow(data, schedule), queries(data, schedule, t)
        x0, eps = flow.x0(x_t, t), flow.eps(x_t, t)
        alpha, sigma = (c(t)[:, None, None, None] for c in (schedule.alpha, schedule.sigma))
        assert torch.allclose(alpha * x0 + sigma * eps, x_t, rtol=0, atol=1e-13)
    linear = EmpiricalFlow(data, Linear())
    x_t = queries(data, Linear(), t)
    velocity = linear.eps(x_t, t) - linear.x0(x_t, t)
    assert torch.allclose(linear.velocity(x_t, t), velocity, rtol=0, atol=1e-13)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expert_answers_as_a_perfect_network(schedule):
    """model(x_t, t, labels) is E[target | x_t] of each prediction, on the objective's schedule."""
    data, t = 0.5 * normal(0, 5, *SHAPE), f64(0.3, 0.5, 0.9)
    x_t = queries(data, schedule, t)
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    d_alpha, d_sigma = schedule.derivatives(t)
    for prediction in PREDICTIONS:
        model = EmpiricalFlow(data, Linear()).expert(Objective(prediction, schedule))
        found = model(x_t, t, torch.zeros(3, dtype=torch.long))
        for i, value in enumerate(t.tolist()):
            x0, eps, _ = brute_force(data.numpy(), schedule, x_t[i].numpy(), value)
            truth = {
                "eps": eps,
                "x0": x0,
                "v": alpha[i].item() * eps - sigma[i].item() * x0,
                "velocity": d_alpha[i].item() * x0 + d_sigma[i].item() * eps,
            }[prediction]
            np.testing.assert_allclose(found[i], truth, rtol=0, atol=1e-12 * np.abs(truth).max())


def test_blocks_change_nothing():
    """Seven images in blocks of 1, 3, 7 or 100 give the same sums, up to their order."""
    data, t = normal(0, 7, *SHAPE), f64(0.1, 0.5, 0.5, 1)
    labels, asked = torch.tensor([0, 1, 0, 1, 0, 1, 1]), torch.tensor([0, 1, 2, 2])
    x_t = queries(data, Linear(), t)
    whole = EmpiricalFlow(data, Linear(), labels, 2)
    for block in (1, 3, 7, 100):
        flow = EmpiricalFlow(data, Linear(), labels, 2, block)
        for name in ("x0", "eps", "velocity", "log_weights"):
            found, truth = getattr(flow, name)(x_t, t, asked), getattr(whole, name)(x_t, t, asked)
            assert torch.allclose(found, truth, rtol=1e-14, atol=1e-14), (name, block)
        model = flow.expert(Objective("v", Cosine()))
        truth = whole.expert(Objective("v", Cosine()))(x_t, t, asked)
        assert torch.allclose(model(x_t, t, asked), truth, rtol=1e-14, atol=1e-14)


def test_labels_select_and_the_null_label_sees_all():
    """A query with label y is the flow of the images of class y; the null label, of all."""
    data, t = normal(0, 7, *SHAPE), f64(0.4, 0.6, 0.8)
    labels, x_t = torch.tensor([0, 1, 0, 1, 0, 1, 1]), queries(data, Cosine(), t)
    flow = EmpiricalFlow(data, Cosine(), labels, null_label=2)
    found = flow.velocity(x_t, t, torch.tensor([0, 1, 2]))
    parts = [data[labels == 0], data[labels == 1], data]
    for i, part in enumerate(parts):
        truth = EmpiricalFlow(part, Cosine()).velocity(x_t[i : i + 1], t[i : i + 1])
        assert torch.allclose(found[i : i + 1], truth, rtol=1e-13, atol=1e-13)
    everything = EmpiricalFlow(data, Cosine()).velocity(x_t, t)
    assert torch.allclose(flow.velocity(x_t, t), everything, rtol=1e-13, atol=1e-13)


def test_at_no_noise_the_nearest_image_takes_all():
    """t = 0: x0 is the image, or the nearest to x_t; eps is 0; velocity is d_alpha x0, finite."""
    data, t = normal(0, 5, *SHAPE), torch.zeros(6, dtype=torch.float64)
    x_t = torch.cat([data, data[:1] + 1e-3])
    for schedule in (Linear(), Cosine()):
        flow = EmpiricalFlow(data, schedule)
        assert torch.equal(flow.x0(x_t, t), torch.cat([data, data[:1]]))
        assert torch.equal(flow.eps(x_t, t), torch.zeros_like(x_t))
        d_alpha, _ = schedule.derivatives(t)
        velocity = d_alpha[:, None, None, None] * flow.x0(x_t, t)
        assert torch.equal(flow.velocity(x_t, t), velocity)
        assert torch.equal(
            EmpiricalFlow(data.float(), schedule).x0(x_t.float(), t.float())[:5], data.float()
        )


def test_at_pure_noise_the_mean_is_all_there_is():
    """t = 1: x0 is the mean image, eps is x_t, p_1 is the standard normal."""
    data, t, x_t = normal(0, 5, *SHAPE), torch.ones(6).double(), normal(1, 6, *SHAPE)
    for schedule in (Linear(), Cosine()):
        flow = EmpiricalFlow(data, schedule)
        mean = data.mean(0).expand_as(x_t)
        assert torch.allclose(flow.x0(x_t, t), mean, rtol=0, atol=1e-14)
        assert torch.allclose(flow.eps(x_t, t), x_t, rtol=0, atol=1e-14)
        d_alpha, d_sigma = (d[0] for d in schedule.derivatives(t))
        velocity = d_alpha * mean + d_sigma * x_t
        assert torch.allclose(flow.velocity(x_t, t), velocity, rtol=0, atol=1e-14)
        log_normal = -x_t.flatten(1).square().sum(1) / 2 - 12 * math.log(2 * math.pi)
        assert torch.allclose(flow.log_density(x_t, t), log_normal, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_away_is_safe(dtype):
    """Every density underflows, the posterior does not: the image furthest along x_t takes all."""
    data = normal(0, 5, *SHAPE).to(dtype)
    direction = normal(3, 1, *SHAPE).to(dtype)
    x_t, t = 1e4 * direction, torch.full((1,), 0.1, dtype=dtype)
    furthest = (data * direction).flatten(1).sum(1).argmax()
    flow = EmpiricalFlow(data, Linear())
    assert torch.equal(flow.x0(x_t, t)[0], data[furthest])
    for found in (flow.velocity(x_t, t), flow.score(x_t, t), flow.log_density(x_t, t)):
        assert torch.isfinite(found).all()
    log_probs = exact_router([data[:2], data[2:]], Linear())(x_t, t)
    assert log_probs.exp().tolist() == [[1, 0] if furthest < 2 else [0, 1]]


def test_dtype_follows_the_query():
    """uint8 and float32 data answer float64 queries with all their digits, float32 with float32."""
    rng, t = np.random.default_rng(0), f64(0.2, 0.5, 0.9)
    data = torch.from_numpy(rng.integers(0, 256, (7, *SHAPE), dtype=np.uint8))
    x_t = queries(data, Linear(), t) + 40 * normal(1, 3, *SHAPE)
    for stored in (data, data.float()):
        found = EmpiricalFlow(stored, Linear()).velocity(x_t, t)
        truth = EmpiricalFlow(data.double(), Linear()).velocity(x_t, t)
        assert found.dtype == torch.float64 and torch.equal(found, truth)
    small = EmpiricalFlow(data, Linear()).velocity(x_t.float(), t.float())
    assert small.dtype == torch.float32
    assert torch.allclose(small.double(), truth, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exact_router_is_bayes_rule(schedule):
    """p(k | x_t, t) = n_k / N p_{t,k}(x_t) / p_t(x_t) by loops (DDM eq. 4), unequal shards."""
    data, t = 0.5 * normal(0, 6, *SHAPE), f64(0.3, 0.6, 0.95, 1)
    shards, x_t = list(data.split([1, 2, 3])), queries(0.5 * normal(5, 4, *SHAPE), schedule, t)
    found = exact_router(shards, schedule)(x_t, t, None)
    for i, value in enumerate(t.tolist()):
        joint = [
            len(shard) / 6 * brute_force(shard.numpy(), schedule, x_t[i].numpy(), value)[2]
            for shard in shards
        ]
        np.testing.assert_allclose(found[i].exp(), np.array(joint) / sum(joint), rtol=1e-11)
    if schedule != Betas.ddpm():  # the table never forgets x0 entirely
        np.testing.assert_allclose(found[3].exp(), [1 / 6, 2 / 6, 3 / 6], rtol=1e-14)


def test_exact_router_with_labels():
    """With a label only its images count: a shard without the class gets exactly nothing."""
    data, t = 0.5 * normal(0, 6, *SHAPE), f64(0.5, 0.7, 0.9)
    shards = list(data.split([1, 2, 3]))
    shard_labels = [torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([1, 1, 0])]
    x_t, asked = queries(data, Linear(), t), torch.tensor([0, 1, 2])
    found = exact_router(shards, Linear(), shard_labels, null_label=2)(x_t, t, asked).exp()
    for i, label in enumerate(asked.tolist()):
        joint = np.zeros(3)
        for k, (shard, labels) in enumerate(zip(shards, shard_labels, strict=True)):
            part = shard[(labels == label) | (label == 2)].numpy()
            if len(part):
                density = brute_force(part, Linear(), x_t[i].numpy(), t[i].item())[2]
                joint[k] = len(part) * density
        np.testing.assert_allclose(found[i], joint / joint.sum(), rtol=1e-11)
    assert found[1, 0] == 0


def test_a_dataset_of_the_size_of_cifar10_fits():
    """50,000 x 3,072 values: ten pictures, each 5,000 times, answer as those ten do; in seconds."""
    rng = np.random.default_rng(0)
    ten = torch.from_numpy(rng.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8))
    data = ten.repeat(5_000, 1, 1, 1)
    t = torch.full((2,), 0.999)
    # noise of the pixels' size, so that several of the ten share the posterior
    x_t = torch.from_numpy(3 * rng.standard_normal((2, 3, 32, 32), dtype=np.float32))
    start = time.perf_counter()
    found = EmpiricalFlow(data, Linear()).x0(x_t, t)
    seconds = time.perf_counter() - start
    images = ten.numpy().reshape(10, -1).astype(float)
    for i in range(2):
        distance = x_t[i].numpy().ravel() - (1 - t[i].item()) * images
        exponent = -(distance**2).sum(1) / (2 * t[i].item() ** 2)
        weights = np.exp(exponent - exponent.max())
        weights /= weights.sum()
        assert weights.max() < 0.9  # a posterior that is shared, not one image
        # float32 rounds the exponent, about 10^4, to 10^-3, and with it each weight
        assert np.abs(found[i].numpy().ravel() - weights @ images).max() < 0.01 * 255
    assert seconds < 30  # about 1 s on one idle core; a table [B, N, C, H, W] would not even fit
