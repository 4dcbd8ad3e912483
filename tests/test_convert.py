"""Checkpoints of others become experts: the same epsilon, every key explained, no code run."""

import argparse
import functools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert_ckpt
import sample as sample_script
import train_expert
from ddm_min import dialects
from ddm_min.adaln_single import fit_residual, fit_single
from ddm_min.dit import DiT, DiTConfig
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert, write_file
from ddm_min.objectives import DDPM, FLOW, Objective, loss
from ddm_min.router import ShardStats, prior_router
from ddm_min.sampler import sample, start_noise
from ddm_min.schedule import Betas

# B, C, H, width, depth, classes, patch: all different. The image is square, as DiT's are.
CHANNELS, SIZE, WIDTH, DEPTH, CLASSES, PATCH, HEADS = 3, 8, 32, 4, 7, 2, 2
TOKENS = (SIZE // PATCH) ** 2


# ---------------------------------------------------------------- facebook's DiT, written anew


@functools.cache
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
    """A random state dict in facebook's keys; biases too, so that nothing is zero."""
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
    """The reference, all channels of it, at x [B, C, H, H] and integer n [B].

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


# ---------------------------------------------------------------- facebook's files


@pytest.mark.parametrize("learned_sigma", [True, False])
@pytest.mark.parametrize("patch", [2, 4])
def test_epsilon_is_the_networks_at_every_integer_time(tmp_path, learned_sigma, patch):
    state = facebook_state(learned_sigma, patch=patch)
    expert = convert(saved(tmp_path, state))
    assert expert.objective == Objective("eps", Betas.ddpm())
    assert expert.model.config.time_scale == 999
    x, _, labels = inputs(batch=1000)
    n = torch.arange(1000)
    assert torch.equal((n / 999) * 999, n.float())  # float32 gives back each integer exactly
    reference = facebook_forward(state, x, n, labels)[:, :CHANNELS]
    eps = expert.model(x, n / 999, labels)
    error = (eps - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    assert error.max() < 1e-5


def test_architecture_is_read_from_the_tensors(tmp_path):
    state = facebook_state(channels=5, size=12, width=24, depth=3, classes=11, patch=4)
    config = convert(saved(tmp_path, state), heads=3).model.config
    assert config == DiTConfig(5, (12, 12), 11, 4, 24, 3, 3, "per-block", 999.0)


@pytest.mark.parametrize("name", ["DiT-S", "DiT-B", "DiT-L", "DiT-XL"])
@pytest.mark.parametrize("patch", [2, 4, 8])
def test_published_sizes_need_no_hints(name, patch):
    size = dialects.SIZES[name]
    with torch.device("meta"):
        state = {
            "x_embedder.proj.weight": torch.empty(size["width"], 4, patch, patch),
            "y_embedder.embedding_table.weight": torch.empty(1001, size["width"]),
            "pos_embed": torch.empty(1, (32 // patch) ** 2, size["width"]),
        } | {f"blocks.{i}.mlp.fc1.bias": torch.empty(0) for i in range(size["depth"])}
    config, layout = dialects.read_architecture(state, {}, None, None)
    assert layout is dialects.FACEBOOK
    assert (config.width, config.depth, config.heads) == tuple(size.values())
    assert (config.image_size, config.num_classes, config.patch_size) == ((32, 32), 1000, patch)


def test_unknown_width_needs_heads_and_no_table_needs_a_size(tmp_path, capsys):
    file = saved(tmp_path, facebook_state())
    assert "width 32 is none of DiT's: say --heads" in refused(capsys, file)
    file = saved(tmp_path, facebook_state(positions=False))
    assert "say --image-size" in refused(capsys, file, "--heads", "2")


def training_file(tmp_path: Path, ema_seed: int = 1, raw_seed: int = 2) -> tuple[Path, dict, dict]:
    """What DiT's train.py saves, with weights that went through DDP."""
    ema, raw = facebook_state(seed=ema_seed), facebook_state(seed=raw_seed)
    args = argparse.Namespace(model="custom", image_size=64, num_classes=CLASSES, ckpt_every=50_000)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    wrapped = {f"module.{key}": x for key, x in raw.items()}
    contents = {"model": wrapped, "ema": ema, "opt": optimizer.state_dict(), "args": args}
    return saved(tmp_path, contents), ema, raw


def test_C4_EMA_by_default_and_raw_on_request_and_one_line_says_which(tmp_path, capsys):
    file, ema, raw = training_file(tmp_path)
    check_epsilon(convert(file), ema)
    assert capsys.readouterr().out.startswith("EMA weights: 51 keys mapped")
    check_epsilon(convert(file, "--raw"), raw)
    assert capsys.readouterr().out.startswith("raw weights: 51 keys mapped")
    check_epsilon(convert(saved(tmp_path, ema)), ema)
    assert capsys.readouterr().out.startswith("the file's only weights: 51 keys mapped")


def test_C4_a_training_file_with_one_set_of_weights(tmp_path, capsys):
    state = facebook_state()
    check_epsilon(convert(saved(tmp_path, {"model": state})), state)
    assert capsys.readouterr().out.startswith("raw weights: 51")  # the fall-back is announced
    (tmp_path / "ema").mkdir()
    file = saved(tmp_path / "ema", {"ema": state, "opt": {}})
    assert "EMA weights only: leave --raw out" in refused(capsys, file, "--raw")


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_C1_prefixes_of_wrappers_are_taken_off(tmp_path, prefix, suffix):
    state = facebook_state()
    plain = convert(saved(tmp_path, state)).model.state_dict()
    prefixed = {prefix + key: x for key, x in state.items()}
    converted = convert(saved(tmp_path, prefixed, f"model.{suffix}")).model.state_dict()
    assert plain.keys() == converted.keys()
    assert all(torch.equal(plain[key], converted[key]) for key in plain)
    assert not any(
        "module." in key or "_orig_mod" in key
        for key in load_file(tmp_path / "out/expert_all.safetensors")
    )


def test_C2_learned_sigma_is_cut_per_pixel_and_not_by_halves(tmp_path, capsys):
    state = facebook_state(channels=4, size=8)
    assert state["final_layer.linear.weight"].shape[0] == 32  # 8 channels at patch size 2
    expert = convert(saved(tmp_path, state))
    assert "(2 without learned variance)" in capsys.readouterr().out
    generator = torch.Generator().manual_seed(3)
    x, n, labels = (
        torch.randn(5, 4, 8, 8, generator=generator),
        torch.arange(5) * 200,
        torch.arange(5),
    )
    reference = facebook_forward(state, x, n, labels)
    assert reference.shape[1] == 8
    assert relative(expert.model(x, n / 999, labels), reference[:, :4]) < 1e-5
    with torch.no_grad():  # the mistake: the first half of the rows
        expert.model.head.weight.copy_(state["final_layer.linear.weight"][:16])
        expert.model.head.bias.copy_(state["final_layer.linear.bias"][:16])
    assert relative(expert.model(x, n / 999, labels), reference[:, :4]) > 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_half_precision_is_kept_in_the_file_and_computed_in_float32(tmp_path, dtype, suffix):
    state = {key: x.to(dtype) for key, x in facebook_state().items()}
    expert = convert(saved(tmp_path, state, f"model.{suffix}"))
    check_epsilon(expert, state)
    assert {x.dtype for x in load_file(tmp_path / "out/expert_all.safetensors").values()} == {dtype}
    assert expert.model.head.weight.dtype == torch.float32


def test_a_network_of_one_block_also_becomes_single(tmp_path):
    state = facebook_state(depth=1)
    check_epsilon(convert(saved(tmp_path, state), "--modulation", "single"), state)  # nothing lost


def test_half_precision_also_becomes_single(tmp_path):
    state = {key: x.half() for key, x in facebook_state().items()}
    expert = convert(saved(tmp_path, state), "--modulation", "single")
    shared = (
        sum(state[f"blocks.{i}.adaLN_modulation.1.weight"].float() for i in range(DEPTH)) / DEPTH
    )
    assert torch.allclose(expert.model.trunk.modulation.linear.weight, shared, atol=1e-6)


def test_file_of_the_old_format_is_read(tmp_path):
    """Before torch 1.6 a .pt was no zip archive; it cannot be memory-mapped."""
    state = facebook_state()
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    check_epsilon(convert(tmp_path / "model.pt"), state)


def test_C6_checkpoint_of_a_GPU_opens_on_a_CPU(tmp_path):
    state = facebook_state()
    reader = torch._C.PyTorchFileReader(str(saved(tmp_path, state)))
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "gpu.pt"))
    for name in reader.get_all_records():
        record = reader.get_record(name)
        if name == "data.pkl":  # the place of every tensor, as pickle spells strings
            assert record.count(b"X\x03\x00\x00\x00cpu") == 1
            record = record.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
        if not name.startswith((".", "version", "byteorder")):
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "gpu.pt")
    check_epsilon(convert(tmp_path / "gpu.pt"), state)


