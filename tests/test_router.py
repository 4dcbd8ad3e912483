"""Strategies against brute force, routers and shard statistics against numpy and torch."""

import math

import numpy as np
import pytest
import torch

from ddm_min.dit import DiTConfig
from ddm_min.router import (
    LearnedRouter,
    ShardStats,
    assigned_router,
    gaussian_router,
    parse_strategy,
    prior_router,
    select,
)
from ddm_min.schedule import Cosine, Linear

# ---------------------------------------------------------------- strategies


def random_rows(batch: int = 200, k: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """log_probs with some clusters that cannot answer (-inf), and standard Gumbel noise."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((batch, k))
    absent = rng.random((batch, k)) < 0.3
    absent[np.arange(batch), rng.integers(k, size=batch)] = False  # at least one is there
    logits[absent] = -np.inf
    log_probs = torch.from_numpy(logits).log_softmax(1)
    return log_probs, torch.from_numpy(rng.gumbel(size=(batch, k)))


def by_hand(log_probs: list[float], strategy: str, gumbel: list[float]) -> list[float]:
    """The definition of each strategy for one image, in plain Python."""
    name, _, number = strategy.partition("-")
    probs = [math.exp(x) for x in log_probs]
    k = len(probs)
    falling = sorted(range(k), key=lambda i: -probs[i])
    if name == "full":
        return probs
    if name == "coupled":
        best = max(range(k), key=lambda i: log_probs[i] + gumbel[i])
        return [float(i == best) for i in range(k)]
    if name == "sample":
        count, _, temperature = number.partition("@")
        score = [x / float(temperature or 1) + g for x, g in zip(log_probs, gumbel, strict=True)]
        possible = [i for i in range(k) if probs[i] > 0]
        chosen = sorted(possible, key=lambda i: -score[i])[: int(count)]
        return [(i in chosen) / len(chosen) for i in range(k)]
    if name == "top":
        kept = falling[: int(number)]
    if name == "threshold":
        kept = [i for i in range(k) if probs[i] >= float(number)] or falling[:1]
    if name == "nucleus":
        kept, mass = [], 0.0
        for i in falling:
            kept.append(i)
            mass += probs[i]
            if mass >= float(number):
                break
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(k)]


STRATEGIES = [
    *("full", "coupled", "top-1", "top-2", "top-6"),
    *("threshold-0.1", "threshold-0.3", "threshold-0.9"),
    *("nucleus-0.3", "nucleus-0.8", "nucleus-0.99"),
    *("sample-1", "sample-3", "sample-6", "sample-2@0.5", "sample-2@3"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_is_its_definition(strategy):
    log_probs, gumbel = random_rows()
    weights = select(log_probs, strategy, gumbel)
    expected = [
        by_hand(row, strategy, noise)
        for row, noise in zip(log_probs.tolist(), gumbel.tolist(), strict=True)
    ]
    assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_sum_to_one_and_absent_experts_get_nothing(strategy, dtype):
    log_probs, gumbel = random_rows(seed=1)
    weights = select(log_probs.to(dtype), strategy, gumbel.to(dtype))
    assert weights.dtype == dtype
    assert (weights >= 0).all()
    assert (weights[log_probs.isinf()] == 0).all()
    # K = 6 roundings
    assert torch.allclose(weights.sum(1), torch.ones(len(weights), dtype=dtype), atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lone_possible_expert_gets_everything(strategy):
    log_probs = torch.full((1, 6), -torch.inf)
    log_probs[0, 4] = 0
    gumbel = torch.tensor([[9.0, 9, 9, 9, -9, 9]])
    assert select(log_probs, strategy, gumbel).tolist() == [[0, 0, 0, 0, 1, 0]]


def test_top_k_of_all_is_full():
    log_probs, gumbel = random_rows()
    full = select(log_probs, "full", gumbel)
    assert torch.allclose(select(log_probs, "top-6", gumbel), full, atol=1e-12)
    assert torch.allclose(select(log_probs, "top-99", gumbel), full, atol=1e-12)


def test_ties_keep_exactly_k():
    log_probs = torch.zeros(3, 5).log_softmax(1)
    weights = select(log_probs, "top-2", torch.zeros(3, 5))
    assert ((weights > 0).sum(1) == 2).all()


def test_coupled_draws_each_cluster_in_proportion_to_its_probability():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    num = 20_000
    gumbel = torch.from_numpy(np.random.default_rng(2).gumbel(size=(num, 4)))
    share = select(probs.log().expand(num, 4), "coupled", gumbel).mean(0)
    assert ((share - probs).abs() < 5 * (probs * (1 - probs) / num).sqrt()).all()  # 5 sigma


def inclusion(probs: np.ndarray) -> np.ndarray:
    """Chance of being among the first two drawn without replacement."""
    return np.array(
        [
            p + sum(q * p / (1 - q) for j, q in enumerate(probs) if j != i)
            for i, p in enumerate(probs)
        ]
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sample_n_draws_without_replacement_at_the_temperature(temperature):
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    num = 20_000
    gumbel = torch.from_numpy(np.random.default_rng(3).gumbel(size=(num, 4)))
    log_probs = torch.from_numpy(probs).log().expand(num, 4)
    tempered = probs ** (1 / temperature) / (probs ** (1 / temperature)).sum()
    for count, expected in ((1, tempered), (2, inclusion(tempered))):
        weights = select(log_probs, f"sample-{count}@{temperature:g}", gumbel)
        share = (weights > 0).double().mean(0).numpy()
        sigma = np.sqrt(expected * (1 - expected) / num)
        assert (np.abs(share - expected) < 5 * sigma).all(), (count, share, expected)
        assert torch.equal(weights.max(1).values, torch.full((num,), 1 / count).double())


def test_a_hot_sample_may_choose_a_cluster_whose_probability_underflows():
    """exp(-200) is 0 in float32, but at temperature 1000 the choice is nearly a fair coin."""
    log_probs = torch.tensor([[0.0, -200.0]])
    weights = select(log_probs, "sample-1@1000", torch.tensor([[0.0, 1.0]]))
    assert weights.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("strategy", "parsed"),
    [
        ("full", ("full", 0, 1)),
        ("coupled", ("coupled", 0, 1)),
        ("top-2", ("top", 2, 1)),
        ("threshold-0.25", ("threshold", 0.25, 1)),
        ("nucleus-0.9", ("nucleus", 0.9, 1)),
        ("sample-1", ("sample", 1, 1)),
        ("sample-3@0.5", ("sample", 3, 0.5)),
    ],
)
def test_strategies_are_parsed(strategy, parsed):
    assert parse_strategy(strategy) == parsed


@pytest.mark.parametrize(
    "strategy",
    [
        *("", "best", "Full", "full-1", "coupled-2"),
        *("top", "top-", "top 2", "top-0", "top-1.5", "top--1", "top-x", "top-2@1"),
        *("top-inf", "top-nan", "top-1e999"),
        *("threshold", "threshold-0", "threshold-1", "threshold-1.5", "threshold-0.5@2"),
        *("nucleus", "nucleus-0", "nucleus-1", "nucleus-0.5@2"),
        *("sample", "sample-0", "sample-0.5", "sample-1@0", "sample-1@-1", "sample-1@x"),
        *("sample-1@inf", "sample-1@nan", "sample-inf"),
    ],
)
def test_unknown_strategies_are_refused_with_the_valid_ones(strategy):
    with pytest.raises(ValueError, match="use full, coupled, top-K") as error:
        parse_strategy(strategy)
    assert repr(strategy) in str(error.value)


# ---------------------------------------------------------------- routers


def queries(batch: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t [B, 2, 3, 4] and t, float64."""
    rng = np.random.default_rng(seed)
    x_t = torch.from_numpy(rng.standard_normal((batch, 2, 3, 4)))
    return x_t, torch.from_numpy(rng.uniform(0.05, 1.0, batch))


def test_prior_router_is_the_share_of_images():
    counts = torch.tensor([[6, 0, 2], [3, 5, 0]])  # 2 clusters, 3 classes; label 3 is the null
    x_t, t = queries(batch=4)
    log_probs = prior_router(counts, 3)(x_t, t, torch.tensor([0, 1, 2, 3]))
    expected = torch.tensor([[6 / 9, 3 / 9], [0, 1], [1, 0], [8 / 16, 8 / 16]])
    assert torch.allclose(log_probs.exp(), expected.double())
    assert log_probs[1, 0] == -torch.inf


def test_prior_router_does_not_look_at_the_image():
    counts = torch.tensor([[6], [3], [1]])
    labels = torch.zeros(9, dtype=torch.long)
    (x_a, t_a), (x_b, t_b) = queries(seed=0), queries(seed=1)
    router = prior_router(counts, 0)
    assert torch.equal(router(x_a, t_a, labels), router(x_b, t_b, labels))
    assert torch.allclose(router(x_a, t_a, labels).exp()[0], torch.tensor([0.6, 0.3, 0.1]).double())


def random_stats(
    rank: int, counts: list[int], seed: int, dims: int = 24, rest: float = 0.05
) -> ShardStats:
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((dims, rank)))
    return ShardStats(
        counts=torch.tensor(counts),
        means=torch.from_numpy(rng.standard_normal((len(counts), dims))),
        basis=torch.from_numpy(basis),
        variances=torch.from_numpy(rng.uniform(0.1, 2.0, rank)),
        rest=torch.tensor(0.0 if rank == dims else rest, dtype=torch.float64),
        value_range=torch.tensor([-1.0, 1.0]),
    )


