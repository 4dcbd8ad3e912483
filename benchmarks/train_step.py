"""What a training step costs: beside a DiT of timm's blocks, and beside multiplying matrices.

    python benchmarks/train_step.py                                  # DiT-S/2 on 32 x 32 x 3
    python benchmarks/train_step.py --image-size 64 --rounds 3
    python benchmarks/train_step.py --model tiny --image-size 8 --channels 1 --batch-size 32 \\
        --rounds 20 --steps 20                                       # the demo's step

Every network is trained by the same loop, `ddm_min.training.train`: same data, batch, precision,
optimizer and average of the weights. A round is a turn of each, one after the other, and a square
matrix product; what is printed are medians over rounds of ratios within a round, which a busy
machine leaves alone. At one thread the clock is the processor time of this process. A turn is
`--steps` steps, of which the median counts, without the first where there are others.

A second table says what bounds forward and backward, by PyTorch's profiler: matrix products, the
attention kernel with the products inside it, GELU, and all the rest.

The work of a step is three times the matrix products of a forward pass, attention included: what
attention computes twice, to save memory, counts once. bf16 is measured where the processor
multiplies it (AMX or AVX-512), and skipped with a word where it is emulated.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import Attention, Mlp, PatchEmbed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from ddm_min import training
from ddm_min.data import Dataset
from ddm_min.dit import PRESETS, DiT, DiTConfig, position_table, sinusoids, unpatchify
from ddm_min.objectives import FLOW, draw_times, drop_labels, loss, normal_like
from ddm_min.training import TrainConfig, draw_batch

PARTS = ("data", "forward", "backward", "optimizer", "EMA")
SQUARE = 2048  # side of the matrices whose product is the machine's rate


class TimmBlock(nn.Module):
    """A DiT block as it is usually written: timm's attention and MLP, its own modulation."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, num_heads=heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(width, 4 * width, act_layer=lambda: nn.GELU(approximate="tanh"), drop=0)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=2)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class TimmDiT(nn.Module):
    """A DiT of `TimmBlock`s, with the shape of a DiTConfig."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config, width, patch = config, config.width, config.patch_size
        self.patch_embed = PatchEmbed(config.image_size, patch, config.in_channels, width)
        grid = (size // patch for size in config.image_size)
        self.register_buffer("positions", position_table(*grid, width))
        self.time_embed = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label_embed = nn.Embedding(config.num_classes + 1, width)
        self.blocks = nn.ModuleList(TimmBlock(width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch**2 * config.in_channels)

    def forward(self, x_t, t, labels):
        x = self.patch_embed(x_t) + self.positions
        c = self.time_embed(torch.cat(sinusoids(1000 * t, 256), dim=1)) + self.label_embed(labels)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=2)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        return unpatchify(x, self.config.patch_size, self.config.image_size)


class Clock:
    """Adds up where the time of a step goes, by part; `training.train` is watched, not copied."""

    def __init__(self, threads: int):
        self.now = time.process_time if threads == 1 else time.perf_counter
        self.turn: list[defaultdict[str, float]] = []  # of each step: seconds by part

    def timed(self, part: str, call):
        """The same function, with its time added to `part`."""

        def watched(*args, **kwargs):
            start = self.now()
            result = call(*args, **kwargs)
            self.turn[-1][part] += self.now() - start
            return result

        return watched

    def watch_training(self) -> None:
        """Put this clock around what the loop calls; a step ends where its progress bar moves."""
        clock = self

        class Progress(tqdm):
            def __init__(self, **options):
                super().__init__(file=open(os.devnull, "w"), **options)  # noqa: SIM115

            def update(self, n=1):
                super().update(n)
                clock.turn[-1]["step"] = clock.now() - clock.start

        class Config(TrainConfig):
            def lr_at(self, step):  # the first thing that a step does
                clock.turn.append(defaultdict(float))
                clock.start = clock.now()
                return super().lr_at(step)

        self.config = Config
        training.tqdm = Progress
        torch.Tensor.backward = self.timed("backward", torch.Tensor.backward)
        torch.optim.AdamW.step = self.timed("optimizer", torch.optim.AdamW.step)
        norm = self.timed("optimizer", nn.utils.clip_grad_norm_)
        nn.utils.clip_grad_norm_ = norm
        torch._foreach_lerp_ = self.timed("EMA", torch._foreach_lerp_)


def randomize(network: nn.Module) -> nn.Module:
    """Random weights also where training starts from zero, so that no product is trivial."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return network


