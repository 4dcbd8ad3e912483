"""Experts + router -> one velocity field on one path (DDM eq. 4, HDDM, MDM):

    u(x_t, t) = sum_k  w_k(x_t, t, y) * velocity of the expert that answers for cluster k at time t
    w         = strategy( p(cluster k | x_t, t, y) )

An expert answers for one cluster or for all, in a time interval. DDM is one expert per cluster, MDM
one per interval, a single model one for everything; mixed objectives are `conversion`'s business.
Clusters that share an expert add their weights, so an expert runs at most once per image and step,
and only on the images that chose it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddm_min.conversion import matching_point, velocity_on
from ddm_min.router import class_mask, parse_strategy, select
from ddm_min.schedule import Linear, Schedule, expand


def gaps_and_overlaps(experts: Sequence, clusters: Sequence[int]) -> tuple[list[str], list[str]]:
    """What the experts leave open, and what they answer twice, in the cluster x time plane."""
    gaps, overlaps = [], []
    for k in clusters:
        intervals = sorted(e.time_interval for e in experts if e.cluster in ("all", k))
        reached = 0.0
        for low, high in [*intervals, (1.0, 1.0)]:
            if low > reached:
                gaps.append(f"cluster {k} at t from {reached:g} to {low:g}")
            if low < min(reached, high):
                overlaps.append(f"cluster {k} at t from {low:g} to {min(reached, high):g}")
            reached = max(reached, high)
    return gaps, overlaps


class Ensemble:
    """A set of experts, a router and a path; `field` turns them into a velocity.

    experts: objects with model(x_t, t, labels), objective, cluster (int or "all"), time_interval
    and stats (ShardStats or None). router: (x_t, t, labels) -> log_probs [B, K]. counts [K, C]:
    images per cluster and class, so that a label only ever goes to clusters that know it; None
    leaves that to the router. align=False asks experts naively, for the comparison.

    Raises ValueError for overlaps in the cluster x time plane, and for gaps unless allow_missing,
    which gives the missing clusters' weight to those that are present.
    """

    def __init__(
        self,
        experts: Sequence,
        router,
        path: Schedule = Linear(),
        *,
        num_clusters: int | None = None,
        num_classes: int = 0,
        counts: Tensor | None = None,
        allow_missing: bool = False,
        align: bool = True,
    ):
        named = [e.cluster for e in experts if e.cluster != "all"]
        self.num_clusters = num_clusters or max(named, default=0) + 1
        self.experts, self.router, self.path = list(experts), router, path
        self.num_classes, self.counts, self.align = num_classes, counts, align
        # A cluster without a single image is not missed: nothing is ever drawn from it.
        clusters = [k for k in range(self.num_clusters) if counts is None or counts[k].sum() > 0]
        gaps, overlaps = gaps_and_overlaps(experts, clusters)
        if overlaps:
            raise ValueError("more than one expert answers for " + "; ".join(overlaps))
        if gaps and not allow_missing:
            raise ValueError("no expert answers for " + "; ".join(gaps))

    def answers(self, t: Tensor) -> Tensor:
        """Which expert answers for cluster k at time t: t [B] -> bool [experts, B, K].

        Intervals are half-open, (a, b], so that a boundary has one owner; t = 0 is in the first.
        They are given on the linear path, to which t moves from any other at equal log-SNR.
        """
        t, _ = matching_point(self.path, Linear(), t)
        clusters = torch.arange(self.num_clusters, device=t.device)
        owned = []
        for expert in self.experts:
            low, high = expert.time_interval
            in_time = ((t > low) | ((t == 0) & (low == 0))) & (t <= high)
            in_cluster = clusters == (clusters if expert.cluster == "all" else expert.cluster)
            owned.append(in_time[:, None] & in_cluster)
        return torch.stack(owned)

    def can_draw(self, labels: Tensor, t: Tensor) -> Tensor:
        """Clusters with an expert at t and with images of the label: bool [B, K]."""
        present = self.answers(t).any(0)
        if self.counts is None:
            return present
        mask = class_mask(labels, self.counts.shape[1], self.num_classes)
        return present & ((mask.float() @ self.counts.float().T) > 0)

    def log_probs(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Router log_probs over the clusters that can draw the label, renormalised: [B, K]."""
        log_probs = self.router(x_t, t, labels)
        return log_probs.masked_fill(~self.can_draw(labels, t), -torch.inf).log_softmax(1)

    def why_nobody(self, label: int, t: float) -> str:
        """One sentence on why no cluster can draw this label at t."""
        if self.counts is None or label == self.num_classes:
            return f"no expert here answers at t = {t:g}"
        has_class = [k for k in range(self.num_clusters) if self.counts[k, label] > 0]
        if not has_class:
            return f"no expert here knows class {label}: no cluster has images of it"
        return (
            f"no expert here knows class {label} at t = {t:g}: it lives in cluster {has_class}, "
            f"whose expert is missing"
        )

    def field(
        self,
        labels: Tensor,
        strategy: str,
        guidance_scale: float = 1.0,
        seeds: Sequence[tuple[int, int]] | None = None,
    ) -> "Field":
        """The velocity of one batch of trajectories: field(x_t [B, C, H, W], t [B]) -> like x_t.

        labels [B] in 0..num_classes; the null class, num_classes, draws from all. seeds: a key per
        image, (seed, image index), which owns its routing noise; None means (0, position).
        Raises ValueError for an unknown strategy and where no expert present can draw a label.
        """
        parse_strategy(strategy)
        for t in {1.0, *(e.time_interval[0] or 1.0 for e in self.experts)}:  # where gaps can end
            drawn = self.can_draw(labels, torch.full(labels.shape, t, device=labels.device)).any(1)
            if not drawn.all():
                raise ValueError(self.why_nobody(int(labels[~drawn][0]), t))
        seeds = seeds or [(0, index) for index in range(len(labels))]
        return Field(self, labels, strategy, guidance_scale, seeds)