def covariance(stats: ShardStats) -> torch.Tensor:
    """The dense matrix that basis, variances and rest stand for."""
    inside = stats.basis @ stats.basis.T
    low_rank = stats.basis @ torch.diag(stats.variances) @ stats.basis.T
    return low_rank + stats.rest * (torch.eye(len(inside), dtype=inside.dtype) - inside)


@pytest.mark.parametrize("ranks", [(24, 24), (5, 3)], ids=["full rank", "low rank"])
@pytest.mark.parametrize("path", [Linear(), Cosine()])
def test_gaussian_router_is_the_posterior_of_dense_gaussians(ranks, path):
    shards = [
        random_stats(ranks[0], [4, 0, 7], seed=1),
        # Another rank and another rest, or an error in the determinant would cancel.
        random_stats(ranks[1], [2, 9, 1], seed=2, rest=0.2),
    ]
    x_t, t = queries(batch=8)
    labels = torch.tensor([0, 1, 2, 3] * 2)
    log_joint = torch.full((8, 2), -torch.inf, dtype=torch.float64)
    for i in range(8):
        alpha, sigma = path.alpha(t[i]), path.sigma(t[i])
        for k, stats in enumerate(shards):
            noisy = alpha**2 * covariance(stats) + sigma**2 * torch.eye(24, dtype=torch.float64)
            for y in range(3):
                if labels[i] in (y, 3):
                    normal = torch.distributions.MultivariateNormal(alpha * stats.means[y], noisy)
                    term = normal.log_prob(x_t[i].flatten()) + math.log(stats.counts[y] or 1e-300)
                    log_joint[i, k] = torch.logaddexp(log_joint[i, k], term)
    expected = log_joint.softmax(1)
    found = gaussian_router(shards, 3, path)(x_t, t, labels).exp()
    assert torch.allclose(found, expected, atol=1e-10)
    assert expected.min(1).values.max() > 0.01  # some rows are no foregone conclusions


