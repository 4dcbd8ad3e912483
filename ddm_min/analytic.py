"""The exact answers: every quantity a network has to learn, in closed form for a small dataset.

For finitely many images x_i, x_t is a mixture of Gaussians, and with weights

    w_i(x_t, t) = softmax_i( -|x_t - alpha x_i|^2 / (2 sigma^2) )       posterior over the dataset

    E[x0 | x_t] = sum_i w_i x_i          E[eps | x_t] = (x_t - alpha E[x0 | x_t]) / sigma
    velocity    = d_alpha E[x0 | x_t] + d_sigma E[eps | x_t]                        (DDM eq. 4)
    score       = grad log p_t(x_t) = -E[eps | x_t] / sigma                         (appendix A)

DDM's theorem is then a statement about sums: split the dataset into shards, and the posterior over
images factors into one over shards (the router) and one inside each shard (its expert).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ddm_min.objectives import Objective, target
from ddm_min.schedule import Schedule, expand


class EmpiricalFlow:
    """The exact flow of a dataset: data [N, C, H, W] (any dtype), on a schedule.

    With `labels` [N], a query with a label sees only the images of that class, and a query with
    `null_label` sees all. Work is done in the query's dtype, `block` images at a time.
    """

    def __init__(
        self,
        data: Tensor,
        schedule: Schedule,
        labels: Tensor | None = None,
        null_label: int | None = None,
        block: int = 2048,
    ):
        self.data, self.schedule = data, schedule
        self.labels, self.null_label, self.block = labels, null_label, block

    def log_weights(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """log N(x_t; alpha x_i, sigma^2 I) without its constant, per query and image: [B, N]."""
        alpha, sigma = self.schedule.alpha(t), self.schedule.sigma(t)
        distance = x_t.new_empty(len(x_t), len(self.data))
        for level in alpha.unique():  # a sampler asks for one level, a training batch for B
            rows = alpha == level
            for start in range(0, len(self.data), self.block):
                images = level * self.data[start : start + self.block].flatten(1).to(x_t)
                # Direct differences: expanding the square as a matrix product would cancel digits
                # that the exponent then magnifies.
                distance[rows, start : start + len(images)] = torch.cdist(
                    x_t[rows].flatten(1), images, compute_mode="donot_use_mm_for_euclid_dist"
                )
        # At sigma = 0 the nearest image takes all: any tiny variance says so without dividing by 0.
        log_weights = -distance.square() / (2 * sigma**2).clamp(min=1e-30)[:, None]
        if self.labels is not None and labels is not None:
            other_class = (self.labels != labels[:, None]) & (labels[:, None] != self.null_label)
            log_weights = log_weights.masked_fill(other_class, -torch.inf)
        return log_weights

    def log_density(self, x_t: Tensor, t: Tensor) -> Tensor:
        """log p_t(x_t), [B]; needs sigma > 0, where there is a density."""
        dims = x_t[0].numel()
        sigma = self.schedule.sigma(t)
        log_normalizer = dims / 2 * torch.log(2 * torch.pi * sigma**2)
        num_images = torch.tensor(float(len(self.data))).to(x_t)
        return self.log_weights(x_t, t).logsumexp(1) - num_images.log() - log_normalizer

    def x0(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """E[x0 | x_t], [B, C, H, W]."""
        weights = self.log_weights(x_t, t, labels).softmax(1)
        blocks = zip(weights.split(self.block, dim=1), self.data.split(self.block), strict=True)
        flat = sum(w @ images.flatten(1).to(x_t) for w, images in blocks)
        return flat.reshape(x_t.shape)

    def eps(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """E[eps | x_t], [B, C, H, W]; 0 at sigma = 0, where x_t says nothing about eps."""
        return self._eps_given_x0(x_t, t, self.x0(x_t, t, labels))

    def _eps_given_x0(self, x_t: Tensor, t: Tensor, x0: Tensor) -> Tensor:
        alpha, sigma = expand(self.schedule.alpha(t), x_t), expand(self.schedule.sigma(t), x_t)
        return torch.where(sigma == 0, 0, (x_t - alpha * x0) / sigma)

    def velocity(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The marginal velocity d_alpha E[x0 | x_t] + d_sigma E[eps | x_t], [B, C, H, W]."""
        x0 = self.x0(x_t, t, labels)
        d_alpha, d_sigma = (expand(d, x_t) for d in self.schedule.derivatives(t))
        return d_alpha * x0 + d_sigma * self._eps_given_x0(x_t, t, x0)

    def score(self, x_t: Tensor, t: Tensor) -> Tensor:
        """grad log p_t(x_t) = -E[eps | x_t] / sigma, [B, C, H, W]; needs sigma > 0."""
        return -self.eps(x_t, t) / expand(self.schedule.sigma(t), x_t)

    def expert(self, objective: Objective) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The perfect network for `objective`: model(x_t, t, labels) -> E[target | x_t].

        It lives on the objective's schedule, which need not be this flow's.
        """
        flow = EmpiricalFlow(
            self.data, objective.schedule, self.labels, self.null_label, self.block
        )

        def model(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            """What a perfect network outputs: like x_t."""
            x0 = flow.x0(x_t, t, labels)
            return target(x0, flow._eps_given_x0(x_t, t, x0), t, objective)

        return model


def exact_router(
    shards: Sequence[Tensor],
    schedule: Schedule,
    labels: Sequence[Tensor] | None = None,
    null_label: int | None = None,
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """p(k | x_t, t) = n_k p_{t,k}(x_t) / sum_j n_j p_{t,j}(x_t) (DDM eq. 4), as log_probs [B, K].

    shards: K datasets [n_k, C, H, W]; labels: their [n_k], for p(k | x_t, t, label). The prior
    n_k / N is inside: every image weighs the same, wherever it lives.
    """
    labels = labels or [None] * len(shards)
    flows = [
        EmpiricalFlow(data, schedule, shard_labels, null_label)
        for data, shard_labels in zip(shards, labels, strict=True)
    ]

    def log_probs(x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Exact log p(k | x_t, t, label), [B, K]."""
        evidence = [flow.log_weights(x_t, t, labels).logsumexp(1) for flow in flows]
        return torch.stack(evidence, dim=1).log_softmax(1)

    return log_probs


def pinwheel(k: int, num: int) -> Tensor:
    """A shard to look at: one of three bent arms in the plane, float64 [num, 2, 1, 1]."""
    along = np.linspace(0.6, 3, num)
    bend = 0.55 * along + 0.09 * np.random.default_rng(k).standard_normal(num)
    angle = torch.from_numpy(2 * np.pi * k / 3 + bend)
    return torch.polar(torch.from_numpy(along), angle).view(torch.float64).reshape(num, 2, 1, 1)
