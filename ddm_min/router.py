"""Which cluster does a noisy image come from, p(cluster k | x_t, t, label), and who answers for it.

A router is any callable (x_t, t, labels) -> log_probs [B, K], on the path that is sampled (x_t of
another schedule has another posterior). Three of them stand here, and the exact one in `analytic`:

    learned   a small DiT with a classification token, trained by cross-entropy     (DDM alg. 1)
    gaussian  each shard as a Gaussian, from the statistics that every expert file carries
    prior     n_k / N, or n_{k,y} / n_y with a label; it never looks at x_t

A strategy turns log_probs into weights over clusters. `full` is the theorem; the others run fewer
experts. DDM's best FID came from top-1, though it is biased: where clusters overlap it always
picks the same one. `coupled` picks one too, but each in proportion to its probability.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_min.dit import DiTConfig, Trunk
from ddm_min.schedule import Linear, Schedule

MEASURED = 5_000  # images whose covariance stands for that of a larger shard
STRATEGIES = "full, coupled, top-K, threshold-P, nucleus-P, sample-N or sample-N@TEMPERATURE"


class LearnedRouter(nn.Module):
    """log p(k | x_t, t, label) by a DiT with a token that is decoded to pairs (cluster, class).

    The network looks at x_t and t only; the label comes in by Bayes, exactly and without dropout:

        p(k | x_t, t, y) = p(k, y | x_t, t) / sum_j p(j, y | x_t, t)
        p(k | x_t, t)    = sum_y p(k, y | x_t, t)                            the null label

    so every training image teaches both. (A router of the same size that is told the label, and
    trained with dropout, ended .25 nats above the exact one without labels, and this one .15:
    benchmarks/router_calibration.py.)
    """

    def __init__(self, config: DiTConfig, num_clusters: int):
        super().__init__()
        self.config, self.num_clusters = config, num_clusters
        self.trunk = Trunk(replace(config, num_classes=0))
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, config.width))
        self.head = nn.Linear(config.width, num_clusters * max(config.num_classes, 1))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """log p(k | x_t, t, label) [B, K]; without labels log p(k, y | x_t, t) [B, K, C]."""
        tokens, _ = self.trunk(x_t, t, labels, self.class_token)
        logits = self.head(F.layer_norm(tokens[:, 0], tokens.shape[-1:]))
        joint = logits.log_softmax(-1).unflatten(1, (self.num_clusters, -1))  # b k c
        if labels is None:
            return joint
        mask = class_mask(labels, joint.shape[2], self.config.num_classes)
        return joint.masked_fill(~mask[:, None], -torch.inf).logsumexp(2).log_softmax(1)


@dataclass
class ShardStats:
    """What an island tells about its data: enough for a router, a prior and a stand-in for x0.

    counts [C] images per class (C = 1 without classes), means [C, D] class means (D = c h w),
    basis [D, r], variances [r] and rest []: the within-class covariance, shared by the classes,
    basis diag(variances) basis^T + rest (I - basis basis^T); value_range [2] of the pixels.
    A class mean of a single image *is* that image: what is sent is not always anonymous.
    """

    counts: Tensor
    means: Tensor
    basis: Tensor
    variances: Tensor
    rest: Tensor
    value_range: Tensor

    def __post_init__(self):
        (classes, dims), rank = self.means.shape, len(self.variances)
        expected = [(classes,), (classes, dims), (dims, rank), (rank,), (), (2,)]
        shapes = [tuple(x.shape) for x in vars(self).values()]
        if shapes != expected:
            raise ValueError(f"statistics of shapes {shapes} do not fit each other")

    @classmethod
    def measure(cls, images, labels: Tensor, num_classes: int, rank=64, as_floats=None):
        """From one shard's images [N, c, h, w], in the model's range after `as_floats`, and labels.

        At most MEASURED images are in memory at a time. The covariance of more than that is the one
        of as many random ones among them; counts, means and range are of all.
        """
        as_floats, num_rows = as_floats or (lambda x: x), max(num_classes, 1)
        counts = torch.bincount(labels, minlength=num_rows)
        means, ends = torch.zeros(num_rows, images.shape[1:].numel()), []
        for rows in torch.arange(len(labels)).split(MEASURED):
            flat = as_floats(images[rows]).flatten(1).float()
            means.index_add_(0, labels[rows], flat)
            ends += flat.aminmax()
        means /= counts.clamp(min=1)[:, None]
        if len(labels) > MEASURED:
            rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
            rows = rows[:MEASURED].sort().values  # in order, which a disk reads faster
            flat = as_floats(images[rows]).flatten(1).float()
        within = flat - means[labels[rows]]
        variance = within.square().sum() / len(flat)  # trace of the covariance
        rank = min(rank, *within.shape)
        with torch.random.fork_rng(devices=[]):  # svd_lowrank starts from a random guess
            torch.manual_seed(0)
            _, singular, basis = torch.svd_lowrank(within, q=rank, niter=4)
        variances = singular.square() / len(flat)
        rest = (variance - variances.sum()).clamp(min=0) / max(flat.shape[1] - rank, 1)
        value_range = torch.stack(torch.stack(ends).aminmax())
        return cls(counts, means, basis, variances, rest, value_range)

    def mean_image(self, labels: Tensor, null_label: int) -> Tensor:
        """Mean of each label's class, or of the whole shard for the null label: [B] -> [B, D]."""
        weights = (class_mask(labels, len(self.counts), null_label) * self.counts).to(self.means)
        return weights @ self.means / weights.sum(1, keepdim=True).clamp(min=1)

    def log_evidence(self, x_t: Tensor, t: Tensor, path: Schedule) -> Tensor:
        """log N(x_t; alpha mu_y, alpha^2 C + sigma^2 I) of every class y, [B, C].

        One eigenbasis serves every t: only its variances change, to alpha^2 lambda + sigma^2.
        """
        alpha, sigma = path.alpha(t)[:, None], path.sigma(t)[:, None]
        x = x_t.flatten(1)
        variances = alpha**2 * self.variances + sigma**2  # b r
        rest = alpha**2 * self.rest + sigma**2  # b 1
        # |x - alpha mu|^2 and its part inside the basis, per row and class
        difference = (x[:, None] - alpha[:, :, None] * self.means).square().sum(-1)  # b c
        inside = (
            (x @ self.basis)[:, None] - alpha[:, :, None] * (self.means @ self.basis)
        ).square()
        mahalanobis = (inside / variances[:, None]).sum(-1) + (difference - inside.sum(-1)) / rest
        log_det = variances.log().sum(1, keepdim=True)
        log_det = log_det + (x.shape[1] - variances.shape[1]) * rest.log()
        return -(mahalanobis + log_det) / 2


