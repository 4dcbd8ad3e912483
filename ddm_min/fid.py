"""Frechet distance between two sets of images, from the moments of their features.

    d^2 = |mean_a - mean_b|^2 + tr(cov_a + cov_b - 2 (cov_a cov_b)^(1/2))

The trace of the root needs no root of an unsymmetric matrix: with cov_a = F F^T, the product's
eigenvalues are those of the symmetric F^T cov_b F, and they are real and >= 0 by construction.
On Inception features this is FID; on others it is the same formula and not comparable with FID.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class FeatureStats:
    """Mean and covariance of features in one pass and constant memory, in float64."""

    def __init__(self, num_features: int):
        self.count = 0
        self.sum = torch.zeros(num_features, dtype=torch.float64)
        self.outer = torch.zeros(num_features, num_features, dtype=torch.float64)

    @classmethod
    def of(cls, batches: Iterable[Tensor]) -> "FeatureStats":
        """Those of all batches [B, D], of which there is at least one."""
        stats = None
        for batch in batches:
            stats = (stats or cls(batch.shape[1])).update(batch)
        return stats

    def update(self, features: Tensor) -> "FeatureStats":
        """Add a batch [B, D]; returns self."""
        features = features.double().cpu()
        self.count += len(features)
        self.sum += features.sum(0)
        self.outer += features.T @ features
        return self

    def __add__(self, other: "FeatureStats") -> "FeatureStats":
        """Those of both sets of samples together."""
        both = FeatureStats(len(self.sum))
        both.count = self.count + other.count
        both.sum, both.outer = self.sum + other.sum, self.outer + other.outer
        return both

    @property
    def mean(self) -> Tensor:
        """[D]."""
        return self.sum / self.count

    @property
    def cov(self) -> Tensor:
        """Unbiased covariance, [D, D]."""
        centered = self.outer - self.count * torch.outer(self.mean, self.mean)
        return centered / max(self.count - 1, 1)


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """The squared distance d^2 of the page top: means [D], covariances [D, D], any rank; >= 0."""
    mean_a, cov_a, mean_b, cov_b = (x.double() for x in (mean_a, cov_a, mean_b, cov_b))
    factor, failed = torch.linalg.cholesky_ex(cov_a)
    if failed:  # rank-deficient: fewer samples than features, or a constant feature
        values, vectors = torch.linalg.eigh(cov_a)
        factor = vectors * values.clamp(min=0).sqrt()
    roots = torch.linalg.eigvalsh(factor.T @ cov_b @ factor).clamp(min=0).sqrt()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * roots.sum()
    return max(float(distance), 0.0)


def distance(a, b) -> float:
    """Frechet distance of two sets of samples, each with a mean and a cov."""
    return frechet_distance(a.mean, a.cov, b.mean, b.cov)


if __name__ == "__main__":
    from ddm_min.features import main  # the command line lives with the features

    main()
