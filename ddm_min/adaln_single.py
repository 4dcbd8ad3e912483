"""Where the blocks of a DiT get their scales, shifts and gates from: each its own, or one shared.

All blocks read the same z = SiLU(time embedding + class embedding) and need 6 d numbers each:

    per-block  (DiT)                   S_i(z) = W_i z + b_i        depth x 6 d (d + 1) weights
    single     (PixArt-alpha, HDDM)    S_i(z) = W z + b + E_i      6 d (d + 1) + depth x 6 d

which takes DiT-XL/2 from 675 to 460 million parameters. Both start at zero, so that every block
starts as the identity (adaLN-Zero); PixArt's random E_i would give that up.

Trained per-block weights become a single function in closed form (`fit_single`). What that cannot
keep is how a block's own answer to time and class differs from the average block's, the part
(W_i - W)(z - mean z) of S_i(z): all that remains of a block is a constant, equal for all t and y.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn


class PerBlock(nn.Module):
    """S_i(z) = W_i z + b_i, all blocks in one product: z [B, d] -> [depth, B, 6, 1, d]."""

    def __init__(self, depth: int, width: int):
        super().__init__()
        self.depth = depth
        self.linear = nn.Linear(width, depth * 6 * width)

    def forward(self, z: Tensor) -> Tensor:
        return rearrange(
            self.linear(z), "b (depth six d) -> depth b six 1 d", depth=self.depth, six=6
        )


class AdaLNSingle(nn.Module):
    """S_i(z) = W z + b + E_i: z [B, d] -> [depth, B, 6, 1, d]."""

    def __init__(self, depth: int, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 6 * width)
        self.offsets = nn.Parameter(torch.zeros(depth, 6 * width))

    def forward(self, z: Tensor) -> Tensor:
        shared = rearrange(self.linear(z), "b (six d) -> 1 b six 1 d", six=6)
        return shared + rearrange(self.offsets, "depth (six d) -> depth 1 six 1 d", six=6)


MODULATIONS = {"single": AdaLNSingle, "per-block": PerBlock}


def fit_single(
    weights: Sequence[Tensor], biases: Sequence[Tensor], z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(W [6 d, d], b [6 d], E [depth, 6 d]): a shared function that stands for depth of its own.

        W = mean_i W_i,    b = mean_i b_i,    E_i = S_i(z) - (W z + b)

    weights: W_i [6 d, d] and biases: b_i [6 d] of all blocks; z [d]. Where z is the mean over times
    and classes this minimises sum_i mean_z |S_i(z) - (f(z) + E_i)|^2 over *all* functions f and
    constants E_i: given E the best f is the mean over blocks of S_i - E_i, given f the best E_i is
    the mean over z of S_i - f, and S_i is affine, so that both means are taken of weights and of z.
    Where z is that of t = 500 without a class, this is PixArt-alpha's matching: exact there only.
    """
    weight = sum(w.to(z.dtype) for w in weights) / len(weights)
    bias = sum(b.to(z.dtype) for b in biases) / len(biases)
    own = [w.to(z.dtype) @ z + b.to(z.dtype) for w, b in zip(weights, biases, strict=True)]
    return weight, bias, torch.stack(own) - (weight @ z + bias)


def fit_residual(
    weights: Sequence[Tensor], biases: Sequence[Tensor], z_mean: Tensor, z_cov: Tensor
) -> tuple[Tensor, Tensor]:
    """(mean_z |S_i - f - E_i|^2, mean_z |S_i|^2) of every block for the best fit; [depth] each.

    From the moments of z alone, z_mean [d] and z_cov [d, d]: the error is (W_i - W)(z - mean z),
    and mean |A (z - mean z)|^2 = tr(A cov A^T). Any other E' is worse by |E'_i - E_i|^2 per block.
    """
    shared, _, _ = fit_single(weights, biases, z_mean)
    errors, powers = [], []
    for w, b in zip(weights, biases, strict=True):
        w, b = w.to(z_mean.dtype), b.to(z_mean.dtype)
        difference = w - shared
        errors.append(((difference @ z_cov) * difference).sum())
        powers.append(((w @ z_cov) * w).sum() + (w @ z_mean + b).square().sum())
    return torch.stack(errors), torch.stack(powers)
