"""The mixture: who answers where, how often experts run, guidance, routing noise, theorem."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.ensemble import Ensemble, gaps_and_overlaps
from ddm_min.objectives import DDPM, FLOW, Objective
from ddm_min.router import ShardStats, prior_router
from ddm_min.sampler import sample, start_noise
from ddm_min.schedule import Betas, Cosine, Linear

SHAPE = (2, 3, 4)  # C, H, W


class Stub:
    """An expert that answers with a constant, or a function, and remembers its calls."""

    def __init__(self, answer=0.0, cluster="all", time_interval=(0.0, 1.0)):
        self.answer, self.cluster, self.time_interval = answer, cluster, time_interval
        self.objective, self.stats = FLOW, None
        self.rows, self.labels = [], []

    def model(self, x_t, t, labels):
        self.rows.append(len(x_t))
        self.labels.append(labels)
        if callable(self.answer):
            return self.answer(x_t, t, labels)
        return torch.full_like(x_t, self.answer)


def uniform(num_clusters: int):
    return fixed([1 / num_clusters] * num_clusters)


def fixed(probs: list[float]):
    """A router that always says the same."""

    def log_probs(x_t, t, labels):
        return torch.tensor(probs, dtype=x_t.dtype).log().expand(len(x_t), len(probs))

    return log_probs


def noise(batch: int, dtype=torch.float32) -> torch.Tensor:
    return start_noise(SHAPE, [(3, i) for i in range(batch)]).to(dtype)


def null(batch: int) -> torch.Tensor:
    """Labels of an unconditional ensemble."""
    return torch.zeros(batch, dtype=torch.long)


def at(t: float, batch: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full((batch,), t, dtype=dtype)


# ---------------------------------------------------------------- who answers


def spans(*pairs):
    return [SimpleNamespace(cluster=k, time_interval=interval) for k, interval in pairs]


def test_a_complete_grid_has_no_gap_and_no_overlap():
    experts = spans((0, (0, 0.4)), (0, (0.4, 1)), (1, (0, 1)))
    assert gaps_and_overlaps(experts, [0, 1]) == ([], [])
    assert gaps_and_overlaps(spans(("all", (0, 0.5)), ("all", (0.5, 1))), [0, 1, 2]) == ([], [])


def test_gaps_are_listed_by_cluster_and_time():
    experts = spans((0, (0.2, 0.4)), (0, (0.5, 0.9)), (2, (0, 1)))
    gaps, overlaps = gaps_and_overlaps(experts, [0, 1, 2])
    assert gaps == [
        "cluster 0 at t from 0 to 0.2",
        "cluster 0 at t from 0.4 to 0.5",
        "cluster 0 at t from 0.9 to 1",
        "cluster 1 at t from 0 to 1",
    ]
    assert overlaps == []


def test_overlaps_are_listed_by_cluster_and_time():
    experts = spans((0, (0, 0.6)), (0, (0.5, 1)), ("all", (0.9, 1)), (1, (0, 0.9)))
    gaps, overlaps = gaps_and_overlaps(experts, [0, 1])
    assert gaps == []
    assert overlaps == ["cluster 0 at t from 0.5 to 0.6", "cluster 0 at t from 0.9 to 1"]


def test_an_interval_inside_another_is_an_overlap():
    _, overlaps = gaps_and_overlaps(spans((0, (0, 1)), (0, (0.2, 0.3))), [0])
    assert overlaps == ["cluster 0 at t from 0.2 to 0.3"]


def test_two_experts_for_one_cluster_and_time_are_refused():
    with pytest.raises(ValueError, match=r"more than one expert .* cluster 1 at t from 0 to 1"):
        Ensemble([Stub(cluster=0), Stub(cluster=1), Stub(cluster=1)], uniform(2))


def test_a_missing_expert_is_refused_by_name():
    with pytest.raises(ValueError, match="no expert answers for cluster 1 at t from 0 to 1"):
        Ensemble([Stub(cluster=0), Stub(cluster=2)], uniform(3))


def test_a_cluster_without_images_is_not_missed():
    counts = torch.tensor([[4], [0], [2]])
    ensemble = Ensemble([Stub(1.0, 0), Stub(3.0, 2)], fixed([0.25, 0.5, 0.25]), counts=counts)
    velocity = ensemble.field(null(5), "full")(noise(5), at(0.5, 5))
    assert torch.allclose(velocity, torch.tensor(2.0))  # (1 + 3) / 2, nothing for cluster 1


def test_intervals_are_half_open_so_that_a_boundary_has_one_owner():
    early, late = Stub(1.0, time_interval=(0.0, 0.25)), Stub(2.0, time_interval=(0.25, 1.0))
    ensemble = Ensemble([late, early], uniform(1))
    t = torch.tensor([0.0, 0.1, 0.25, 0.2500001, 0.7, 1.0])
    assert ensemble.answers(t)[:, :, 0].int().tolist() == [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    velocity = ensemble.field(null(6), "full")(noise(6), t)
    # float32: the conversion multiplies by alpha and sigma and adds up again
    assert torch.allclose(velocity[:, 0, 0, 0], torch.tensor([1.0, 1, 1, 2, 2, 2]), atol=1e-5)


def test_allow_missing_gives_the_missing_share_to_the_others():
    experts = [Stub(1.0, 0), Stub(4.0, 2)]
    ensemble = Ensemble(experts, fixed([0.2, 0.5, 0.3]), allow_missing=True)
    velocity = ensemble.field(null(5), "full")(noise(5), at(0.5, 5))
    assert torch.allclose(velocity, torch.tensor(0.4 * 1 + 0.6 * 4))  # .2 and .3, renormalised


def test_allow_missing_cannot_help_where_nobody_answers_at_some_time():
    """Otherwise every weight is 0 / 0 there, and sampling dies in the middle."""
    experts = [Stub(1.0, time_interval=(0.0, 0.4)), Stub(1.0, time_interval=(0.6, 1.0))]
    ensemble = Ensemble(experts, uniform(1), allow_missing=True)
    with pytest.raises(ValueError, match="no expert"):
        ensemble.field(null(2), "full")


def test_allow_missing_without_counts_names_the_trouble_at_pure_noise():
    ensemble = Ensemble([Stub(time_interval=(0.0, 0.4))], uniform(1), allow_missing=True)
    with pytest.raises(ValueError, match="no expert"):
        ensemble.field(null(2), "full")


# ---------------------------------------------------------------- labels


COUNTS = torch.tensor([[5, 5, 0, 0], [0, 5, 5, 0], [0, 0, 1, 0]])  # 3 clusters, 4 classes


def test_a_label_only_goes_to_clusters_that_know_it():
    experts = [Stub(float(k + 1), k) for k in range(3)]
    ensemble = Ensemble(experts, fixed([0.5, 0.3, 0.2]), counts=COUNTS, num_classes=4)
    labels = torch.tensor([0, 1, 2, 4])  # 4 is the null label: it draws from all
    log_probs = ensemble.log_probs(noise(4), at(0.5, 4), labels)
    expected = torch.tensor([[1, 0, 0], [5 / 8, 3 / 8, 0], [0, 3 / 5, 2 / 5], [0.5, 0.3, 0.2]])
    assert torch.allclose(log_probs.exp(), expected)
    for strategy in ("full", "top-3", "coupled", "sample-2", "nucleus-0.9", "threshold-0.01"):
        field = ensemble.field(labels, strategy)
        velocity = field(noise(4), at(0.5, 4))
        assert torch.allclose(velocity[0], torch.tensor(1.0)), strategy  # only cluster 0 knows it
        assert (velocity[2] > 1.99).all(), strategy  # only clusters 1 and 2


def test_a_class_that_only_a_missing_expert_knows_is_refused_by_name():
    ensemble = Ensemble(
        [Stub(cluster=1), Stub(cluster=2)], uniform(3),
        counts=COUNTS, num_classes=4, allow_missing=True,
    )  # fmt: skip
    ensemble.field(torch.tensor([1, 2, 4]), "full")  # known to cluster 1, or to anyone
    with pytest.raises(ValueError, match=r"class 0 at t = 1: it lives in cluster \[0\]"):
        ensemble.field(torch.tensor([1, 0]), "full")


def test_a_class_without_any_image_is_refused():
    ensemble = Ensemble([Stub()], uniform(3), counts=COUNTS, num_classes=4, num_clusters=3)
    with pytest.raises(ValueError, match="class 3: no cluster has images of it"):
        ensemble.field(torch.tensor([3]), "full")


def test_an_unknown_strategy_is_refused_before_anything_runs():
    expert = Stub()
    with pytest.raises(ValueError, match="unknown strategy 'best'"):
        Ensemble([expert], uniform(1)).field(null(1), "best")
    assert expert.rows == []


# ---------------------------------------------------------------- cost


def test_clusters_that_share_an_expert_run_it_once():
    everyone = Stub(3.0)
    ensemble = Ensemble([everyone], uniform(4), num_clusters=4)
    field = ensemble.field(null(5), "full")
    assert torch.allclose(field(noise(5), at(0.5, 5)), torch.tensor(3.0))
    assert everyone.rows == [5]
    assert field.forwards == 5


def test_each_expert_sees_only_the_rows_that_chose_it():
    experts = [Stub(float(k), k) for k in range(3)]
    ensemble = Ensemble(experts, uniform(3))
    field = ensemble.field(null(12), "coupled", seeds=[(1, i) for i in range(12)])
    velocity = field(noise(12), at(0.5, 12))
    chosen = velocity[:, 0, 0, 0].round().long()
    assert torch.allclose(velocity, chosen[:, None, None, None].expand(-1, *SHAPE).float())
    assert [e.rows for e in experts] == [[n] for n in chosen.bincount(minlength=3).tolist()]
    assert field.forwards == 12
    assert len(chosen.unique()) == 3  # the noise differs from image to image


def test_an_expert_that_nobody_chose_does_not_run():
    experts = [Stub(1.0, 0), Stub(2.0, 1)]
    field = Ensemble(experts, fixed([0.9, 0.1])).field(null(5), "top-1")
    field(noise(5), at(0.5, 5))
    assert experts[1].rows == []
    assert field.forwards == 5


def test_forwards_count_every_expert_call_and_guided_rows_twice():
    experts = [Stub(1.0, 0), Stub(2.0, 1)]
    ensemble = Ensemble(experts, uniform(2), num_classes=4)
    plain = ensemble.field(torch.tensor([0, 1, 2]), "full")
    guided = ensemble.field(torch.tensor([0, 1, 2]), "full", guidance_scale=2.0)
    for field in (plain, guided):
        field(noise(3), at(0.9, 3))
        field(noise(3), at(0.5, 3))
    assert plain.forwards == 2 * 2 * 3
    assert guided.forwards == 2 * 2 * 2 * 3


def test_switches_count_changes_of_the_main_cluster():
    def router(x_t, t, labels):  # image 0 stays with cluster 0, image 1 moves to 1 below t = .5
        first = torch.where((labels == 1) & (t < 0.5), 0.1, 0.9)
        return torch.stack([first, 1 - first], dim=1).log()

    ensemble = Ensemble([Stub(cluster=0), Stub(cluster=1)], router, num_classes=2)
    field = ensemble.field(torch.tensor([0, 1]), "full")
    counted = []
    for t in (1.0, 0.8, 0.4, 0.2, 0.7):
        field(noise(2), at(t, 2))
        counted.append(field.switches)
    assert counted == [0, 0, 1, 1, 2]


# ---------------------------------------------------------------- the mixture itself


def tiny_data(num: int = 12) -> torch.Tensor:
    """Images [N, 2, 3, 4] in float64, in two loose groups."""
    generator = torch.Generator().manual_seed(5)
    images = 0.4 * torch.randn(num, *SHAPE, generator=generator, dtype=torch.float64)
    images[num // 3 :] += 0.3
    return images


def as_expert(shard, objective, cluster="all", time_interval=(0.0, 1.0)):
    """A perfect expert for a shard."""
    return SimpleNamespace(
        model=EmpiricalFlow(shard, Linear()).expert(objective), objective=objective,
        cluster=cluster, time_interval=time_interval, stats=None,
    )  # fmt: skip


def test_one_expert_is_its_own_ensemble():
    data = tiny_data()
    flow = EmpiricalFlow(data, Linear())
    x_t, t = noise(6, torch.float64), torch.linspace(0.05, 1.0, 6, dtype=torch.float64)
    for strategy in ("full", "coupled", "top-1", "sample-1"):
        field = Ensemble([as_expert(data, FLOW)], uniform(1)).field(null(6), strategy)
        # the conversion solves for x0 and eps and adds them up again: a few roundings
        assert torch.allclose(field(x_t, t), flow.velocity(x_t, t), atol=1e-12)


def test_permuting_experts_changes_nothing():
    experts = [Stub(lambda x, t, y, k=k: (k + 1) * x, k) for k in range(4)]
    x_t, t = noise(7), at(0.6, 7)
    for strategy in ("full", "top-2", "coupled", "sample-2"):
        forward = Ensemble(experts, fixed([0.1, 0.2, 0.3, 0.4])).field(null(7), strategy)(x_t, t)
        mixed = [experts[i] for i in (2, 0, 3, 1)]
        permuted = Ensemble(mixed, fixed([0.1, 0.2, 0.3, 0.4])).field(null(7), strategy)(x_t, t)
        assert torch.allclose(forward, permuted, atol=1e-5)  # sums of 4 in another order


GRID = [  # DDM x MDM: 2 clusters x 2 time intervals, four objectives on three schedules
    (0, (0.0, 0.4), FLOW),
    (0, (0.4, 1.0), DDPM),
    (1, (0.0, 0.7), Objective("v", Cosine())),
    (1, (0.7, 1.0), Objective("x0", Betas.ddpm())),
]


def test_a_grid_of_clusters_and_intervals_is_the_marginal_flow():
    data = tiny_data()
    shards = [data[:4], data[4:]]
    experts = [as_expert(shards[k], objective, k, times) for k, times, objective in GRID]
    ensemble = Ensemble(experts, exact_router(shards, Linear()))
    t = torch.tensor([0.02, 0.3, 0.4, 0.55, 0.7, 0.71, 0.95, 0.99], dtype=torch.float64)
    x_t = noise(8, torch.float64)
    velocity = ensemble.field(null(8), "full")(x_t, t)
    expected = EmpiricalFlow(data, Linear()).velocity(x_t, t)
    # float64, amplified by at most 1 / alpha = 100 and 1 / sigma = 50
    assert torch.allclose(velocity, expected, atol=1e-10)
    naive = Ensemble(experts, exact_router(shards, Linear()), align=False)
    assert not torch.allclose(naive.field(null(8), "full")(x_t, t), expected, atol=0.1)


def test_same_noise_gives_the_monoliths_picture():
    data = tiny_data()
    shards = [data[:4], data[4:]]
    experts = [as_expert(shards[k], objective, k, times) for k, times, objective in GRID]
    field = Ensemble(experts, exact_router(shards, Linear())).field(null(5), "full")
    start = noise(5, torch.float64)
    ours = sample(field, start, 20, t_start=0.99)
    assert torch.allclose(
        ours, sample(EmpiricalFlow(data, Linear()).velocity, start, 20, t_start=0.99), atol=1e-8
    )


# ---------------------------------------------------------------- guidance


def guided_stub(num_classes: int) -> Stub:
    """1 for a label, 0 for the null label."""
    return Stub(lambda x, t, y: (y != num_classes).to(x)[:, None, None, None].expand_as(x))


def test_D1_guidance_acts_on_all_channels():
    x_t = torch.zeros(1, 4, 3, 5)
    ensemble = Ensemble([guided_stub(10)], uniform(1), num_classes=10)
    velocity = ensemble.field(torch.tensor([7]), "full", guidance_scale=3.0)(x_t, at(0.5, 1))
    assert torch.allclose(velocity, torch.full_like(x_t, 3.0))


@pytest.mark.parametrize("num_classes", [10, 1000])
def test_D2_null_label_is_the_class_count(num_classes):
    expert = guided_stub(num_classes)
    ensemble = Ensemble([expert], uniform(1), num_classes=num_classes)
    labels = torch.tensor([num_classes - 1, 0])
    velocity = ensemble.field(labels, "full", guidance_scale=2.0)(noise(2), at(0.5, 2))
    assert torch.cat(expert.labels).tolist() == [num_classes - 1, 0, num_classes, num_classes]
    assert torch.allclose(velocity, torch.tensor(2.0), atol=1e-5)


def test_scale_one_runs_one_branch():
    expert = guided_stub(10)
    ensemble = Ensemble([expert], uniform(1), num_classes=10)
    ensemble.field(torch.tensor([7, 2]), "full", guidance_scale=1.0)(noise(2), at(0.5, 2))
    assert expert.rows == [2]
    assert torch.cat(expert.labels).tolist() == [7, 2]  # the null label is not touched


def test_guidance_scale_zero_is_the_unconditional_velocity():
    ensemble = Ensemble([guided_stub(10)], uniform(1), num_classes=10)
    velocity = ensemble.field(torch.tensor([7]), "full", guidance_scale=0.0)(noise(1), at(0.5, 1))
    assert torch.allclose(velocity, torch.tensor(0.0), atol=1e-6)


def test_both_halves_of_guidance_run_on_the_expert_that_the_label_chose():
    experts = [Stub(1.0, 0), Stub(5.0, 1)]
    counts = torch.tensor([[4, 0], [0, 9]])
    ensemble = Ensemble(experts, uniform(2), counts=counts, num_classes=2)
    ensemble.field(torch.tensor([0]), "full", guidance_scale=4.0)(noise(1), at(0.5, 1))
    assert [expert.rows for expert in experts] == [[2], []]


# ---------------------------------------------------------------- routing noise


def drifting(k: int) -> Stub:
    """Experts that differ and depend on x, so that another choice means another picture."""
    return Stub(lambda x, t, y: x - (k - 2.5) / 5 * torch.ones_like(x).cumsum(-1), k)


@pytest.mark.parametrize("strategy", ["coupled", "sample-1", "sample-2@0.5", "full"])
@pytest.mark.parametrize("method", ["euler", "heun"])
def test_D10_an_image_does_not_depend_on_its_place_in_a_batch(strategy, method):
    counts = torch.tensor([[5], [3], [2], [1], [4], [1]])
    ensemble = Ensemble([drifting(k) for k in range(6)], prior_router(counts, 0), num_clusters=6)

    def images(batch_size):
        parts = []
        for rows in torch.arange(5).split(batch_size):
            seeds = [(7, int(i)) for i in rows]
            field = ensemble.field(null(len(rows)), strategy, seeds=seeds)
            parts.append(sample(field, start_noise(SHAPE, seeds), 4, method))
        return torch.cat(parts)

    whole = images(5)
    for batch_size in (1, 2):
        assert torch.allclose(images(batch_size), whole, atol=1e-4)
    assert (whole[0] - whole[1]).abs().max() > 0.1


def choices(strategy: str, method: str, num_steps: int = 12) -> list[list[int]]:
    """Which cluster each of 5 images ran, evaluation by evaluation, with a uniform router."""
    experts = [Stub(float(k), k) for k in range(8)]
    field = Ensemble(experts, uniform(8)).field(null(5), strategy, seeds=[(2, i) for i in range(5)])
    seen = []

    class Recorder:
        begin_step = field.begin_step

        def __call__(self, x, t):
            velocity = field(x, t)
            seen.append(velocity[:, 0, 0, 0].round().long().tolist())
            return velocity

    sample(Recorder(), noise(5), num_steps, method)
    return seen


def test_sample_n_draws_anew_at_each_step_and_coupled_stays():
    coupled = choices("coupled", "euler")
    assert all(row == coupled[0] for row in coupled)
    sampled = choices("sample-1", "euler")
    changes = sum(a != b for x, y in zip(sampled[:-1], sampled[1:], strict=True)
                  for a, b in zip(x, y, strict=True))  # fmt: skip
    # 55 pairs, each different with probability 7 / 8: 48 expected, 38 is four sigma below
    assert changes > 38


@pytest.mark.parametrize("strategy", ["coupled", "sample-1"])
def test_both_evaluations_of_heun_share_one_draw(strategy):
    seen = choices(strategy, "heun")
    assert len(seen) == 2 * 12 - 1  # the last step is Euler
    assert all(seen[2 * i] == seen[2 * i + 1] for i in range(11))


def test_routing_noise_belongs_to_the_seed():
    experts = [Stub(float(k), k) for k in range(8)]
    ensemble = Ensemble(experts, uniform(8))

    def chosen(seed):
        field = ensemble.field(null(9), "coupled", seeds=[(seed, i) for i in range(9)])
        return field(noise(9), at(0.5, 9))

    assert torch.equal(chosen(1), chosen(1))
    assert not torch.equal(chosen(1), chosen(2))


# ---------------------------------------------------------------- what a wrong digit would change


def test_defaults_are_one_cluster_without_classes():
    ensemble = Ensemble([Stub()], uniform(1))
    assert (ensemble.num_clusters, ensemble.num_classes) == (1, 0)


def test_a_cluster_with_a_single_image_is_missed():
    counts = torch.tensor([[5, 0], [0, 1]])
    with pytest.raises(ValueError, match="no expert answers for cluster 1"):
        Ensemble([Stub(cluster=0)], uniform(2), num_clusters=2, num_classes=2, counts=counts)


def test_a_lost_label_is_explained_by_the_cluster_that_has_its_only_image():
    counts = torch.tensor([[5, 0], [0, 1]])
    missing = dict(num_clusters=2, num_classes=2, counts=counts, allow_missing=True)
    ensemble = Ensemble([Stub(cluster=0)], uniform(2), **missing)
    with pytest.raises(ValueError, match=r"knows class 1 .* cluster \[1\]"):
        ensemble.field(torch.tensor([1]), "full")


def test_a_time_without_experts_is_explained_with_and_without_counts():
    for counts in (None, torch.tensor([[5, 1]])):
        missing = dict(num_classes=2, counts=counts, allow_missing=True)
        ensemble = Ensemble([Stub(time_interval=(0.5, 1.0))], uniform(1), **missing)
        with pytest.raises(ValueError, match=r"answers at t = 0\.5"):
            ensemble.field(torch.tensor([2]), "full")


def test_routing_noise_is_keyed_apart_from_start_noise():
    """Keys start with 1 for routing and with 0 for x_1: the two must never be the same stream."""
    ensemble = Ensemble([Stub(cluster=k) for k in range(3)], uniform(3))
    drawn = ensemble.field(null(2), "coupled", seeds=[(7, 0), (7, 4)]).gumbel
    expected = [np.random.default_rng((1, 7, i, 0)).gumbel(size=3) for i in (0, 4)]
    assert torch.equal(drawn, torch.tensor(np.stack(expected)))
    unnamed = ensemble.field(null(2), "coupled").gumbel
    named = ensemble.field(null(2), "coupled", seeds=[(0, 0), (0, 1)]).gumbel
    assert torch.equal(unnamed, named)


def test_switches_count_images_that_changed_their_main_cluster():
    """Of three images on two clusters the last one changes, once."""
    weights = iter([[[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]], [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]])
    experts = [Stub(cluster=k) for k in range(2)]
    field = Ensemble(experts, lambda *_: torch.tensor(next(weights)).log()).field(null(3), "full")
    field(noise(3), at(0.6, 3))
    field(noise(3), at(0.5, 3))
    assert field.switches == 1


def test_pure_noise_shows_an_eps_expert_the_mean_of_the_class():
    """At t = 1 eps says nothing about x0, so velocity = eps - mean image of the label."""
    images = torch.stack([torch.full(SHAPE, -0.5), torch.full(SHAPE, 0.25)])
    expert = Stub(0.0)
    expert.objective = DDPM
    expert.stats = ShardStats.measure(images, torch.tensor([0, 1]), 2)
    field = Ensemble([expert], uniform(1), num_classes=2).field(torch.tensor([0, 1]), "full")
    assert torch.allclose(field(noise(2), at(1.0, 2)), -images, atol=1e-6)


def test_guidance_is_null_plus_scale_times_the_difference():
    """Conditional 2, unconditional 0.5, scale 3: 0.5 + 3 (2 - 0.5) = 5."""

    def answer(x_t, t, labels):
        return torch.where(labels == 2, 0.5, 2.0)[:, None, None, None].expand_as(x_t)

    field = Ensemble([Stub(answer)], uniform(1), num_classes=2)
    velocity = field.field(torch.tensor([1]), "full", guidance_scale=3.0)(noise(1), at(0.5, 1))
    assert torch.allclose(velocity, torch.tensor(5.0), atol=1e-5)
