"""The DiT backbone: published sizes, patches, positions, time, labels, modulation."""

import math

import numpy as np
import pytest
import torch

from ddm_min.dit import GELU, PRESETS, DiT, DiTConfig, patchify, position_table, unpatchify


def randomised(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill every parameter with noise: an untrained DiT is zero, and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def small_config(**changes) -> DiTConfig:
    """B, C, H, W, patch and class count all different in the tests below."""
    usual = dict(
        in_channels=3, image_size=(8, 12), num_classes=5, patch_size=2, width=16, depth=2, heads=4
    )
    return DiTConfig(**usual | changes)


def inputs(batch: int = 7, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_t = torch.randn(batch, 3, 8, 12, generator=generator)
    t = torch.rand(batch, generator=generator)
    return x_t, t, torch.arange(batch) % 5


# In millions, from design.md: 4 latent channels, 1,000 classes, learned sigma.
PUBLISHED = {
    "DiT-S/2": (32.9, 23.1),
    "DiT-B/2": (130.3, 91.4),
    "DiT-L/2": (457.8, 313.1),
    "DiT-XL/2": (674.8, 459.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("modulation", ["per-block", "single"])
def test_parameter_count_is_the_published_one(name, modulation):
    with torch.device("meta"):  # shapes without memory
        config = DiTConfig(4, (32, 32), 1000, modulation=modulation, **PRESETS[name])
        model = DiT(config)
    # The published models also predict sigma: as many head outputs again, 4 p^2 (width + 1).
    learned_sigma = 4 * config.patch_size**2 * (config.width + 1)
    millions = (sum(p.numel() for p in model.parameters()) + learned_sigma) / 1e6
    expected = PUBLISHED[name][modulation == "single"]
    assert abs(millions - expected) <= 0.05, (name, modulation, millions)  # printed to one decimal


def test_fixed_position_table_makes_the_count_675_1():
    with torch.device("meta"):
        model = DiT(DiTConfig(4, (32, 32), 1000, modulation="per-block", **PRESETS["DiT-XL/2"]))
    learned_sigma = 4 * 2 * 2 * (1152 + 1)
    count = sum(p.numel() for p in model.parameters()) + model.trunk.positions.numel()
    assert abs((count + learned_sigma) / 1e6 - 675.1) <= 0.05


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("modulation", ["per-block", "single"])
def test_every_preset_has_the_count_of_the_formula(name, modulation):
    """Layer by layer in plain arithmetic, for all presets and patch sizes."""
    with torch.device("meta"):
        config = DiTConfig(3, (32, 64), 10, modulation=modulation, **PRESETS[name])
        model = DiT(config)
    d, depth, p = config.width, config.depth, config.patch_size
    block = (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    modulations = depth * 6 * d * (d + 1) if modulation == "per-block" else 6 * d * (d + 1 + depth)
    embeddings = (3 * p * p + 1) * d + (256 + 1) * d + (d + 1) * d + (10 + 1) * d
    head = 2 * d * (d + 1) + 3 * p * p * (d + 1)
    assert sum(x.numel() for x in model.parameters()) == (
        depth * block + modulations + embeddings + head
    )


def test_patches_are_cut_row_by_row_with_channels_first():
    images = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    patches = patchify(images, 2)
    assert patches.shape == (2, 2 * 3, 3 * 4)
    by_hand = [images[1, c, 2 + p, 4 + q] for c in range(3) for p in range(2) for q in range(2)]
    assert patches[1, 1 * 3 + 2].tolist() == [float(x) for x in by_hand]


def test_unpatchify_inverts_patchify_on_a_non_square_image():
    images = torch.randn(2, 3, 8, 20)
    rows = patchify(images, 4).reshape(2, 2 * 5, 3, 16)
    channels_last = rows.permute(0, 1, 3, 2).flatten(2)  # the head has channels last, as in DiT
    assert torch.equal(unpatchify(channels_last, 4, (8, 20)), images)


@pytest.mark.parametrize("modulation", ["per-block", "single"])
def test_untrained_network_outputs_zero(modulation):
    output = DiT(small_config(modulation=modulation))(*inputs())
    assert output.shape == (7, 3, 8, 12)
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("modulation", ["per-block", "single"])
def test_untrained_blocks_are_the_identity(modulation):
    model = DiT(small_config(modulation=modulation))
    x_t, t, labels = inputs()
    tokens, _ = model.trunk(x_t, t, labels)
    embedded = model.trunk.patch_embed(patchify(x_t, 2)) + model.trunk.positions
    assert torch.equal(tokens, embedded)


def time_embedding(t: float, time_scale: float) -> torch.Tensor:
    """What a model's time network is fed with at t."""
    seen = []
    model = DiT(small_config(time_scale=time_scale))
    model.trunk.time_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.zeros(1, 3, 8, 12), torch.tensor([t]), torch.tensor([0]))
    return seen[0][0]


def test_D5_time_is_scaled_so_that_the_network_can_tell_times_apart():
    def similarity(scale):
        pair = [time_embedding(t, scale) for t in (0.1, 0.9)]
        return torch.cosine_similarity(*pair, dim=0).item()

    assert DiTConfig(1, (4, 4)).time_scale == 1000
    assert similarity(1000.0) == pytest.approx(0.19, abs=0.01)
    assert similarity(1.0) == pytest.approx(0.98, abs=0.01)  # the mistake


def test_D5_table_index_and_time_meet_in_the_same_embedding():
    """Weights of an N-step table know step n as the embedding of n: t = n / (N - 1) gives it."""
    num_steps, n = 1000, 737
    embedding = time_embedding(n / (num_steps - 1), float(num_steps - 1))
    frequencies = np.exp(-math.log(10000) * np.arange(128) / 128)
    by_hand = np.concatenate([np.cos(n * frequencies), np.sin(n * frequencies)])  # cosines first
    # float32 keeps 24 bits of an angle up to 737: about 1e-4
    assert np.abs(embedding.numpy() - by_hand).max() < 2e-4


def test_null_label_has_a_row_of_its_own():
    model = randomised(DiT(small_config()))
    x_t, t, labels = inputs()
    null = torch.full_like(labels, 5)
    with_labels, without = model(x_t, t, labels), model(x_t, t, null)
    with torch.no_grad():
        model.trunk.label_embed.weight[5] += 1
    assert torch.equal(model(x_t, t, labels), with_labels)
    assert not torch.allclose(model(x_t, t, null), without, atol=1e-3)


def test_label_and_time_reach_the_output():
    model = randomised(DiT(small_config()))
    x_t, t, labels = inputs()
    output = model(x_t, t, labels)
    assert not torch.allclose(output, model(x_t, t, (labels + 1) % 5), atol=1e-3)
    assert not torch.allclose(output, model(x_t, 1 - t, labels), atol=1e-3)


def test_unconditional_network_ignores_labels():
    model = randomised(DiT(small_config(num_classes=0)))
    x_t, t, labels = inputs()
    assert not hasattr(model.trunk, "label_embed")
    assert torch.equal(model(x_t, t, labels), model(x_t, t, torch.zeros_like(labels)))


def test_rows_of_a_batch_do_not_touch_each_other():
    model = randomised(DiT(small_config()))
    x_t, t, labels = inputs()
    alone = torch.cat([model(x_t[i : i + 1], t[i : i + 1], labels[i : i + 1]) for i in range(7)])
    # sums of float32 in another order: values of order 10, so about 1e-6 of that
    assert torch.allclose(model(x_t, t, labels), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "near"), [((30, 32), "28 or 32"), ((32, 30), "28 or 32")])
def test_D14_image_size_not_divisible_by_the_patch_size(size, near):
    with pytest.raises(ValueError, match=r"image size 30 .* patch size 4") as error:
        DiTConfig(3, size, patch_size=4)
    assert near in str(error.value)


@pytest.mark.parametrize("changes", [dict(width=18), dict(heads=3), dict(modulation="both")])
def test_impossible_shapes_are_refused(changes):
    with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
        small_config(**changes)


def test_single_and_per_block_modulation_agree_where_the_offsets_encode_it():
    """S_i(z) = W z + b + E_i is the per-block S_i(z) = W_i z + b_i with W_i = W, b_i = b + E_i."""
    single = randomised(DiT(small_config(modulation="single", depth=3))).double()
    per_block = DiT(small_config(modulation="per-block", depth=3)).double()
    weights = single.state_dict()
    shared, bias = (weights.pop(f"trunk.modulation.linear.{x}") for x in ("weight", "bias"))
    offsets = weights.pop("trunk.modulation.offsets")
    weights["trunk.modulation.linear.weight"] = torch.cat([shared] * 3)
    weights["trunk.modulation.linear.bias"] = torch.cat([bias + offset for offset in offsets])
    per_block.load_state_dict(weights)
    x_t, t, labels = inputs()
    x_t, t = x_t.double(), t.double()
    a, b = single(x_t, t, labels), per_block(x_t, t, labels)
    assert (a - b).abs().max() < 1e-10 * a.abs().max()  # float64, other order of sums


def test_order_of_shift_scale_and_gate_is_that_of_dit():
    """DiT's weights hold shift, scale, gate of attention, then of the mlp: one block by hand."""
    model = randomised(DiT(small_config(modulation="per-block", depth=1))).double()
    trunk, block = model.trunk, model.trunk.blocks[0]
    x_t, t, labels = (x.double() if x.is_floating_point() else x for x in inputs(batch=2))
    z = trunk.condition(t, labels)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
        part[:, None] for part in trunk.modulation.linear(z).split(16, dim=1)
    )

    def norm(x):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def attention(x):
        q, k, v = (y.reshape(2, 24, 4, 4).transpose(1, 2) for y in block.qkv(x).split(16, dim=2))
        weights = (q @ k.transpose(2, 3) / math.sqrt(4)).softmax(-1)
        return block.proj((weights @ v).transpose(1, 2).reshape(2, 24, 16))

    x = trunk.patch_embed(patchify(x_t, 2)) + trunk.positions
    x = x + gate_1 * attention(norm(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * block.mlp(norm(x) * (1 + scale_2) + shift_2)
    tokens, _ = trunk(x_t, t, labels)
    assert torch.allclose(tokens, x, rtol=1e-9, atol=1e-9)


def positions_of_facebook_dit(height: int, width: int, size: int) -> np.ndarray:
    """get_2d_sincos_pos_embed, written anew: sines, cosines of columns, then of rows."""
    table = np.zeros((height * width, size))
    quarter = size // 4
    for row in range(height):
        for column in range(width):
            for i in range(quarter):
                omega = 1 / 10000 ** (i / quarter)
                entry = table[row * width + column]
                entry[i] = math.sin(column * omega)
                entry[quarter + i] = math.cos(column * omega)
                entry[2 * quarter + i] = math.sin(row * omega)
                entry[3 * quarter + i] = math.cos(row * omega)
    return table


@pytest.mark.parametrize(("height", "width", "size"), [(4, 4, 16), (3, 5, 24), (16, 16, 64)])
def test_position_table_is_that_of_facebook_dit(height, width, size):
    ours = position_table(height, width, size)
    # positions up to 16, frequencies rounded to float32: 16 * 6e-8, and the table's own rounding
    assert np.abs(ours.numpy() - positions_of_facebook_dit(height, width, size)).max() < 5e-6


def test_compiled_gelu_is_the_same_function(monkeypatch):
    """Both ways to write it, value and slope; five roundings of numbers up to 10."""
    x = torch.linspace(-10, 10, 2001, dtype=torch.float64, requires_grad=True)

    def value_and_slope():
        y = GELU()(x)
        return y, *torch.autograd.grad(y.sum(), x)

    eager = value_and_slope()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = value_and_slope()
    assert not torch.equal(eager[0], compiled[0])  # the other branch was taken
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-14)