def test_gaussian_router_at_pure_noise_is_the_prior():
    shards = [random_stats(24, [4, 2], seed=1), random_stats(24, [1, 9], seed=2)]
    x_t, _ = queries(batch=3)
    one, labels = torch.ones(3, dtype=torch.float64), torch.tensor([0, 1, 2])
    counts = torch.stack([stats.counts for stats in shards])
    found = gaussian_router(shards, 2)(x_t, one, labels)
    assert torch.allclose(found, prior_router(counts, 2)(x_t, one, labels))


def test_gaussian_router_leaves_absent_shards_out():
    stats = random_stats(5, [3], seed=1)
    x_t, t = queries()
    log_probs = gaussian_router([None, stats, None], 0)(x_t, t, torch.zeros(9, dtype=torch.long))
    assert torch.allclose(log_probs.exp(), torch.tensor([0.0, 1, 0]).double().expand(9, 3))


def small_router() -> LearnedRouter:
    config = DiTConfig(2, (4, 6), num_classes=3, patch_size=2, width=16, depth=2, heads=2)
    return LearnedRouter(config, num_clusters=5)


def test_learned_router_starts_uniform():
    x_t, t = torch.randn(7, 2, 4, 6), torch.rand(7)
    log_probs = small_router()(x_t, t, torch.arange(7) % 4)
    assert torch.allclose(log_probs, torch.full((7, 5), -math.log(5)))


