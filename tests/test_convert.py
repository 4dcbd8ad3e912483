"""Checkpoints of others become experts: the same epsilon, every key explained, no code run."""

import argparse
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert_ckpt
import train_expert
from ddm_min import checkpoint
from ddm_min.adaln_single import fit_residual, fit_single
from ddm_min.dit import DiT, DiTConfig
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert
from ddm_min.objectives import DDPM, FLOW, Objective, loss
from ddm_min.router import prior_router
from ddm_min.sampler import sample, start_noise
from ddm_min.schedule import Betas

# B, C, H, width, depth, classes, patch: all different. The image is square, as DiT's are.
CHANNELS, SIZE, WIDTH, DEPTH, CLASSES, PATCH, HEADS = 3, 8, 32, 4, 7, 2, 2
TOKENS = (SIZE // PATCH) ** 2


# ---------------------------------------------------------------- facebook's DiT, written anew


def position_table(side: int, width: int) -> torch.Tensor:
    """Facebook's pos_embed, entry by entry: sines and cosines of the column, then of the row."""
    rows = []
    for row in range(side):
        for column in range(side):
            angles = [
                [place / 10000 ** (i / (width // 4)) for i in range(width // 4)]
                for place in (column, row)
            ]
            rows.append([f(a) for part in angles for f in (math.sin, math.cos) for a in part])
    return torch.tensor(rows)[None]


def facebook_state(learned_sigma: bool = True, positions: bool = True, seed: int = 0, **sizes):
    """A random state dict in facebook's keys; biases and modulation too, so that nothing is zero."""
    s = dict(channels=CHANNELS, size=SIZE, width=WIDTH, depth=DEPTH, classes=CLASSES, patch=PATCH)
    s |= sizes
    d, p = s["width"], s["patch"]
    shapes = {
        "x_embedder.proj": (d, s["channels"], p, p),
        "t_embedder.mlp.0": (d, 256),
        "t_embedder.mlp.2": (d, d),
        "final_layer.linear": (p * p * s["channels"] * (1 + learned_sigma), d),
        "final_layer.adaLN_modulation.1": (2 * d, d),
    }
    for i in range(s["depth"]):
        shapes |= {
            f"blocks.{i}.attn.qkv": (3 * d, d),
            f"blocks.{i}.attn.proj": (d, d),
            f"blocks.{i}.mlp.fc1": (4 * d, d),
            f"blocks.{i}.mlp.fc2": (d, 4 * d),
            f"blocks.{i}.adaLN_modulation.1": (6 * d, d),
        }
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        fan_in = math.prod(shape[1:])
        state[f"{name}.weight"] = torch.randn(shape, generator=generator) / fan_in**0.5
        state[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
    state["y_embedder.embedding_table.weight"] = torch.randn(
        s["classes"] + 1, d, generator=generator
    )
    if positions:
        state["pos_embed"] = position_table(s["size"] // p, d)
    return state


def facebook_forward(state, x, n, labels, heads=HEADS, divisor=128, second_eps=1e-6):
    """The reference: convolution, per-block adaLN, head; x [B, C, H, H], integer n [B] -> all channels.

    divisor and second_eps: 127 and 1e-5 turn it into what diffusers' class computes.
    """

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def silu(x):
        return x / (1 + torch.exp(-x))

    def gelu(x):
        return x / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))

    def norm(x, eps=1e-6):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()

    kernel = state["x_embedder.proj.weight"]
    width, _, patch, _ = kernel.shape
    tokens = torch.nn.functional.conv2d(x, kernel, state["x_embedder.proj.bias"], stride=patch)
    batch, _, side, _ = tokens.shape
    tokens = tokens.flatten(2).transpose(1, 2)
    tokens = tokens + position_table(side, width).to(x)

    frequencies = torch.exp(-math.log(10000) * torch.arange(128).float() / divisor).to(x)
    angles = n.to(x)[:, None] * frequencies
    time = torch.cat([angles.cos(), angles.sin()], dim=1)
    time = linear("t_embedder.mlp.2", silu(linear("t_embedder.mlp.0", time)))
    z = silu(time + state["y_embedder.embedding_table.weight"][labels])

    depth = sum(name.endswith("attn.qkv.bias") for name in state)
    for i in range(depth):
        chunks = linear(f"blocks.{i}.adaLN_modulation.1", z)[:, None].split(width, dim=-1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = chunks
        h = linear(f"blocks.{i}.attn.qkv", norm(tokens) * (1 + scale_msa) + shift_msa)
        q, k, v = h.reshape(batch, -1, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (width // heads) ** 0.5).softmax(-1)
        h = (weights @ v).transpose(1, 2).reshape(batch, -1, width)
        tokens = tokens + gate_msa * linear(f"blocks.{i}.attn.proj", h)
        h = norm(tokens, second_eps) * (1 + scale_mlp) + shift_mlp
        h = linear(f"blocks.{i}.mlp.fc2", gelu(linear(f"blocks.{i}.mlp.fc1", h)))
        tokens = tokens + gate_mlp * h

    shift, scale = linear("final_layer.adaLN_modulation.1", z)[:, None].split(width, dim=-1)
    rows = linear("final_layer.linear", norm(tokens) * (1 + scale) + shift)
    rows = rows.reshape(batch, side, side, patch, patch, -1)
    image = rows.permute(0, 5, 1, 3, 2, 4)  # nhwpqc -> nchpwq
    return image.reshape(batch, -1, side * patch, side * patch)


def inputs(batch: int = 5, seed: int = 1):
    """x, integer times, labels with the null class among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, CHANNELS, SIZE, SIZE, generator=generator)
    n = torch.randint(1000, (batch,), generator=generator)
    return x, n, torch.arange(batch) % (CLASSES + 1)


def relative(a, b) -> float:
    return float((a - b).norm() / b.norm())


def convert(checkpoint_file: Path, *options, heads: int | None = HEADS) -> Expert:
    """Run the script in process and load what it wrote."""
    out = checkpoint_file.parent / "out" / "expert_all.safetensors"
    heads_option = ["--heads", str(heads)] if heads else []
    convert_ckpt.main([str(checkpoint_file), str(out), *heads_option, *options])
    return Expert.load(out)


def refused(capsys, file: Path, *options) -> str:
    """The script must stop with one sentence and exit code 2, and write nothing."""
    out = file.parent / "out" / "expert_all.safetensors"
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        convert_ckpt.main([str(file), str(out), *options])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.startswith("error: ") and message.count("\n") == 1, message
    assert not out.exists() and not list(out.parent.glob(".*"))
    return message


def saved(tmp_path: Path, contents, name: str = "model.pt") -> Path:
    file = tmp_path / name
    save_file(contents, file) if name.endswith(".safetensors") else torch.save(contents, file)
    return file


def check_epsilon(expert: Expert, state: dict, tolerance: float = 1e-5) -> None:
    """The expert's eps is the reference's first C channels, in float32."""
    x, n, labels = inputs()
    reference = facebook_forward({k: v.float() for k, v in state.items()}, x, n, labels)
    eps = expert.model(x, n / 999, labels)
    assert relative(eps, reference[:, :CHANNELS]) < tolerance
