"""How biased is each routing strategy? Measured with exact experts, against exact values.

Four shards of real digits with the exact expert of each and the exact router, so that nothing but
the strategy can be wrong. NUM trajectories run from noise to data; two things are measured:

    share     total variation 1/2 sum_k |share of cluster k among the samples - n_k / N|
    p chosen  sum_k w_k p(k | x_t, t), averaged over the steps: how sure the exact router is of what
              the strategy chose. Weights p, and a draw in proportion to p, make it sum_k p_k^2 in
              the mean; exact is the mean of that over x_t which really are noised data.

Sampling error: images are independent. Shares of NUM images are multinomial, and mean and deviation
of their total variation are those of 20,000 simulated multinomials. p chosen is a mean over images
on both sides, of deviation sqrt(var / NUM + var_exact / NUM). "Within" is four deviations, one in
16,000 for a Gaussian; seeds are fixed. A bias of Euler's 40 steps would have to stay inside that.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.ensemble import Ensemble
from ddm_min.objectives import FLOW
from ddm_min.partition import partition
from ddm_min.router import prior_router, select
from ddm_min.sampler import sample, start_noise
from ddm_min.schedule import Linear, add_noise

IMAGES, NUM, STEPS = 200, 600, 40
TIMES = torch.linspace(1, 0, STEPS + 1)[:-1].tolist()
RUNS = {  # name -> (strategy, router)
    "full": ("full", "exact"),
    "prior": ("coupled", "prior"),
    "sample-1": ("sample-1", "exact"),
    "coupled": ("coupled", "exact"),
    "top-1": ("top-1", "exact"),
}


class Remember:
    """A router that keeps its last answer, so that the exact one, which is slow, is asked once."""

    def __init__(self, router):
        self.router = router

    def __call__(self, x_t, t, labels):
        self.last = self.router(x_t, t, labels)
        return self.last


def trajectories(shards, strategy: str, router_name: str) -> SimpleNamespace:
    """x, p_chosen [NUM] and switches per image of one strategy."""
    exact = exact_router(shards, Linear())
    counts = torch.tensor([[len(shard)] for shard in shards])
    router = Remember(exact if router_name == "exact" else prior_router(counts, 0))
    experts = [
        SimpleNamespace(
            model=EmpiricalFlow(shard, Linear()).expert(FLOW), objective=FLOW, cluster=k,
            time_interval=(0.0, 1.0), stats=None,
        )
        for k, shard in enumerate(shards)
    ]  # fmt: skip
    seeds, labels = [(11, i) for i in range(NUM)], torch.zeros(NUM, dtype=torch.long)
    field = Ensemble(experts, router).field(labels, strategy, seeds=seeds)
    p_chosen = []

    def velocity(x_t, t):
        answer = field(x_t, t)
        weights = select(router.last, strategy, field.gumbel.to(x_t))
        posterior = router.last if router_name == "exact" else exact(x_t, t)
        p_chosen.append((weights * posterior.exp()).sum(1))
        return answer

    velocity.begin_step = field.begin_step
    x = sample(velocity, start_noise((1, 8, 8), seeds), STEPS)
    return SimpleNamespace(
        x=x, p_chosen=torch.stack(p_chosen).mean(0), switches=field.switches / NUM
    )


def exact_p_chosen(shards) -> torch.Tensor:
    """sum_k p_k^2 of noised data, averaged over the same times: [NUM]."""
    router, rng = exact_router(shards, Linear()), np.random.default_rng(5)
    x0 = torch.cat(shards)[torch.from_numpy(rng.integers(IMAGES, size=NUM))]
    total = torch.zeros(NUM)
    for level in TIMES:
        t = torch.full((NUM,), level)
        eps = torch.from_numpy(rng.standard_normal(x0.shape, dtype=np.float32))
        total += router(add_noise(x0, eps, t, Linear()), t).exp().square().sum(1) / STEPS
    return total


@pytest.fixture(scope="module")
def measured() -> SimpleNamespace:
    """tv, p (difference from exact, in deviations) and switches of each strategy; tv's error."""
    digits = data.load("digits")
    few = digits.subset(torch.from_numpy(np.random.default_rng(0).permutation(1797)[:IMAGES]))
    assignment = partition(few, 4, "pixels", None, 0).assignment
    shards = [data.to_float(few.images[assignment == k]) for k in range(4)]
    share = assignment.bincount(minlength=4).double().numpy() / IMAGES
    exact = exact_p_chosen(shards)

    drawn = np.random.default_rng(6).multinomial(NUM, share, size=20_000) / NUM
    chance = np.abs(drawn - share).sum(1) / 2
    result = SimpleNamespace(tv={}, p={}, switches={}, bound=chance.mean() + 4 * chance.std())
    print(f"total variation by chance {chance.mean():.4f} +- {chance.std():.4f}")
    for name, (strategy, router) in RUNS.items():
        run = trajectories(shards, strategy, router)
        nearest = torch.cdist(run.x.flatten(1), torch.cat(shards).flatten(1)).argmin(1)
        home = assignment.sort().values[nearest]
        found = home.bincount(minlength=4).double().numpy() / NUM
        result.tv[name] = np.abs(found - share).sum() / 2
        deviation = ((run.p_chosen.var() + exact.var()) / NUM).sqrt()
        result.p[name] = ((run.p_chosen.mean() - exact.mean()) / deviation).item()
        result.switches[name] = run.switches
        print(f"{name}: tv {result.tv[name]:.4f}, p chosen {run.p_chosen.mean():.4f} against "
              f"{exact.mean():.4f} ({result.p[name]:+.1f} deviations), {run.switches:.2f} switches",
              )  # fmt: skip
    return result


@pytest.mark.parametrize("name", ["full", "prior", "sample-1"])
def test_full_prior_and_sample_1_are_unbiased_within_sampling_error(measured, name):
    assert measured.tv[name] < measured.bound
    assert abs(measured.p[name]) < 4


def test_top_1_is_far_outside(measured):
    """It follows the arg-max also where the posterior is spread, and starves small clusters."""
    assert measured.tv["top-1"] > 2 * measured.bound
    assert measured.p["top-1"] > 20


def test_coupled_is_in_between(measured):
    """Shares as good as by chance; surer of its choice than it should be, far less than top-1."""
    assert measured.tv["coupled"] < measured.bound
    assert 0 < measured.p["coupled"] < measured.p["top-1"] / 3


def test_coupled_hardly_switches_the_prior_never_and_sample_1_all_the_time(measured):
    assert measured.switches["prior"] == 0
    assert 0 < measured.switches["coupled"] < 1
    assert measured.switches["sample-1"] > 5
