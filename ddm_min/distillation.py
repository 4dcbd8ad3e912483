"""Distillation (DDM 3.6): from many experts one dense student, without a router.

The teacher of an image is the expert of its cluster, which is known while training. Its velocity
at x_t names the pair that it believes in,

    x0_hat, eps_hat    with    x_t = alpha x0_hat + sigma eps_hat,
                               u   = d_alpha x0_hat + d_sigma eps_hat,

and the student trains with the usual loss on that pair in place of (x0, eps): its x_t is the same
point, and its target is the teacher's prediction, whatever teacher and student predict.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddm_min.ensemble import Ensemble
from ddm_min.objectives import Objective, to_x0_eps
from ddm_min.router import assigned_router
from ddm_min.schedule import Schedule, add_noise


@torch.no_grad()
def believed_pair(
    experts: Sequence,
    clusters: Tensor,
    x0: Tensor,
    eps: Tensor,
    t: Tensor,
    labels: Tensor,
    schedule: Schedule,
    num_classes: int = 0,
) -> tuple[Tensor, Tensor]:
    """(x0_hat, eps_hat) [B, C, H, W] of the expert of each image's cluster, at its own x_t.

    clusters [B]: of the images. t [B] on the student's `schedule`. labels [B] in 0..num_classes.
    Raises ValueError where no expert answers for one of the clusters.
    """
    x_t = add_noise(x0, eps, t, schedule)
    num_clusters = int(clusters.max()) + 1
    router = assigned_router(clusters, num_clusters)
    known = dict(num_clusters=num_clusters, num_classes=num_classes)
    ensemble = Ensemble(experts, router, schedule, **known)
    velocity = ensemble.field(labels, "full")(x_t, t)
    return to_x0_eps(velocity, x_t, t, Objective("velocity", schedule))