class Field:
    """One batch on its way from noise to data: velocity(x_t, t), and what it cost.

    forwards: images that went through an expert so far (guided ones count twice). switches: how
    often an image's main cluster changed from one call to the next.
    """

    def __init__(
        self, ensemble: Ensemble, labels: Tensor, strategy: str, guidance_scale: float, seeds
    ):
        self.ensemble, self.labels, self.strategy = ensemble, labels, strategy
        self.guidance_scale, self.seeds = guidance_scale, seeds
        self.forwards, self.switches, self.main_cluster = 0, 0, None
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Draw the routing noise that all evaluations of this solver step share.

        `sample-n` draws anew at each step; `coupled` keeps what belongs to the image.
        """
        if step == 0 or self.strategy.startswith("sample"):
            shape = self.ensemble.num_clusters
            rows = [np.random.default_rng((1, *key, step)).gumbel(size=shape) for key in self.seeds]
            self.gumbel = torch.tensor(np.stack(rows), device=self.labels.device)

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        ensemble = self.ensemble
        log_probs = ensemble.log_probs(x_t, t, self.labels)
        weights = select(log_probs, self.strategy, self.gumbel.to(log_probs.dtype))  # b k
        velocity = torch.zeros_like(x_t)
        for expert, answers in zip(ensemble.experts, ensemble.answers(t), strict=True):
            share = (weights * answers).sum(1)
            rows = share.nonzero()[:, 0]
            if len(rows):
                part = self.expert_velocity(expert, x_t[rows], t[rows], self.labels[rows])
                velocity.index_add_(0, rows, (expand(share[rows], part) * part).to(velocity.dtype))
        main_cluster = weights.argmax(1)
        if self.main_cluster is not None:
            self.switches += int((main_cluster != self.main_cluster).sum())
        self.main_cluster = main_cluster
        return velocity

    def expert_velocity(self, expert, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """One expert's velocity on the path, guided: u(null) + guidance_scale (u(label) - u(null)).

        Both halves run on the experts that the label chose. That is a simplification: the exact
        unconditional velocity would be routed by p(k | x_t, t). Guidance acts on all channels.
        """
        null_label = self.ensemble.num_classes
        guided = self.guidance_scale != 1 and bool((labels != null_label).any())
        if guided:
            x_t, t = torch.cat([x_t, x_t]), torch.cat([t, t])
            labels = torch.cat([labels, torch.full_like(labels, null_label)])
        self.forwards += len(x_t)
        x0_range, x0_at_noise = None, None
        if expert.stats is not None:
            x0_range = expert.stats.value_range.tolist()
            if (t == 1).any():
                x0_at_noise = expert.stats.mean_image(labels, null_label).reshape(x_t.shape)
        velocity = velocity_on(
            self.ensemble.path,
            expert.model,
            expert.objective,
            x_t,
            t,
            labels,
            self.ensemble.align,
            x0_range,
            x0_at_noise,
        )
        if guided:
            conditional, unconditional = velocity.chunk(2)
            velocity = unconditional + self.guidance_scale * (conditional - unconditional)
        return velocity
