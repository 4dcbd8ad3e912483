"""Where the blocks of a DiT get their scales, shifts and gates from: each its own, or one shared.

All blocks read the same z = SiLU(time embedding + class embedding) and need 6 d numbers each:

    per-block  (DiT)                   S_i(z) = W_i z + b_i              depth x 6 d (d + 1) weights
    single     (PixArt-alpha, HDDM)    S_i(z) = W z + b + E_i                  6 d (d + 1) + depth x 6 d

which takes DiT-XL/2 from 675 to 460 million parameters. Both start at zero, so that every block
starts as the identity (adaLN-Zero); PixArt's random E_i would give that up.
"""

import torch
from einops import rearrange
from torch import Tensor, nn


class PerBlock(nn.Module):
    """S_i(z) = W_i z + b_i for all blocks i in one matrix product: z [B, d] -> [depth, B, 6, 1, d]."""

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