def forward_flops(network: nn.Module, batch_size: int) -> int:
    """Of the matrix products of one forward pass, multiplication and addition counted as two."""
    x = torch.randn(1, network.config.in_channels, *network.config.image_size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        network(x, torch.ones(1), torch.zeros(1).long())
    return batch_size * counter.get_total_flops()


def profiled(step) -> dict[str, float]:
    """Shares of the time of step() in matrix products, attention, tanh-GELU and all the rest."""
    kinds = {
        "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
        "attention": ("aten::_scaled_dot_product",),
        "GELU, where it is a kernel of its own": ("aten::gelu",),
    }
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)
    shares = {
        kind: sum(e.self_cpu_time_total for e in events if e.key.startswith(starts)) / whole
        for kind, starts in kinds.items()
    }
    return shares | {"the rest": 1 - sum(shares.values())}


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="DiT-S/2", choices=PRESETS)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="1 is the least noisy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="of each network in a round")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    size = (args.image_size,) * 2
    config = DiTConfig(args.channels, size, 10, modulation="per-block", **PRESETS[args.model])
    images = torch.randint(256, (1000, args.channels, *size), dtype=torch.uint8)
    dataset = Dataset(images, torch.arange(1000) % 10, list("0123456789"))
    clock = Clock(args.threads)
    clock.watch_training()

    def draw(rng):
        x0, labels, _ = draw_batch(dataset, args.batch_size, rng, flip=True)
        labels = drop_labels(labels, 10, 0.1, rng)
        t = draw_times(len(x0), FLOW.schedule, (0.0, 1.0), rng)
        return x0, normal_like(x0, rng), t, labels

    def batch_loss(model, rng):
        batch = clock.timed("data", draw)(rng)
        return clock.timed("forward", loss)(model, *batch, FLOW).mean()

    runs = {"timm": (TimmDiT, {}), "ours": (DiT, {})}
    runs |= {f"{name}, compiled": (c, {"compile": True}) for name, (c, _) in runs.items()}
    if multiplies_bf16():
        runs["ours, bf16"] = (DiT, {"precision": "bf16"})
        runs["ours, bf16, compiled"] = (DiT, {"precision": "bf16", "compile": True})
    else:
        print("bf16: not measured, this processor emulates it")
    networks = {name: randomize(network(config)) for name, (network, _) in runs.items()}
    flops = {name: 3 * forward_flops(n, args.batch_size) for name, n in networks.items()}
    matrix = torch.randn(SQUARE, SQUARE)

    def multiply():
        start = clock.now()
        torch.mm(matrix, matrix)
        return 2 * SQUARE**3 / (clock.now() - start)

    with tempfile.TemporaryDirectory() as folder:

        def turn(name: str, steps: int) -> dict[str, float]:
            """The run goes on to `steps` from its resume file; seconds per part of a step."""
            settings = clock.config(
                steps, args.batch_size, lr=1e-4, lr_schedule="constant", **runs[name][1]
            )
            file = Path(folder) / f"{name}.safetensors"
            clock.turn.clear()
            with contextlib.redirect_stdout(None):
                training.train(networks[name], batch_loss, settings, file, {"steps": steps})
            taken = clock.turn[1:] or clock.turn
            return {
                part: statistics.median(step[part] for step in taken) for part in (*PARTS, "step")
            }

        rounds = []
        for number in range(1, args.rounds + 3):
            seconds = {name: turn(name, number * args.steps) for name in runs}
            rounds.append((max(multiply() for _ in range(3)), seconds))
    rounds = rounds[2:]  # without the compilation and the first touch of the memory

    def median(value) -> float:
        return statistics.median(value(rate, seconds) for rate, seconds in rounds)

    print(
        f"{args.model}, {args.image_size} x {args.image_size} x {args.channels}, batch "
        f"{args.batch_size}, {args.threads} thread(s), {len(rounds)} rounds: "
        f"{flops['ours'] / 1e9:.2f} GFLOP, matrix products at "
        f"{median(lambda rate, _: rate) / 1e9:.1f} GFLOP/s\n"
    )
    print(
        "| network | step | of the matrix rate | speed beside timm | " + " | ".join(PARTS), end=""
    )
    print(" | rest |\n|" + "---|" * (5 + len(PARTS)))
    for name in runs:
        step = median(lambda _, s, name=name: s[name]["step"])
        share = median(lambda rate, s, name=name: flops[name] / s[name]["step"] / rate)
        beside = median(lambda _, s, name=name: s["timm"]["step"] / s[name]["step"])
        parts = [
            median(lambda _, s, name=name, part=part: s[name][part] / s[name]["step"])
            for part in PARTS
        ]
        cells = [f"{100 * part:.1f} %" for part in [*parts, 1 - sum(parts)]]
        print(f"| {name} | {1e3 * step:.1f} ms | {share:.1%} | {beside:.2f} x | ", end="")
        print(" | ".join(cells) + " |")

    for index, (name, network) in enumerate(networks.items()):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in name)
        with autocast:
            shares = profiled(lambda n=network: batch_loss(n, np.random.default_rng(0)).backward())
        if index == 0:
            print(
                f"\n| forward and backward | {' | '.join(shares)} |\n|" + "---|" * (1 + len(shares))
            )
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in shares.values()) + " |")


if __name__ == "__main__":
    main()