def class_mask(labels: Tensor, num_rows: int, null_label: int) -> Tensor:
    """Which classes a label stands for: itself, and the null label for all. [B] -> bool [B, C]."""
    classes = torch.arange(num_rows, device=labels.device)
    return (labels[:, None] == classes) | (labels[:, None] == null_label)


def prior_router(counts: Tensor, num_classes: int):
    """log p(k | label) = log n_{k,y} / n_y, without looking at x_t; counts [K, C].

    With `coupled` this is DDM's oracle: it draws a cluster once per image, with exactly the right
    probability, and stays. Rows of a label that no cluster has are all -inf.
    """

    def log_probs(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """log n_{k,y} / n_y, [B, K], the same for every x_t and t."""
        known = class_mask(labels, counts.shape[1], num_classes).double() @ counts.double().T
        return (known / known.sum(1, keepdim=True).clamp(min=1)).log().to(x_t.dtype)

    return log_probs


def assigned_router(clusters: Tensor, num_clusters: int):
    """All mass on a given cluster per image: clusters [B] -> log_probs [B, K] of 0 and -inf.

    Who calls knows where each image belongs: a teacher's training images (DDM 3.6), or samples that
    are drawn expert by expert. Only for exactly this batch, in this order.
    """
    log_probs = F.one_hot(clusters, num_clusters).log()

    def router(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """0 at the given cluster and -inf elsewhere, [B, K]."""
        return log_probs.to(x_t)

    return router


def gaussian_router(shards: list[ShardStats | None], num_classes: int, path: Schedule = Linear()):
    """p(k | x_t, t, y) ~ n_{k,y} N(x_t; alpha mu_{k,y}, alpha^2 C_k + sigma^2 I): no training.

    The null label sums over classes. Position k holds cluster k's statistics, or None if absent.
    """

    def log_probs(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Bayes' rule over the shards' Gaussians, [B, K]."""
        columns = []
        for stats in shards:
            if stats is None:
                columns.append(x_t.new_full((len(x_t),), -torch.inf))
                continue
            mask = class_mask(labels, len(stats.counts), num_classes)
            joint = stats.counts.log() + stats.log_evidence(x_t, t, path)  # b c
            columns.append(joint.masked_fill(~mask, -torch.inf).logsumexp(1))
        return torch.stack(columns, dim=1).log_softmax(1)

    return log_probs


def parse_strategy(strategy: str) -> tuple[str, float, float]:
    """ "top-2" -> ("top", 2, 1); "sample-1@0.5" -> ("sample", 1, 0.5). Raises ValueError."""
    name, _, number = strategy.partition("-")
    number, _, temperature = number.partition("@")
    try:
        number, temperature = float(number or 0), float(temperature or 1)
    except ValueError:
        number = -1
    whole = number >= 1 and number % 1 == 0
    valid = {
        "full": strategy == "full",
        "coupled": strategy == "coupled",
        "top": whole and "@" not in strategy,
        "threshold": 0 < number < 1 and "@" not in strategy,
        "nucleus": 0 < number < 1 and "@" not in strategy,
        "sample": whole and 0 < temperature < float("inf"),
    }
    if not valid.get(name, False):
        raise ValueError(f"unknown strategy {strategy!r}: use {STRATEGIES}")
    return name, number, temperature


def select(log_probs: Tensor, strategy: str, gumbel: Tensor) -> Tensor:
    """Weights over clusters, rows summing to one: log_probs and gumbel [B, K] -> [B, K].

        full         w = p                                                    DDM eq. 4, exact
        coupled      all on argmax_k (log p_k + g_k), g fixed for the whole trajectory
        top-k        the k largest p, renormalised                            DDM table 1
        threshold-p  every p_k >= p (at least the largest), renormalised
        nucleus-p    the fewest largest that together reach p, renormalised (DDM draws one of them)
        sample-n     n experts without replacement (Gumbel top-n), equal weights

    gumbel: standard Gumbel noise; only `coupled` and `sample-n` use it. -inf in log_probs is an
    expert that cannot answer: it never gets weight.
    """
    name, number, temperature = parse_strategy(strategy)
    probs = log_probs.exp()
    if name == "full":
        return probs
    if name == "coupled":
        return F.one_hot((log_probs + gumbel).argmax(1), probs.shape[1]).to(probs)
    # The other strategies keep some clusters, by their rank in a score: 0 for the highest.
    score = log_probs / temperature + gumbel if name == "sample" else log_probs
    order = score.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    match name:
        case "top":
            keep = rank < number
        case "threshold":
            keep = (probs >= number) | (rank == 0)
        case "nucleus":
            ordered = probs.gather(1, order)
            keep = (ordered.cumsum(1) - ordered).gather(1, rank) < number  # the mass ahead of it
        case "sample":
            keep, probs = (rank < number) & (log_probs > -torch.inf), torch.ones_like(probs)
    kept = probs * keep
    return kept / kept.sum(1, keepdim=True)
