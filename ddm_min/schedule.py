"""How data turns into noise: x_t = alpha(t) x0 + sigma(t) eps, on three schedules.

This page fixes the convention for the whole repository. Time t = 0 is data and t = 1 is noise;
velocity is dx_t/dt, so it points from data to noise, and sampling walks against it.

    name                what it is                                               shape
    x0, eps, x_t        image in [-1, 1], standard Gaussian noise, their mixture  b c h w
    t                   time in [0, 1]; never an integer, never scaled            b
    alpha, sigma        coefficients of x0 and of eps; sigma is never a ratio     b
    d_alpha, d_sigma    their derivatives in t                                    b
    log_snr             log(alpha^2 / sigma^2): +inf at t = 0, -inf at t = 1      b
    velocity            dx_t/dt = d_alpha x0 + d_sigma eps                        b c h w
    v                   the other one: alpha eps - sigma x0 (v-prediction)        b c h w
    n                   index 0..N-1 into a DDPM table; lives in this file only   b
    labels              class ids; the null class is num_classes                  b
    k, K                a cluster of the data, the number of clusters             int
    log_probs, weights  of the router; of the experts, rows sum to one            b k

Only the ratio alpha / sigma carries information (x_t / alpha is x0 plus noise of that ratio), so
two schedules are compared at equal log_snr: `time_at` is its inverse and the bridge between them.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor


def expand(per_sample: Tensor, like: Tensor) -> Tensor:
    """Reshape [B] so that it multiplies [B, C, H, W] sample by sample: "b -> b 1 1 1"."""
    return per_sample.reshape(-1, *[1] * (like.ndim - 1))


def add_noise(x0: Tensor, eps: Tensor, t: Tensor, schedule: "Schedule") -> Tensor:
    """x_t = alpha(t) x0 + sigma(t) eps. Shapes: x0, eps [B, ...], t [B] -> [B, ...]."""
    return expand(schedule.alpha(t), x0) * x0 + expand(schedule.sigma(t), x0) * eps


@dataclass(frozen=True)
class Linear:
    """The straight path of flow matching: alpha = 1 - t, sigma = t; velocity = eps - x0."""

    def alpha(self, t: Tensor) -> Tensor:
        """Coefficient of x0, [B] -> [B]."""
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        """Coefficient of eps, [B] -> [B]."""
        return t

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(d_alpha, d_sigma) = (-1, 1)."""
        return -torch.ones_like(t), torch.ones_like(t)

    def log_snr(self, t: Tensor) -> Tensor:
        """2 log((1 - t) / t)."""
        return 2 * (torch.log1p(-t) - torch.log(t))

    def time_at(self, log_snr: Tensor) -> Tensor:
        """The t at which log_snr(t) has this value; -inf gives 1 and +inf gives 0."""
        return torch.sigmoid(-log_snr / 2)