def test_learned_router_gives_log_probs_that_depend_on_everything():
    router = small_router()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x_t = torch.randn(7, 2, 4, 6, generator=generator)
    t, labels = torch.rand(7, generator=generator), torch.arange(7) % 4
    log_probs = router(x_t, t, labels)
    assert log_probs.shape == (7, 5)
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(7))
    for other in ((-x_t, t, labels), (x_t, 1 - t, labels), (x_t, t, (labels + 1) % 4)):
        assert not torch.allclose(router(*other), log_probs, atol=1e-3)


def test_learned_router_conditions_its_joint_by_bayes():
    """With a label: its column of p(k, y), renormalised. The null label: the sum over columns."""
    router, generator = small_router(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x_t, t = torch.randn(8, 2, 4, 6, generator=generator), torch.rand(8, generator=generator)
    joint = router(x_t, t).exp()
    assert joint.shape == (8, 5, 3)
    torch.testing.assert_close(joint.sum((1, 2)), torch.ones(8))
    for label in range(3):
        column = joint[:, :, label]
        wanted = column / column.sum(1, keepdim=True)
        found = router(x_t, t, torch.full((8,), label)).exp()
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(router(x_t, t, torch.full((8,), 3)).exp(), joint.sum(2))


# ---------------------------------------------------------------- statistics of a shard


def shard(num: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 2, 3, 2] with correlated pixels; class 1 has no image and class 3 a single one."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((12, 12)) * np.linspace(1, 0.05, 12)
    images = torch.from_numpy(rng.standard_normal((num, 12)) @ mixing.T).float()
    labels = torch.from_numpy(rng.choice([0, 2], size=num))
    labels[17] = 3
    return images.reshape(num, 2, 3, 2), labels


def pooled(images: torch.Tensor, labels: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Class means (0 for a class without images) and the pooled within-class covariance."""
    flat, labels = images.flatten(1).double().numpy(), labels.numpy()
    means = np.stack([flat[labels == y].mean(0) if (labels == y).any() else 0 * flat[0]
                      for y in range(4)])  # fmt: skip
    within = flat - means[labels]
    return means, within.T @ within / len(flat)


def test_shard_statistics_are_those_of_numpy():
    images, labels = shard()
    stats = ShardStats.measure(images, labels, 4)
    means, expected = pooled(images, labels)
    assert stats.counts.tolist() == [int((labels == y).sum()) for y in range(4)]
    assert np.abs(stats.means.numpy() - means).max() < 1e-5  # float32 sums of 60 values of order 1
    assert np.abs(covariance(stats).numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    low, high = stats.value_range.tolist()
    assert (low, high) == (images.min().item(), images.max().item())
    assert torch.allclose(stats.basis.T @ stats.basis, torch.eye(12), atol=1e-5)


def test_single_image_class_has_that_image_as_mean_and_an_absent_class_zeros():
    images, labels = shard()
    stats = ShardStats.measure(images, labels, 4)
    assert stats.counts[1] == 0
    assert stats.counts[3] == 1
    assert torch.equal(stats.means[1], torch.zeros(12))
    assert torch.allclose(stats.means[3], images[17].flatten())


def test_low_rank_keeps_the_largest_variances_and_the_trace():
    images, labels = shard()
    stats = ShardStats.measure(images, labels, 4, rank=3)
    _, full = pooled(images, labels)
    largest = np.linalg.eigvalsh(full)[::-1][:3]
    assert stats.basis.shape == (12, 3)
    # randomised SVD with 4 power iterations: errors of (lambda_4 / lambda_3)^9, well below 1 %
    assert np.allclose(stats.variances.numpy(), largest, rtol=0.01)
    rest = (np.trace(full) - stats.variances.sum().item()) / 9
    assert stats.rest.item() == pytest.approx(rest, rel=1e-4)
    assert covariance(stats).trace().item() == pytest.approx(np.trace(full), rel=1e-5)


def test_fewer_images_than_pixels_give_a_covariance_of_that_rank():
    images, _ = shard(num=20)
    few = ShardStats.measure(images[:4], torch.zeros(4, dtype=torch.long), 0)
    flat = images[:4].flatten(1).double().numpy()
    expected = np.cov(flat.T, bias=True)
    assert few.counts.tolist() == [4]
    assert np.abs(covariance(few).numpy() - expected).max() < 1e-5 * np.abs(expected).max()


def test_measuring_is_repeatable_and_leaves_the_global_generator_alone():
    images, labels = shard()
    before = torch.get_rng_state()
    first = ShardStats.measure(images, labels, 4, rank=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(ShardStats.measure(images, labels, 4, rank=3).basis, first.basis)


def test_mean_image_of_labels_of_the_null_label_and_of_an_absent_class():
    images, labels = shard()
    stats = ShardStats.measure(images, labels, 4)
    found = stats.mean_image(torch.tensor([2, 4, 1]), null_label=4)
    assert torch.allclose(found[0], images[labels == 2].flatten(1).mean(0), atol=1e-5)
    assert torch.allclose(found[1], images.flatten(1).mean(0), atol=1e-5)
    assert torch.equal(found[2], torch.zeros(12))


def test_mean_image_without_classes_is_the_mean_of_the_shard():
    images, _ = shard()
    stats = ShardStats.measure(images, torch.zeros(60, dtype=torch.long), 0)
    found = stats.mean_image(torch.zeros(2, dtype=torch.long), null_label=0)
    assert torch.allclose(found, images.flatten(1).mean(0).expand(2, 12), atol=1e-5)


def test_threshold_keeps_what_equals_it_and_nucleus_stops_where_it_is_reached():
    """Probabilities of 1/2, 1/4, 1/4 are exact in binary, and so are their logarithms' inverses."""
    log_probs = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    assert log_probs.exp().tolist() == [[0.5, 0.25, 0.25]]
    gumbel = torch.zeros_like(log_probs)
    assert select(log_probs, "threshold-0.25", gumbel).tolist() == [[0.5, 0.25, 0.25]]
    assert select(log_probs, "nucleus-0.5", gumbel).tolist() == [[1.0, 0.0, 0.0]]


def test_prior_of_a_single_image_is_certain_and_of_an_unknown_class_impossible():
    router = prior_router(torch.tensor([[1, 0], [0, 0]]), 2)
    x_t, t = queries(batch=2)
    log_probs = router(x_t, t, torch.tensor([0, 1]))
    assert log_probs.tolist() == [[0.0, -math.inf], [-math.inf, -math.inf]]


def test_mean_image_of_a_single_image_is_that_image():
    image = torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4)
    stats = ShardStats.measure(image, torch.tensor([0]), 2)
    assert torch.equal(stats.mean_image(torch.tensor([0]), 2)[0], image.flatten())


def test_rest_of_a_single_left_direction_is_its_variance():
    """Rank D - 1 leaves one direction: rest is all of its variance, so the trace is kept."""
    scale = np.array([9.0, 8, 7, 6, 5, 1]).reshape(1, 2, 3)  # a gap, so that the SVD is exact
    images = np.random.default_rng(0).standard_normal((50, 1, 2, 3)) * scale
    images = torch.from_numpy(images).float()
    stats = ShardStats.measure(images, torch.zeros(50, dtype=torch.long), 1, rank=5)
    flat = images.flatten(1).double()
    smallest = np.linalg.eigvalsh(np.cov(flat.T.numpy(), bias=True))[0]
    assert math.isclose(stats.rest, smallest, rel_tol=1e-3)  # a difference of float32 sums


def test_assigned_router_puts_all_mass_on_the_given_cluster():
    clusters = torch.tensor([2, 0, 2, 1])
    x_t = torch.zeros(4, 1, 2, 2, dtype=torch.float64)
    log_probs = assigned_router(clusters, 4)(x_t, torch.rand(4), clusters)
    assert log_probs.dtype == torch.float64
    assert torch.equal(log_probs.exp(), torch.eye(4, dtype=torch.float64)[clusters])
    for strategy in ("full", "top-1", "coupled", "sample-1"):
        weights = select(log_probs, strategy, torch.full((4, 4), 9.0) * torch.eye(4))
        assert torch.equal(weights.argmax(1), clusters)
        assert torch.equal(weights, torch.eye(4, dtype=torch.float64)[clusters])