def test_C8_position_table_may_be_there_or_not(tmp_path):
    with_table = convert(saved(tmp_path, facebook_state()))
    without = convert(saved(tmp_path, facebook_state(positions=False)), "--image-size", "8")
    x, n, labels = inputs()
    assert torch.equal(with_table.model(x, n / 999, labels), without.model(x, n / 999, labels))


def test_C8_position_table_of_another_size_is_refused_with_both_sizes(tmp_path, capsys):
    file = saved(tmp_path, facebook_state(size=16))  # a table of 8 x 8 patches
    message = refused(capsys, file, "--heads", "2", "--image-size", "32")  # 16 x 16 patches
    assert "pos_embed should be (1, 256, 32) and is (1, 64, 32)" in message


def test_C8_a_table_that_is_not_the_fixed_one_is_refused(tmp_path, capsys):
    state = facebook_state()
    state["pos_embed"] = state["pos_embed"] + 0.01
    message = refused(capsys, saved(tmp_path, state), "--heads", "2")
    assert "not DiT's fixed one: it differs by 0.01" in message


def test_C9_missing_and_unknown_keys_are_named_with_shapes(tmp_path, capsys):
    state = {key: x for key, x in facebook_state().items() if not key.startswith("blocks.1.")}
    state["extra.weight"] = torch.zeros(3, 4)
    message = refused(capsys, saved(tmp_path, state), "--heads", "2")
    assert "blocks.1.attn.qkv.weight should be (96, 32) and is missing" in message
    assert "extra.weight (3, 4) is unknown" in message