@dataclass(frozen=True)
class Cosine:
    """The cosine schedule, variance preserving: alpha = cos(pi t / 2), sigma = sin(pi t / 2)."""

    def alpha(self, t: Tensor) -> Tensor:
        """Coefficient of x0, [B] -> [B]."""
        # Equal to cos(pi t / 2), but exactly 0 at t = 1, where rounded cosines can turn negative.
        return torch.sin(math.pi / 2 * (1 - t))

    def sigma(self, t: Tensor) -> Tensor:
        """Coefficient of eps, [B] -> [B]."""
        return torch.sin(math.pi / 2 * t)

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(d_alpha, d_sigma) = pi / 2 (-sigma, alpha)."""
        return -math.pi / 2 * self.sigma(t), math.pi / 2 * self.alpha(t)

    def log_snr(self, t: Tensor) -> Tensor:
        """-2 log tan(pi t / 2)."""
        return 2 * (torch.log(self.alpha(t)) - torch.log(self.sigma(t)))

    def time_at(self, log_snr: Tensor) -> Tensor:
        """The t at which log_snr(t) has this value; -inf gives 1 and +inf gives 0."""
        return torch.atan(torch.exp(-log_snr / 2)) * 2 / math.pi


@dataclass(frozen=True)
class Betas:
    """Any DDPM table: alpha^2 = prod(1 - beta) and sigma^2 = 1 - alpha^2 at n = 0..N-1.

    t = n / (N - 1) hits entry n, and log_snr is linear in t between entries. A table covers only
    part of the log-SNR axis (about +9.2 to -10.1 for the common one), so `time_at` of anything
    outside is held at the table's end.
    """

    betas: tuple[float, ...]

    @classmethod
    def ddpm(
        cls, num_steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 2e-2
    ) -> "Betas":
        """The linear table of DDPM (Ho et al. 2020), which most published DiT weights use."""
        return cls(
            tuple(torch.linspace(beta_start, beta_end, num_steps, dtype=torch.float64).tolist())
        )

    def __post_init__(self):
        inside = all(0 < beta < 1 for beta in self.betas)
        if len(self.betas) < 2 or not inside or not (self.table.diff() < 0).all():
            raise ValueError(
                "a beta table needs at least 2 entries between 0 and 1 that lower log-SNR each"
            )

    @cached_property
    def table(self) -> Tensor:
        """log_snr at n = 0..N-1: strictly falling, float64 [N]."""
        log_alpha2 = torch.log1p(-torch.tensor(self.betas, dtype=torch.float64)).cumsum(0)
        return log_alpha2 - torch.log(-torch.expm1(log_alpha2))

    def _segment(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The table's piece around t: its first entry's index n, log_snr there, and slope per n."""
        table = self.table.to(t)
        n = (t * (len(table) - 1)).floor().long().clamp(0, len(table) - 2)
        return n, table[n], table[n + 1] - table[n]

    def log_snr(self, t: Tensor) -> Tensor:
        """Linear interpolation of the table in n = (N - 1) t."""
        n, start, slope = self._segment(t)
        return start + slope * (t * (len(self.betas) - 1) - n)

    def time_at(self, log_snr: Tensor) -> Tensor:
        """The t at which log_snr(t) has this value, held at 0 or 1 outside the table."""
        table = self.table.to(log_snr)
        # searchsorted wants a rising sequence, and log_snr falls: search the negated table.
        n = (torch.searchsorted(-table, -log_snr.contiguous()) - 1).clamp(0, len(table) - 2)
        fraction = (log_snr - table[n]) / (table[n + 1] - table[n])
        return ((n + fraction) / (len(table) - 1)).clamp(0, 1)

    def alpha(self, t: Tensor) -> Tensor:
        """sqrt(sigmoid(log_snr)), [B] -> [B]."""
        return torch.sigmoid(self.log_snr(t)).sqrt()

    def sigma(self, t: Tensor) -> Tensor:
        """sqrt(sigmoid(-log_snr)), [B] -> [B]."""
        return torch.sigmoid(-self.log_snr(t)).sqrt()

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha sigma^2, -sigma alpha^2) / 2 times d log_snr / dt, constant between entries."""
        _, _, slope = self._segment(t)
        d_log_snr = slope * (len(self.betas) - 1)
        alpha, sigma = self.alpha(t), self.sigma(t)
        return alpha * sigma**2 / 2 * d_log_snr, -sigma * alpha**2 / 2 * d_log_snr


Schedule = Linear | Cosine | Betas


def schedule_to_dict(schedule: Schedule) -> dict:
    """Linear() -> {"name": "Linear"}; Betas carries its table."""
    return {"name": type(schedule).__name__, **asdict(schedule)}


def schedule_from_dict(stored: dict) -> Schedule:
    """The inverse of `schedule_to_dict`."""
    if stored["name"] == "Betas":
        return Betas(tuple(stored["betas"]))
    return {"Linear": Linear, "Cosine": Cosine}[stored["name"]]()
