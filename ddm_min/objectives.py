"""What a network predicts, how that becomes x0 and eps, and how its error is measured.

Every prediction p is one linear combination of x0 and eps, and x_t is another, so the pair
(x0, eps) follows from (p, x_t) by a 2 x 2 system:

    p   = a x0 + b eps            eps: a, b = 0, 1        v:        a, b = -sigma, alpha
    x_t = alpha x0 + sigma eps    x0:  a, b = 1, 0        velocity: a, b = d_alpha, d_sigma

At given x_t the errors of all these are multiples of each other (alpha d_x0 = -sigma d_eps), so
training in another *loss space* is a change of weight over t and nothing else.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_min.schedule import Cosine, Linear, Schedule, add_noise, expand

PREDICTIONS = ("eps", "x0", "v", "velocity")


@dataclass(frozen=True)
class Objective:
    """What the network outputs, on which schedule, and in which space its error is measured.

    prediction: "eps", "x0", "v" or "velocity". loss_space: one of the same; None means the
    prediction's own. As a loss space, velocity is the linear path's at equal log-SNR, whatever the
    schedule. Raises ValueError for any other name.
    """

    prediction: str
    schedule: Schedule
    loss_space: str | None = None

    def __post_init__(self):
        if self.loss_space is None:
            object.__setattr__(self, "loss_space", self.prediction)
        for name in (self.prediction, self.loss_space):
            if name not in PREDICTIONS:
                raise ValueError(
                    f"unknown prediction {name!r}: use one of {', '.join(PREDICTIONS)}"
                )


FLOW = Objective("velocity", Linear())
DDPM = Objective("eps", Cosine())
NAMED = {"flow": FLOW, "ddpm": DDPM, "x0": Objective("x0", Cosine()), "v": Objective("v", Cosine())}


def target(x0: Tensor, eps: Tensor, t: Tensor, objective: Objective) -> Tensor:
    """a x0 + b eps: what a perfect network outputs for this pair. [B, C, H, W] -> the same."""
    schedule = objective.schedule
    alpha, sigma = expand(schedule.alpha(t), x0), expand(schedule.sigma(t), x0)
    d_alpha, d_sigma = (expand(d, x0) for d in schedule.derivatives(t))
    match objective.prediction:
        case "eps":
            return eps
        case "x0":
            return x0
        case "v":
            return alpha * eps - sigma * x0
        case "velocity":
            return d_alpha * x0 + d_sigma * eps


def to_x0_eps(
    prediction: Tensor, x_t: Tensor, t: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Solve the 2 x 2 system of the page top for (x0, eps); shapes [B, C, H, W], t [B].

    Not finite where the system is singular: x0 from eps at alpha = 0 (t = 1), eps from x0 at
    sigma = 0 (t = 0). `conversion` decides what stands in there.
    """
    schedule = objective.schedule
    alpha, sigma = expand(schedule.alpha(t), x_t), expand(schedule.sigma(t), x_t)
    d_alpha, d_sigma = (expand(d, x_t) for d in schedule.derivatives(t))
    match objective.prediction:
        case "eps":
            return (x_t - sigma * prediction) / alpha, prediction
        case "x0":
            return prediction, (x_t - alpha * prediction) / sigma
        case "v":
            power = alpha**2 + sigma**2  # 1 on a variance-preserving schedule
            return (
                (alpha * x_t - sigma * prediction) / power,
                (sigma * x_t + alpha * prediction) / power,
            )
        case "velocity":
            wronskian = alpha * d_sigma - sigma * d_alpha
            return (
                (d_sigma * x_t - sigma * prediction) / wronskian,
                (alpha * prediction - d_alpha * x_t) / wronskian,
            )


def error_scale(space: str, schedule: Schedule, t: Tensor) -> Tensor:
    """|a sigma - b alpha|, [B]: at the same x_t, errors in all spaces are proportional to it.

    From alpha d_x0 + sigma d_eps = 0: d_p = a d_x0 + b d_eps = (a sigma - b alpha) d_x0 / sigma.
    `velocity` is the velocity along `schedule` itself.
    """
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    d_alpha, d_sigma = schedule.derivatives(t)
    match space:
        case "eps":
            return alpha
        case "x0":
            return sigma
        case "v":
            return alpha**2 + sigma**2
        case "velocity":
            return alpha * d_sigma - sigma * d_alpha


def loss_scale(objective: Objective, t: Tensor) -> Tensor:
    """`error_scale` of the loss space, [B]; velocity is the linear path's, so islands compare.

    At equal log-SNR the linear path is x_t / (alpha + sigma): its velocity error is
    (alpha + sigma) / sigma times that of x0.
    """
    if objective.loss_space == "velocity":
        return objective.schedule.alpha(t) + objective.schedule.sigma(t)
    return error_scale(objective.loss_space, objective.schedule, t)


def implicit_weight(objective: Objective, t: Tensor) -> Tensor:
    """The weight w(t) in loss = w(t) |x0_hat - x0|^2 (HDDM proposition 1), uncapped, [B].

    eps: alpha^2 / sigma^2; velocity on the linear path: 1 / sigma^2; x0: 1; v: 1 / sigma^2 on a
    variance-preserving schedule. Infinite at sigma = 0, except for x0.
    """
    return (loss_scale(objective, t) / objective.schedule.sigma(t)) ** 2


def loss(
    model,
    x0: Tensor,
    eps: Tensor,
    t: Tensor,
    labels: Tensor,
    objective: Objective,
    max_weight: float = float("inf"),
) -> Tensor:
    """Squared error of model(x_t, t, labels), measured in objective.loss_space, per sample [B].

        min((loss_scale / error_scale)^2, max_weight) * mean |prediction - target|^2

    Off the diagonal the ratio can have no finite mean under uniform t: eps measured as velocity
    weighs 1 / (1 - t)^2 on the linear path. The cap keeps one sample from carrying the batch; its
    bias is that the few noise levels beyond it are trained less than the loss space asks for.
    """
    x_t = add_noise(x0, eps, t, objective.schedule)
    error = model(x_t, t, labels) - target(x0, eps, t, objective)
    own, wanted = error_scale(objective.prediction, objective.schedule, t), loss_scale(objective, t)
    # On the diagonal both are 0 at a singular end, and their ratio is 1 there too.
    weight = torch.where(wanted == own, 1, (wanted / own) ** 2)
    return weight.clamp(max=max_weight) * error.square().flatten(1).mean(1)


def draw_times(
    num: int, schedule: Schedule, time_interval: tuple[float, float], rng: np.random.Generator
) -> Tensor:
    """Uniform t on `schedule` in the half-open (a, b] of `time_interval`, rounded: float32 [num].

    The interval is given on the linear path; its ends move to `schedule` at equal log-SNR, so that
    experts of different schedules split the same noise levels between them (MDM).
    """
    ends = torch.tensor(time_interval, dtype=torch.float64)
    low, high = schedule.time_at(Linear().log_snr(ends)).tolist()
    return high - (high - low) * torch.from_numpy(rng.random(num, dtype=np.float32))


def drop_labels(labels: Tensor, num_classes: int, rate: float, rng: np.random.Generator) -> Tensor:
    """Replace a share of the labels by the null class, so that the network learns both."""
    dropped = torch.from_numpy(rng.random(len(labels)) < rate).to(labels.device)
    return torch.where(dropped, num_classes, labels)


def normal_like(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Standard Gaussian noise in the shape and on the device of x."""
    return torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32)).to(x.device)