def test_C9_the_last_block_is_missed_where_args_name_the_model(tmp_path, capsys):
    state = facebook_state(width=384, depth=11)
    args = argparse.Namespace(model="DiT-S/2", num_classes=CLASSES)
    message = refused(capsys, saved(tmp_path, {"ema": state, "args": args}))
    assert "blocks.11.attn.qkv.weight should be (1152, 384) and is missing" in message


def test_C9_the_new_keys_are_exactly_those_of_the_shared_modulation(tmp_path, capsys):
    expert = convert(saved(tmp_path, facebook_state()), "--modulation", "single")
    line = next(x for x in capsys.readouterr().out.splitlines() if "mapped" in x)
    names = {
        name
        for name, _ in expert.model.trunk.modulation.named_parameters(prefix="trunk.modulation")
    }
    assert set(line.split("3 made new (")[1].split(")")[0].split(", ")) == names
    assert "43 keys mapped" in line and f"{2 * DEPTH + 1} dropped" in line


# ---------------------------------------------------------------- diffusers' dialect


def diffusers_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Facebook's keys as diffusers' own conversion script renames them; no position table."""
    emb = {
        "timestep_embedder.linear_1": "t_embedder.mlp.0",
        "timestep_embedder.linear_2": "t_embedder.mlp.2",
        "class_embedder.embedding_table": "y_embedder.embedding_table",
    }
    names = {"pos_embed.proj": "x_embedder.proj", "proj_out_2": "final_layer.linear"}
    names["proj_out_1"] = "final_layer.adaLN_modulation.1"
    out = {}
    for i in range(DEPTH):
        new, old = f"transformer_blocks.{i}.", f"blocks.{i}."
        names |= {f"{new}norm1.emb.{theirs}": ours for theirs, ours in emb.items()}
        names |= {
            f"{new}norm1.linear": f"{old}adaLN_modulation.1",
            f"{new}attn1.to_out.0": f"{old}attn.proj",
            f"{new}ff.net.0.proj": f"{old}mlp.fc1",
            f"{new}ff.net.2": f"{old}mlp.fc2",
        }
        for leaf in ("weight", "bias"):
            for part, rows in zip("qkv", state[f"{old}attn.qkv.{leaf}"].chunk(3), strict=True):
                out[f"{new}attn1.to_{part}.{leaf}"] = rows.clone()
    for theirs, ours in names.items():
        for leaf in ("weight", "bias"):
            if f"{ours}.{leaf}" in state:
                out[f"{theirs}.{leaf}"] = state[f"{ours}.{leaf}"].clone()
    return out


def diffusers_folder(tmp_path: Path, state: dict, pipeline: bool = False, **changes) -> Path:
    """A folder as `save_pretrained` writes it."""
    config = dict(
        _class_name="DiTTransformer2DModel",
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        in_channels=CHANNELS,
        out_channels=2 * CHANNELS,
        num_layers=DEPTH,
        sample_size=SIZE,
        patch_size=PATCH,
        num_embeds_ada_norm=CLASSES,
        activation_fn="gelu-approximate",
        norm_eps=1e-5,
    )
    folder = tmp_path / "dit" / ("transformer" if pipeline else "")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    return tmp_path / "dit"


@pytest.mark.parametrize("pipeline", [False, True])
def test_diffusers_folder_maps_to_the_same_tensors(tmp_path, pipeline):
    state = facebook_state()
    expected = convert(saved(tmp_path, state)).model
    expert = convert(diffusers_folder(tmp_path, diffusers_state(state), pipeline), heads=None)
    assert expert.model.config == expected.config
    weights = expert.model.state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in expected.state_dict().items())
    check_epsilon(expert, state)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_diffusers_file_alone_maps_to_the_same_tensors(tmp_path, suffix):
    state = facebook_state()
    file = saved(tmp_path, diffusers_state(state), f"model.{suffix}")
    check_epsilon(convert(file, "--image-size", "8"), state)


def test_embedders_of_diffusers_blocks_must_agree(tmp_path, capsys):
    state = diffusers_state(facebook_state())
    state["transformer_blocks.2.norm1.emb.class_embedder.embedding_table.weight"][3, 4] += 1e-3
    message = refused(capsys, diffusers_folder(tmp_path, state))
    assert "transformer_blocks.2.norm1.emb" in message and "differs from block 0" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(activation_fn="gelu"), "activation_fn"),
        (dict(num_layers=DEPTH + 1), f"transformer_blocks.{DEPTH}.attn1.to_q.weight"),
        (dict(num_embeds_ada_norm=9), "embedding_table.weight should be (10, 32) and is (8, 32)"),
    ],
)
def test_config_that_contradicts_the_tensors_is_refused(tmp_path, capsys, changes, words):
    folder = diffusers_folder(tmp_path, diffusers_state(facebook_state()), **changes)
    assert words in refused(capsys, folder)


def test_diffusers_class_holds_these_keys_and_computes_otherwise(tmp_path):
    """Its time frequencies are divided by 127 and one LayerNorm has eps 1e-5: measured here."""
    diffusers = pytest.importorskip("diffusers", reason="pip install 'ddm_min[peers]'")
    folder = diffusers_folder(tmp_path, diffusers_state(facebook_state()))
    model = diffusers.DiTTransformer2DModel.from_pretrained(folder).eval()
    assert model.state_dict().keys() == diffusers_state(facebook_state()).keys()
    x, n, labels = inputs()
    with torch.no_grad():
        theirs = model(x, n, labels).sample
    state = facebook_state()
    assert relative(theirs, facebook_forward(state, x, n, labels, HEADS, 127, 1e-5)) < 1e-5
    truth = facebook_forward(state, x, n, labels)
    frequencies = facebook_forward(state, x, n, labels, HEADS, 127, 1e-6)
    norm_eps = facebook_forward(state, x, n, labels, HEADS, 128, 1e-5)
    # Random weights: the embedding of time is off by a third, LayerNorm's eps hardly matters.
    assert 0.1 < relative(frequencies, truth) < 1
    assert relative(norm_eps, truth) < 1e-4
    assert relative(theirs, truth) == pytest.approx(relative(frequencies, truth), rel=1e-2)


# ---------------------------------------------------------------- what is refused


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    for contents in (
        Evil(),
        facebook_state() | {"x": Evil()},
        {"ema": facebook_state(), "args": Evil()},
    ):
        for zipped in (True, False):
            torch.save(contents, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
            message = refused(capsys, tmp_path / "m.pt", "--heads", "2")
            assert "holds posix.mkdir" in message or "holds nt.mkdir" in message
            assert "could run code, so it is refused" in message
    assert not (tmp_path / "was run").exists()


def test_C3_namespace_is_read_and_any_other_object_is_named(tmp_path, capsys):
    check_epsilon(convert(training_file(tmp_path)[0]), facebook_state(seed=1))
    (tmp_path / "other").mkdir()
    args = argparse.Namespace(results_dir=Path("results"))
    file = saved(tmp_path / "other", {"ema": facebook_state(), "args": args})
    assert "Path" in refused(capsys, file, "--heads", "2")


def test_damaged_and_renamed_files_are_refused(tmp_path, capsys):
    state = facebook_state()
    zipped = saved(tmp_path, state).read_bytes()
    plain = saved(tmp_path, state, "model.safetensors").read_bytes()
    for name, contents in {
        "truncated.pt": zipped[: len(zipped) // 2],
        "cut.pt": zipped[:-1],
        "empty.pt": b"",
        "truncated.safetensors": plain[: len(plain) // 2],
        "header.safetensors": plain[:40],
        "empty.safetensors": b"",
        "renamed.safetensors": zipped,
        "renamed.pt": plain,
        "picture.pt": b"\x89PNG\r\n\x1a\n" + bytes(99),
        "text.bin": b"hello",
    }.items():
        (tmp_path / name).write_bytes(contents)
        assert f"{tmp_path / name} is damaged or no" in refused(capsys, tmp_path / name)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([1, 2], "holds a list and no weights"),
        (torch.zeros(3), "holds a Tensor and no weights"),
        ({}, "not the weights of a DiT: the first keys are none"),
        (
            {"conv.weight": torch.zeros(3)},
            "not the weights of a DiT: the first keys are conv.weight",
        ),
        ({"blocks.999999999.x": torch.zeros(3)}, "not the weights of a DiT"),
        ({"state_dict": {"blocks.0.x": torch.zeros(3)}}, "the first keys are state_dict"),
        ({"blocks.0.x": torch.zeros(3)}, "x_embedder.proj.weight missing"),
        ({"blocks.0.x": 3, "x_embedder.proj.weight": 4}, "x_embedder.proj.weight a int"),
        (
            facebook_state() | {"blocks.0.mlp.fc1.bias": torch.zeros(7)},
            "should be (128,) and is (7,)",
        ),
        (facebook_state() | {"blocks.0.mlp.fc1.bias": 7}, "should be (128,) and is a int"),
        (
            facebook_state() | {"blocks.0.mlp.fc1.bias": torch.zeros(128, dtype=torch.int8)},
            "should be (128,) and is (128,) of torch.int8",
        ),
        (
            facebook_state() | {"final_layer.linear.weight": torch.zeros(13, 32)},
            "final_layer.linear.weight should be (12, 32) and is (13, 32)",
        ),
        (
            facebook_state() | {"x_embedder.proj.weight": torch.zeros(32, 3, 0, 0)},
            "x_embedder.proj.weight (32, 3, 0, 0)",
        ),
        (
            {k: x for k, x in facebook_state().items() if "y_embedder" not in k},
            "y_embedder.embedding_table.weight missing",
        ),
    ],
)
def test_contents_that_do_not_fit_are_named(tmp_path, capsys, contents, words):
    assert words in refused(capsys, saved(tmp_path, contents), "--heads", "2")


def test_files_that_are_not_there_or_in_the_way(tmp_path, capsys):
    assert "there is no checkpoint" in refused(capsys, tmp_path / "none.pt")
    (tmp_path / "folder").mkdir()
    assert "holds none" in refused(capsys, tmp_path / "folder")
    for name in ("a.safetensors", "b.bin"):
        (tmp_path / "folder" / name).write_bytes(b"")
    assert "holds a.safetensors, b.bin" in refused(capsys, tmp_path / "folder")
    file = saved(tmp_path, facebook_state(), "model.safetensors")
    before = file.read_bytes()
    for out in (file, tmp_path / "expert.pt"):
        with pytest.raises(SystemExit) as stop:
            convert_ckpt.main([str(file), str(out), "--heads", "2"])
        assert stop.value.code == 2
        assert "name a new file that ends in .safetensors" in capsys.readouterr().err
    assert file.read_bytes() == before and not (tmp_path / "expert.pt").exists()
    folder = diffusers_folder(tmp_path, diffusers_state(facebook_state()))
    for text in ("[1]", "not json"):
        (folder / "config.json").write_text(text)
        assert "config.json is no JSON object" in refused(capsys, folder)


# ---------------------------------------------------------------- the other outputs


def test_reinit_keeps_all_but_the_last_layer_and_flows(tmp_path):
    state = facebook_state()
    plain = convert(saved(tmp_path, state)).model.state_dict()
    expert = convert(saved(tmp_path, state), "--head", "reinit")
    assert expert.objective == FLOW
    new = expert.model.state_dict()
    differ = {name for name in plain if not torch.equal(plain[name], new[name])}
    assert differ == {
        "head.weight",
        "head.bias",
        "final_modulation.weight",
        "final_modulation.bias",
    }
    x, n, labels = inputs()
    assert torch.equal(expert.model(x, n / 999, labels), torch.zeros_like(x))
    assert plain.keys() == new.keys() and expert.model.config.time_scale == 999


def test_continuous_time_meets_the_papers_round_999_t(tmp_path):
    """z at t is that of round(999 t) for t = n / 999, and stays near it in between."""
    trunk = convert(saved(tmp_path, facebook_state())).model.trunk
    labels = torch.zeros(1000, dtype=torch.long)
    n = torch.arange(1000)
    t = torch.linspace(0, 1, 1000)
    assert torch.allclose(trunk.condition(t, labels), trunk.condition(n / 999, labels), atol=1e-4)
    between = (n[:-1] + 0.3) / 999
    off = trunk.condition(between, labels[1:]) - trunk.condition(
        torch.round(999 * between) / 999, labels[1:]
    )
    spread = trunk.condition(n / 999, labels).std(0).norm()
    assert off.norm(dim=1).max() < spread  # 0.3 of a step moves z less than its spread over times


def test_keep_changes_only_where_the_error_is_measured(tmp_path):
    state = facebook_state()
    plain = convert(saved(tmp_path, state))
    expert = convert(saved(tmp_path, state), "--head", "keep")
    assert expert.objective == Objective("eps", Betas.ddpm(), "velocity")
    weights = expert.model.state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in plain.model.state_dict().items())
    x0, n, labels = inputs()
    eps, t = torch.randn(x0.shape, generator=torch.Generator().manual_seed(4)), n / 999
    weight = loss(expert.model, x0, eps, t, labels, expert.objective) / loss(
        plain.model, x0, eps, t, labels, plain.objective
    )
    # (alpha + sigma)^2 / alpha^2: the linear path's velocity error at equal log-SNR
    table = plain.objective.schedule
    assert torch.allclose(
        weight, ((table.alpha(t) + table.sigma(t)) / table.alpha(t)) ** 2, rtol=1e-4
    )
    capped = loss(expert.model, x0, eps, t, labels, expert.objective, max_weight=2.0)
    assert (capped <= 2.001 * loss(plain.model, x0, eps, t, labels, plain.objective)).all()


def own_expert(tmp_path: Path, **changes) -> tuple[Path, Expert]:
    torch.manual_seed(0)
    config = DiTConfig(CHANNELS, (SIZE, 2 * SIZE), CLASSES, PATCH, WIDTH, DEPTH, HEADS, "per-block")
    model = DiT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    names = [f"kind {label}" for label in range(CLASSES)]
    images, labels = torch.rand(20, CHANNELS, SIZE, 2 * SIZE), torch.arange(20) % CLASSES
    stats = ShardStats.measure(images, labels, CLASSES)
    expert = Expert(model, DDPM, 2, (0.0, 0.5), stats, names, "print", 0.2, 5, 6)
    expert.save(tmp_path / "own.safetensors")
    return tmp_path / "own.safetensors", expert


def test_own_expert_as_it_is(tmp_path, capsys):
    file, own = own_expert(tmp_path)
    expert = convert(file)
    assert expert.metadata == own.metadata
    weights = expert.model.state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in own.model.state_dict().items())
    assert all(torch.equal(x, getattr(expert.stats, key)) for key, x in vars(own.stats).items())
    assert "0 made new (none), 0 dropped (none)" in capsys.readouterr().out
    assert convert(file, "--cluster", "all").cluster == "all"


@pytest.mark.parametrize(
    ("head", "objective"), [("reinit", FLOW), ("keep", Objective("eps", DDPM.schedule, "velocity"))]
)
def test_own_expert_becomes_single(tmp_path, capsys, head, objective):
    file, own = own_expert(tmp_path)
    expert = convert(file, "--modulation", "single", "--head", head)
    assert expert.objective == objective and expert.model.config.modulation == "single"
    assert (expert.cluster, expert.fingerprint, expert.label_dropout) == (2, "print", 0.2)
    assert expert.model.config.time_scale == 1000
    rows = own.model.trunk.modulation.linear.weight.chunk(DEPTH)
    assert torch.allclose(expert.model.trunk.modulation.linear.weight, sum(rows) / DEPTH, atol=1e-6)
    (tmp_path / "again").mkdir()
    (tmp_path / "out" / "expert_all.safetensors").rename(tmp_path / "again" / "single.safetensors")
    assert "AdaLN-Single already" in refused(capsys, tmp_path / "again" / "single.safetensors")


def test_own_files_that_are_no_experts_are_refused(tmp_path, capsys):
    file, own = own_expert(tmp_path)
    tensors = load_file(file)
    del tensors["model.head.bias"]
    write_file(file, "expert", tensors, own.metadata)
    assert "head.bias" in refused(capsys, file)
    write_file(file, "router", tensors, {})
    assert "is a router file" in refused(capsys, file)


# ---------------------------------------------------------------- the closed form


def random_blocks(depth: int = 5, width: int = 6, num_z: int = 40):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights, biases = draw(depth, 6 * width, width), draw(depth, 6 * width)
    return weights, biases, draw(num_z, width) @ draw(width, width) + 1


def error_of(values, shared, offsets):
    """sum_i mean_z |S_i(z) - f(z) - E_i|^2 per block; values [depth, M, 6d], shared [M, 6d]."""
    return (values - shared - offsets[:, None]).square().sum(-1).mean(1)


def test_closed_form_is_the_least_squares_optimum_over_all_functions():
    """A convex problem: its gradient in every value f(z) and every E_i is zero at the optimum."""
    weights, biases, z = random_blocks()
    values = torch.einsum("iod,md->imo", weights, z) + biases[:, None]
    weight, bias, offsets = fit_single(weights, biases, z.mean(0))
    shared = z @ weight.T + bias
    shared, offsets = shared.clone().requires_grad_(), offsets.clone().requires_grad_()
    best = error_of(values, shared, offsets).sum()
    best.backward()
    assert shared.grad.abs().max() < 1e-10 and offsets.grad.abs().max() < 1e-10
    # And against another solver: lstsq in all values f(z) and all constants E_i at once.
    depth, num_z, _ = values.shape
    design = torch.cat(
        [torch.eye(num_z).repeat(depth, 1), torch.eye(depth).repeat_interleave(num_z, 0)], dim=1
    ).double()
    solution = torch.linalg.lstsq(design, values.flatten(0, 1), driver="gelsd").solution
    assert torch.allclose(
        (design @ solution - values.flatten(0, 1)).square().sum() / num_z, best, rtol=1e-10
    )


def test_residual_from_the_moments_is_the_residual():
    weights, biases, z = random_blocks()
    values = torch.einsum("iod,md->imo", weights, z) + biases[:, None]
    mean, centered = z.mean(0), z - z.mean(0)
    weight, bias, offsets = fit_single(weights, biases, mean)
    error, power = fit_residual(weights, biases, mean, centered.T @ centered / len(z))
    assert torch.allclose(error, error_of(values, z @ weight.T + bias, offsets))
    assert torch.allclose(power, values.square().sum(-1).mean(1))
    # Any other choice of constants is worse by its distance: PixArt's, matched at one z.
    for point in z[:10]:
        _, _, other = fit_single(weights, biases, point)
        direct = error_of(values, z @ weight.T + bias, other)
        assert torch.allclose(direct, error + (other - offsets).square().sum(1))
        assert (direct >= error).all()
        at_point = torch.einsum("iod,d->io", weights, point) + biases
        assert torch.allclose(at_point, weight @ point + bias + other)  # exact there


def test_blocks_that_differ_by_constants_become_single_exactly():
    weights, biases, z = random_blocks()
    weights = weights[:1].expand(5, -1, -1)
    weight, bias, offsets = fit_single(weights, biases, z.mean(0))
    values = torch.einsum("iod,md->imo", weights, z) + biases[:, None]
    assert torch.allclose(values, z @ weight.T + bias + offsets[:, None])


def test_script_fits_over_times_and_classes_and_prints_each_block(tmp_path, capsys):
    """The file's E_i and the printed residual, recomputed from the network's own modulation."""
    file = saved(tmp_path, facebook_state())
    plain = convert(file).model.trunk
    labels = torch.arange(CLASSES + 1).repeat(convert_ckpt.NUM_TIMES)
    z = plain.condition(
        torch.linspace(0, 1, convert_ckpt.NUM_TIMES).repeat_interleave(CLASSES + 1), labels
    )
    values = plain.modulation(z)  # depth b 6 1 d
    plain.config = replace(plain.config, num_classes=0)
    z_500 = plain.condition(torch.tensor([500 / 999]), torch.tensor([0]))
    for column, (match, point) in enumerate({"mean": z, "t500": z_500}.items()):
        capsys.readouterr()
        single = convert(file, "--modulation", "single", "--match", match).model.trunk
        lines = [x.split() for x in capsys.readouterr().out.splitlines() if "  block" in x]
        error = (single.modulation(z) - values).flatten(2).square().sum(-1).mean(1)
        power = values.flatten(2).square().sum(-1).mean(1)
        printed = torch.tensor([float(words[2 + column]) for words in lines])
        assert len(lines) == DEPTH and torch.allclose(printed, (error / power).sqrt(), atol=1e-3)
        mean_error = (single.modulation(point) - plain.modulation(point)).mean(1)
        assert mean_error.abs().max() < 1e-4  # right on average, or right at t = 500


# ---------------------------------------------------------------- what comes after


def digits_checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path, facebook_state(channels=1, classes=10))


def train(run: Path, *options) -> Expert:
    arguments = ["--data", "digits", "--cluster", "all", "--steps", "2", "--batch-size", "4"]
    train_expert.main([*arguments, "--run", str(run), "--lr", "0", *map(str, options)])
    return Expert.load(run / "expert_all.safetensors")


@pytest.mark.parametrize(
    ("head", "modulation"),
    [(None, "per-block"), ("keep", "per-block"), ("reinit", "per-block"), ("keep", "single")],
)
def test_training_starts_from_any_converted_file(tmp_path, head, modulation):
    options = ["--modulation", modulation, *(["--head", head] if head else [])]
    init = convert(digits_checkpoint(tmp_path), *options)
    file = tmp_path / "out" / "expert_all.safetensors"
    trained = train(tmp_path / "run", "--init", file)  # at learning rate 0
    assert trained.objective == init.objective and trained.model.config == init.model.config
    weights = trained.model.state_dict()
    assert all(torch.allclose(x, weights[key]) for key, x in init.model.state_dict().items())
    assert trained.stats is not None and trained.step == 2
    if head == "keep":
        assert train(tmp_path / "flow", "--init", file, "--objective", "flow").objective == FLOW


def test_training_moves_on_from_the_init(tmp_path):
    init = convert(digits_checkpoint(tmp_path), "--head", "keep")
    file = tmp_path / "out" / "expert_all.safetensors"
    trained = train(tmp_path / "run", "--init", file, "--lr", "1e-3", "--warmup", "0")
    change = [
        relative(x, init.model.state_dict()[key]) for key, x in trained.model.state_dict().items()
    ]
    assert 0 < max(change) < 0.1


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        (dict(channels=3, classes=10), [], "image_shape (3, 8, 8) and not (1, 8, 8)"),
        (dict(channels=1, classes=10, size=16), [], "image_shape (1, 16, 16) and not (1, 8, 8)"),
        (dict(channels=1, classes=7), [], "num_classes 7 and not 10"),
        (dict(channels=1, classes=10), ["--model", "tiny"], "width 32 and not 64"),
        (dict(channels=1, classes=10), ["--modulation", "single"], "per-block and not single"),
        (
            dict(channels=1, classes=10),
            ["--schedule", "cosine"],
            "--schedule belongs to --objective",
        ),
    ],
)
def test_init_that_does_not_fit_is_refused(tmp_path, capsys, sizes, options, words):
    convert(saved(tmp_path, facebook_state(**sizes)))
    with pytest.raises(SystemExit) as stop:
        train(tmp_path / "run", "--init", tmp_path / "out" / "expert_all.safetensors", *options)
    assert stop.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_init_with_other_class_names_is_refused(tmp_path, capsys):
    expert = convert(digits_checkpoint(tmp_path))
    expert.class_names = [*"012345678", "nine"]
    expert.save(tmp_path / "named.safetensors")
    with pytest.raises(SystemExit):
        train(tmp_path / "run", "--init", tmp_path / "named.safetensors")
    assert "class 'nine' and not '9'" in capsys.readouterr().err


def test_converted_expert_joins_an_ensemble_and_samples(tmp_path, capsys):
    """Next to a flow expert, through the aligned conversion, untrained; and by the script."""
    converted = convert(digits_checkpoint(tmp_path), "--cluster", "1")
    assert converted.cluster == 1 and converted.class_names == list("0123456789")
    flow = train(tmp_path / "flow")
    flow.cluster = 0
    counts = torch.full((2, 10), 5)
    ensemble = Ensemble([flow, converted], prior_router(counts, 10), counts=counts, num_classes=10)
    seeds = [(0, index) for index in range(6)]
    field = ensemble.field(torch.arange(6), "coupled", 1.5, seeds)
    images = sample(field, start_noise((1, 8, 8), seeds), 4)
    assert images.isfinite().all() and field.forwards == 4 * 6 * 2

    convert(digits_checkpoint(tmp_path))
    out = tmp_path / "out" / "samples.npz"
    options = ["--num", "10", "--num-steps", "3", "--router", "prior", "--out", str(out)]
    sample_script.main([str(tmp_path / "out"), *options])
    assert np.load(out)["arr_0"].shape == (10, 8, 8, 1)
