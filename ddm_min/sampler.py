"""From noise to images: integrate dx/dt = velocity(x, t) from t = 1 down to t = 0.

    Euler    x' = x + (t' - t) velocity(x, t)                                 error ~ 1 / n
    Heun     x' = x + (t' - t) (velocity(x, t) + velocity(x_euler, t')) / 2   error ~ 1 / n^2
    DDIM     x' = alpha' x0_hat + sqrt(sigma'^2 - s^2) eps_hat + s z         a lone expert's way

with s = eta sqrt((sigma'^2 / sigma^2) (1 - alpha^2 / alpha'^2)); eta = 1 is DDPM's ancestral step.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ddm_min.ensemble import Ensemble
from ddm_min.objectives import Objective, to_x0_eps
from ddm_min.router import assigned_router
from ddm_min.schedule import Schedule


def start_noise(shape: Sequence[int], seeds: Sequence[tuple[int, int]]) -> Tensor:
    """Standard Gaussian noise, one image per key: drawn on the CPU, so an image keeps its noise in
    every batch size and on every device. shape (C, H, W) -> float32 [len(seeds), C, H, W]."""
    rows = [
        np.random.default_rng((0, *key)).standard_normal(shape, dtype=np.float32) for key in seeds
    ]
    return torch.from_numpy(np.stack(rows))


def check_finite(x: Tensor, step: int, t: float) -> None:
    """Raise FloatingPointError that names the step if any value is NaN or infinite."""
    if not torch.isfinite(x).all():
        raise FloatingPointError(
            f"sampling left the finite numbers in step {step + 1} at t = {t:g}"
        )


@torch.no_grad()
def sample(
    velocity: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    num_steps: int,
    method: str = "euler",
    t_start: float = 1.0,
    t_end: float = 0.0,
    on_step: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """Carry noise [B, C, H, W] along velocity(x [B, C, H, W], t [B]) in equal steps of t.

    method: "euler" or "heun". Heun's last step into t = 0 is Euler, so nothing is asked at the
    singular end. A velocity with `begin_step` (an ensemble's Field) is told where steps begin, so
    that both of Heun's evaluations share one draw. on_step(step) is called after each step.
    """
    if method not in ("euler", "heun") or num_steps < 1:
        raise ValueError(f"method {method!r} with {num_steps} steps: use euler or heun, >= 1 step")
    begin_step = getattr(velocity, "begin_step", lambda step: None)
    times = torch.linspace(t_start, t_end, num_steps + 1, dtype=torch.float64).tolist()
    x = noise
    for step, (t, t_next) in enumerate(zip(times[:-1], times[1:], strict=True)):
        begin_step(step)
        slope = velocity(x, x.new_full((len(x),), t))
        x_next = x + (t_next - t) * slope
        if method == "heun" and t_next > 0:
            slope = (slope + velocity(x_next, x.new_full((len(x),), t_next))) / 2
            x_next = x + (t_next - t) * slope
        check_finite(x_next, step, t)
        x = x_next
        on_step(step)
    return x


@torch.no_grad()
def sample_ddim(
    velocity: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    num_steps: int,
    schedule: Schedule,
    eta: float = 0.0,
    seeds: Sequence[tuple[int, int]] | None = None,
    t_start: float = 1.0,
    t_end: float = 0.0,
    on_step: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """DDIM on `schedule`, variance preserving (Song et al. 2021, eq. 12); eta = 1 is DDPM.

    `velocity` is the field along that schedule, which holds (x0, eps) as well as eps alone does,
    and is finite at t = 1. seeds: keys as in `start_noise` for the noise that eta > 0 adds.
    """
    objective = Objective("velocity", schedule)
    times = torch.linspace(t_start, t_end, num_steps + 1, dtype=torch.float64).to(noise)
    x = noise
    for step, (t, t_next) in enumerate(zip(times[:-1], times[1:], strict=True)):
        t_batch = t.expand(len(x))
        x0, eps = to_x0_eps(velocity(x, t_batch), x, t_batch, objective)
        alpha, sigma = schedule.alpha(t), schedule.sigma(t)
        alpha_next, sigma_next = schedule.alpha(t_next), schedule.sigma(t_next)
        added = eta * (sigma_next / sigma) * (1 - (alpha / alpha_next) ** 2).clamp(min=0).sqrt()
        x = alpha_next * x0 + (sigma_next**2 - added**2).clamp(min=0).sqrt() * eps
        if eta > 0:
            keys = [(*key, step + 1) for key in seeds]
            x = x + added * start_noise(x.shape[1:], keys).to(x)
        check_finite(x, step, float(t))
        on_step(step)
    return x


def sample_clusters(
    experts: Sequence, counts: Tensor, seed: int, most: int, num_steps: int = 50
) -> tuple[Tensor, Tensor, Tensor]:
    """A stand-in for the data: samples [N, C, H, W] of every expert, their labels, their clusters.

    counts [K, C]: images per cluster and class. Each is drawn as often as there are images of it,
    or in that proportion, so that there are at most `most`. C = 1 may be one class or no classes:
    label 0 either way. Noise belongs to (seed, index): the same call draws the same samples.
    """
    cells = torch.arange(counts.numel()).repeat_interleave(counts.flatten().cpu())
    places = torch.linspace(0, len(cells) - 1, min(len(cells), most), dtype=torch.float64)
    cells = cells[places.round().long()].to(counts.device)
    clusters, labels = cells // counts.shape[1], cells % counts.shape[1]
    known = dict(num_clusters=len(counts), num_classes=counts.shape[1])
    samples = []
    for rows in torch.arange(len(cells)).split(256):
        seeds = [(seed, row) for row in rows.tolist()]
        ensemble = Ensemble(experts, assigned_router(clusters[rows], len(counts)), **known)
        noise = start_noise(experts[0].image_shape, seeds).to(counts.device)
        samples.append(sample(ensemble.field(labels[rows], "full", seeds=seeds), noise, num_steps))
    return torch.cat(samples), labels, clusters
