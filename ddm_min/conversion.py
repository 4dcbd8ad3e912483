"""Ask an expert of any objective for its velocity on another schedule, without retraining it.

Two operations, one after the other. *Change of schedule*: the path B at time t carries the same
information as the expert's own schedule A at

    s = time_at_A(log_snr_B(t)),    x_s = c x_t,
    c = sqrt((alpha_A(s)^2 + sigma_A(s)^2) / (alpha_B(t)^2 + sigma_B(t)^2))

so the expert is asked there. *Change of target*: its answer becomes (x0, eps), and the velocity on
B is d_alpha_B(t) x0 + d_sigma_B(t) eps. Both are exact. Naive conversion (`align=False`) skips the
first: it asks at (x_t, t) and reads the answer as if the expert had been trained on B, which is the
mistake that this file exists to measure.
"""

import torch
from torch import Tensor

from ddm_min.objectives import Objective, to_x0_eps
from ddm_min.schedule import Schedule, expand


def matching_point(path: Schedule, schedule: Schedule, t: Tensor) -> tuple[Tensor, Tensor]:
    """(s, c): the time and input scale at which `schedule` sees what `path` sees at t; [B], [B].

    Where `schedule` is a beta table that does not reach that noise level, s is held at its end;
    c stays finite there and keeps the input's expected size.
    """
    if schedule == path:  # nothing to match: t as it is, not through log and exp
        return t, torch.ones_like(t)
    s = schedule.time_at(path.log_snr(t))
    own = schedule.alpha(s) ** 2 + schedule.sigma(s) ** 2
    return s, (own / (path.alpha(t) ** 2 + path.sigma(t) ** 2)).sqrt()


def velocity_on(
    path: Schedule,
    model,
    objective: Objective,
    x_t: Tensor,
    t: Tensor,
    labels: Tensor,
    align: bool = True,
    x0_range: tuple[float, float] | None = None,
    x0_at_noise: Tensor | None = None,
) -> Tensor:
    """Velocity on `path` of an expert trained for `objective`, [B, C, H, W].

    model(x_s, s, labels) -> prediction, with s [B] in [0, 1] of its own schedule; t [B] in [0, 1].
    x0_range: clamp x0 to (low, high) and recompute eps, which bounds what 1 / alpha amplifies near
    t = 1 (sampling does; proofs do not). x0_at_noise [B, C, H, W]: the mean image, which stands in
    for x0 where an eps prediction says nothing about it (alpha = 0); None means zeros.
    """
    schedule = objective.schedule if align else path
    s, c = matching_point(path, schedule, t)
    x_s = expand(c, x_t) * x_t
    x0, eps = to_x0_eps(model(x_s, s, labels), x_s, s, Objective(objective.prediction, schedule))

    # At a singular end x_s says nothing about the unknown half, so that half's mean stands in.
    alpha, sigma = expand(schedule.alpha(s), x_t), expand(schedule.sigma(s), x_t)
    if objective.prediction == "eps":
        x0 = torch.where(
            alpha == 0, torch.zeros_like(x_t) if x0_at_noise is None else x0_at_noise, x0
        )
    if objective.prediction == "x0":
        eps = torch.where(sigma == 0, 0, eps)

    if x0_range is not None:
        clamped = x0.clamp(*x0_range)
        # At sigma = 0 no eps makes up for the clamp, and whatever the network said of it stays.
        kept = (clamped == x0) | (sigma == 0)
        eps = torch.where(kept, eps, (x_s - alpha * clamped) / sigma)
        x0 = clamped
    d_alpha, d_sigma = path.derivatives(t)
    return expand(d_alpha, x_t) * x0 + expand(d_sigma, x_t) * eps
