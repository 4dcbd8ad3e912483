"""A short real training: what networks learn is what `analytic.py` says there is to learn.

On held-out noise a router's cross-entropy lies above the exact router's, by the mean KL divergence
between the two, and an expert's squared error above the exact posterior's, by the mean squared
distance between the two velocities. Both gaps are measured as paired differences on the same draws,
so that they shrink towards zero and cannot fall below it by more than their sampling error.
"""

import numpy as np
import torch

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.dit import DiT, DiTConfig
from ddm_min.objectives import DDPM, FLOW, draw_times, loss
from ddm_min.router import LearnedRouter
from ddm_min.schedule import Linear, add_noise

CONFIG = DiTConfig(in_channels=1, image_size=(8, 8), patch_size=4, width=32, depth=1, heads=4)
NUM_HELD_OUT = 2048


def two_shards() -> list[torch.Tensor]:
    """Twelve zeros and twenty-four ones."""
    digits = data.load("digits")
    images = data.to_float(digits.images)
    return [images[digits.labels == 0][:12], images[digits.labels == 1][:24]]


def draw(shards, schedule, num: int, rng: np.random.Generator):
    """(x0, eps, t, cluster of x0): uniform over all images, as a router's training needs it."""
    images = torch.cat(shards)
    cluster = torch.cat([torch.full((len(shard),), k) for k, shard in enumerate(shards)])
    rows = torch.from_numpy(rng.integers(len(images), size=num))
    x0 = images[rows]
    eps = torch.from_numpy(rng.standard_normal(x0.shape, dtype=np.float32))
    return x0, eps, draw_times(num, schedule, (0.0, 1.0), rng), cluster[rows]


def train(network, batch_loss, steps: int, rng: np.random.Generator) -> None:
    """Adam with a rate that falls to zero; batch_loss(rng) -> losses [B]."""
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / steps)
        optimizer.zero_grad()
        batch_loss(rng).mean().backward()
        optimizer.step()


def mean_and_error(differences: torch.Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return differences.mean().item(), (differences.std() / len(differences) ** 0.5).item()


def test_router_approaches_the_exact_router_from_above():
    """DDM algorithm 1: cross-entropy starts at log 2 and falls to nearly the exact router's."""
    torch.manual_seed(0)
    shards, rng = two_shards(), np.random.default_rng(0)
    router = LearnedRouter(CONFIG, 2)

    def cross_entropy(log_probs, cluster):
        return -log_probs.gather(1, cluster[:, None])[:, 0]

    def batch_loss(rng):
        x0, eps, t, cluster = draw(shards, Linear(), 64, rng)
        x_t = add_noise(x0, eps, t, Linear())
        return cross_entropy(router(x_t, t, torch.zeros(64, dtype=torch.long)), cluster)

    x0, eps, t, cluster = draw(shards, Linear(), NUM_HELD_OUT, np.random.default_rng(1))
    x_t, labels = add_noise(x0, eps, t, Linear()), torch.zeros(NUM_HELD_OUT, dtype=torch.long)
    exact = cross_entropy(exact_router(shards, Linear())(x_t.double(), t.double()), cluster)

    @torch.no_grad()
    def gap():
        return mean_and_error(cross_entropy(router(x_t, t, labels), cluster) - exact)

    before, _ = gap()
    train(router, batch_loss, 250, rng)
    after, error = gap()
    print(f"router: exact {exact.mean():.4f}, gap {before:.4f} -> {after:.4f} +- {error:.4f}")
    assert abs(before + exact.mean().item() - np.log(2)) < 1e-6
    assert -3 * error < after < 0.15 * before


def test_expert_approaches_the_exact_posterior_from_above():
    """DDM eq. 6: an expert's error falls to near the exact velocity's; eps and velocity alike."""
    shard = two_shards()[1]
    for objective in (FLOW, DDPM):
        torch.manual_seed(0)
        expert, rng = DiT(CONFIG), np.random.default_rng(0)
        exact_expert = EmpiricalFlow(shard, objective.schedule).expert(objective)

        def batch_loss(rng, expert=expert, objective=objective):
            x0, eps, t, _ = draw([shard], objective.schedule, 64, rng)
            return loss(expert, x0, eps, t, torch.zeros(64, dtype=torch.long), objective)

        x0, eps, t, _ = draw([shard], objective.schedule, NUM_HELD_OUT, np.random.default_rng(1))
        labels = torch.zeros(NUM_HELD_OUT, dtype=torch.long)
        exact = loss(exact_expert, x0.double(), eps.double(), t.double(), labels, objective)

        with torch.no_grad():
            before, _ = mean_and_error(loss(expert, x0, eps, t, labels, objective) - exact)
        train(expert, batch_loss, 250, rng)
        with torch.no_grad():
            after, error = mean_and_error(loss(expert, x0, eps, t, labels, objective) - exact)
        print(
            f"{objective.prediction}: exact {exact.mean():.4f}, gap {before:.4f} -> "
            f"{after:.4f} +- {error:.4f}"
        )
        assert -3 * error < after < 0.25 * before
