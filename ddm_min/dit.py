"""The DiT backbone (Peebles & Xie 2022): a transformer on patches, steered by time and class.

    tokens = patches(x_t) W + position,    z = SiLU(embed(time_scale t) + embed(label))
    tokens += gate_1 * attention(norm(tokens) (1 + scale_1) + shift_1)        depth times,
    tokens += gate_2 * mlp(norm(tokens) (1 + scale_2) + shift_2)              modulation from z
    output = unpatch(linear(norm(tokens) (1 + scale) + shift))

The network always receives t in [0, 1]; `time_scale` is the only place that knows the units of the
sinusoidal embedding, which was made for step numbers up to 1000 and cannot tell 0.1 from 0.2.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ddm_min.adaln_single import MODULATIONS

LARGEST = 2**16  # of any size, and of the number of patches: beyond is no network but damage
FREQUENCIES = 256  # size of the sinusoidal time embedding, as in DiT


@dataclass(frozen=True)
class DiTConfig:
    """The shape of a network; stored with its weights.

    image_size: (H, W), divisible by patch_size. num_classes: 0 means unconditional; the null
    class has index num_classes. time_scale: 1000, or N - 1 for weights trained on an N-step table.
    Raises ValueError where the numbers do not fit each other.
    """

    in_channels: int
    image_size: tuple[int, int]
    num_classes: int = 0
    patch_size: int = 2
    width: int = 64
    depth: int = 4
    heads: int = 4
    modulation: str = "single"
    time_scale: float = 1000.0

    def __post_init__(self):
        object.__setattr__(self, "image_size", tuple(self.image_size))
        height, width = self.image_size
        for size in (self.in_channels, height, width, self.patch_size, self.width, self.depth):
            if not isinstance(size, int) or not 0 < size <= LARGEST:
                raise ValueError(f"size {size!r} in {self}: use whole numbers from 1 to {LARGEST}")
        if height * width > LARGEST * self.patch_size**2:
            raise ValueError(
                f"{height} x {width} pixels in patches of {self.patch_size} are too many"
            )
        if not isinstance(self.heads, int) or self.heads < 1 or not 0 < self.time_scale < math.inf:
            raise ValueError(f"{self.heads} heads, time scale {self.time_scale}: must be above 0")
        for size in self.image_size:
            if size % self.patch_size:
                near = max(size // self.patch_size, 1) * self.patch_size
                raise ValueError(
                    f"image size {size} is not divisible by the patch size {self.patch_size}: "
                    f"use images of {near} or {near + self.patch_size}, or another patch size"
                )
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width {self.width} must be divisible by 4 and by {self.heads} heads")
        if self.modulation not in MODULATIONS:
            raise ValueError(f"modulation {self.modulation!r}: use {' or '.join(MODULATIONS)}")


SIZES = {
    "DiT-S": dict(width=384, depth=12, heads=6),
    "DiT-B": dict(width=768, depth=12, heads=12),
    "DiT-L": dict(width=1024, depth=24, heads=16),
    "DiT-XL": dict(width=1152, depth=28, heads=16),
}
PRESETS = {
    "tiny": dict(width=64, depth=4, heads=4, patch_size=2),
    "router": dict(width=32, depth=2, heads=2, patch_size=4),  # for tiny experts
} | {
    f"{name}/{patch_size}": size | dict(patch_size=patch_size)
    for name, size in SIZES.items()
    for patch_size in (2, 4, 8)
}


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut images into a row of patches: [B, C, H, W] -> [B, H W / p^2, C p^2]."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=patch_size, q=patch_size)


def unpatchify(tokens: Tensor, patch_size: int, image_size: tuple[int, int]) -> Tensor:
    """Put the head's rows back into images: [B, H W / p^2, p^2 C] -> [B, C, H, W].

    Channels come last here and first in `patchify`, as in DiT's weights.
    """
    return rearrange(
        tokens,
        "b (h w) (p q c) -> b c (h p) (w q)",
        h=image_size[0] // patch_size,
        p=patch_size,
        q=patch_size,
    )


def sinusoids(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """sin and cos of positions / 10000^(2 i / size), i < size / 2: [N] -> two of [N, size / 2]."""
    half = size // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=positions.device) / half)
    angles = positions[:, None] * frequencies
    return angles.sin(), angles.cos()


def position_table(height: int, width: int, size: int) -> Tensor:
    """Fixed 2-D sine-cosine positions, [height * width, size]: half for columns, half for rows."""
    rows, columns = torch.meshgrid(
        torch.arange(height).double(), torch.arange(width).double(), indexing="ij"
    )
    parts = sinusoids(columns.flatten(), size // 2) + sinusoids(rows.flatten(), size // 2)
    return torch.cat(parts, dim=1).float()


class GELU(nn.Module):
    """DiT's GELU: x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).

    The built-in function is one pass over the memory. A compiler makes one pass of the second form
    too, and a sigmoid is cheaper than a tanh.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
        return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    """One transformer block; `modulation` [B, 6, 1, d] is shift, scale, gate, twice."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), GELU(), nn.Linear(4 * width, width))

    def attention(self, x: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d / heads)) v, then a linear layer: [B, N, d] -> the same."""
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        return self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:  # x: b n d
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.unbind(1)  # each b 1 d
        x = torch.addcmul(x, gate_1, self.attention(modulate(x, shift_1, scale_1)))
        return torch.addcmul(x, gate_2, self.mlp(modulate(x, shift_2, scale_2)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then (1 + scale) x + shift: x [B, N, d], the others [B, 1, d]."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale)


class Trunk(nn.Module):
    """All of a DiT but its head: (x_t, t, labels) -> tokens [B, N, d] and z [B, d]."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        height, width = (size // config.patch_size for size in config.image_size)
        self.patch_embed = nn.Linear(config.in_channels * config.patch_size**2, config.width)
        positions = position_table(height, width, config.width)
        self.register_buffer("positions", positions, persistent=False)
        self.time_embed = nn.Sequential(
            nn.Linear(FREQUENCIES, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        if config.num_classes:
            self.label_embed = nn.Embedding(config.num_classes + 1, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.modulation = MODULATIONS[config.modulation](config.depth, config.width)
        self.initialize()

    def initialize(self):
        """Xavier for linear layers, N(0, 0.02^2) for embeddings, and zeros where DiT has them.

        The modulation starts at zero, so gates are closed and every block is the identity.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for embedding in (self.time_embed[0], self.time_embed[2]):
            nn.init.normal_(embedding.weight, std=0.02)
        if self.config.num_classes:
            nn.init.normal_(self.label_embed.weight, std=0.02)
        nn.init.zeros_(self.modulation.linear.weight)

    def condition(self, t: Tensor, labels: Tensor) -> Tensor:
        """z = SiLU(time embedding + class embedding): t [B] in [0, 1], labels [B] -> [B, d]."""
        sin, cos = sinusoids(t * self.config.time_scale, FREQUENCIES)
        embedding = self.time_embed(torch.cat([cos, sin], dim=1).to(self.patch_embed.weight.dtype))
        if self.config.num_classes:
            embedding = embedding + self.label_embed(labels)
        return F.silu(embedding)

    def forward(
        self, x_t: Tensor, t: Tensor, labels: Tensor, class_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self.patch_embed(patchify(x_t, self.config.patch_size)) + self.positions  # b n d
        if class_token is not None:
            x = torch.cat([class_token.expand(len(x), 1, -1), x], dim=1)
        z = self.condition(t, labels)
        for block, modulation in zip(self.blocks, self.modulation(z), strict=True):
            x = block(x, modulation)
        return x, z


class DiT(nn.Module):
    """model(x_t, t, labels) -> prediction: x_t [B, C, H, W], t [B] in [0, 1], labels [B].

    The head starts at zero, so an untrained network predicts zero.
    """

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        # The last layer keeps its own modulation (shift and scale), also with AdaLN-Single.
        self.final_modulation = nn.Linear(config.width, 2 * config.width)
        self.head = nn.Linear(config.width, config.patch_size**2 * config.in_channels)
        for layer in (self.final_modulation, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        x, z = self.trunk(x_t, t, labels)
        shift, scale = self.final_modulation(z)[:, None].chunk(2, dim=-1)
        tokens = self.head(modulate(x, shift, scale))
        return unpatchify(tokens, self.config.patch_size, self.config.image_size)
