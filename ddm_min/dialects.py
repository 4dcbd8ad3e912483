"""What other people call the weights of a DiT: their keys and shapes, and ours.

A layout says which keys of a checkpoint are the rows of each of our parameters, one after the
other: one key as a rule, all blocks for the modulation, and q, k, v where diffusers splits them.
Facebook's network trained the published weights and is the truth: chunks of the modulation in the
order shift, scale, gate (attention, then mlp), patches as (c p q) going in and (p q c) coming out.
diffusers' class computes with time frequencies divided by 127 where facebook's divides by 128, and
with eps 1e-5 in the second LayerNorm of a block where facebook's has 1e-6; the weights are equal.
"""

import math
import re

import torch
from torch import Tensor

from ddm_min.dit import SIZES, DiTConfig, position_table

FACEBOOK = {
    "trunk.patch_embed": "x_embedder.proj",
    "trunk.time_embed.0": "t_embedder.mlp.0",
    "trunk.time_embed.2": "t_embedder.mlp.2",
    "trunk.label_embed": "y_embedder.embedding_table",
    "trunk.blocks.*.qkv": "blocks.*.attn.qkv",
    "trunk.blocks.*.proj": "blocks.*.attn.proj",
    "trunk.blocks.*.mlp.0": "blocks.*.mlp.fc1",
    "trunk.blocks.*.mlp.2": "blocks.*.mlp.fc2",
    "trunk.modulation.linear": "blocks.*.adaLN_modulation.1",
    "final_modulation": "final_layer.adaLN_modulation.1",
    "head": "final_layer.linear",
    "positions": "pos_embed",
}
EMBEDDER = "transformer_blocks.0.norm1.emb."  # diffusers has a copy in every block
DIFFUSERS = {
    "trunk.patch_embed": "pos_embed.proj",
    "trunk.time_embed.0": EMBEDDER + "timestep_embedder.linear_1",
    "trunk.time_embed.2": EMBEDDER + "timestep_embedder.linear_2",
    "trunk.label_embed": EMBEDDER + "class_embedder.embedding_table",
    "trunk.blocks.*.qkv": "transformer_blocks.*.attn1.to_q to_k to_v",
    "trunk.blocks.*.proj": "transformer_blocks.*.attn1.to_out.0",
    "trunk.blocks.*.mlp.0": "transformer_blocks.*.ff.net.0.proj",
    "trunk.blocks.*.mlp.2": "transformer_blocks.*.ff.net.2",
    "trunk.modulation.linear": "transformer_blocks.*.norm1.linear",
    "final_modulation": "proj_out_1",
    "head": "proj_out_2",
    "positions": "pos_embed.pos_embed",
}


def source_keys(name: str, layout: dict[str, str], depth: int) -> list[str]:
    """Where the rows of our parameter `name` lie: "head.bias" -> ["final_layer.linear.bias"]."""
    module, _, leaf = name.rpartition(".")
    blocks = re.findall(r"(?<=blocks\.)\d+", module) or range(depth)
    first, *others = layout[re.sub(r"(?<=blocks\.)\d+", "*", module)].split()
    places = [first] + [f"{first.rpartition('.')[0]}.{other}" for other in others]
    filled = [place.replace("*", str(block)) for block in blocks for place in places]
    return [f"{place}.{leaf}" for place in dict.fromkeys(filled)]


def shape_of(x) -> str:
    """ "(64, 16)"; for what is no tensor of floats, what it is instead."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape)) + ("" if x.is_floating_point() else f" of {x.dtype}")
    return x if x == "missing" else f"a {type(x).__name__}"


def read_architecture(
    state: dict, hints: dict, heads: int | None, image_size: int | None
) -> tuple[DiTConfig, dict[str, str]]:
    """(config, layout), from the shapes of the tensors. Raises ValueError for what they leave open.

    heads and image_size, where given, come before hints; known widths tell their heads.
    """
    blocks = [int(block) for key in state for block in re.findall(r"blocks\.(\d+)\.", key)]
    if not blocks or max(blocks) >= len(state):
        keys = ", ".join(list(state)[:3]) or "none"
        raise ValueError(f"these are not the weights of a DiT: the first keys are {keys}")
    layout = DIFFUSERS if any("transformer_blocks." in key for key in state) else FACEBOOK
    needed = [layout["trunk.patch_embed"] + ".weight", layout["trunk.label_embed"] + ".weight"]
    try:
        (width, channels, patch_size, _), (rows, _) = (state[key].shape for key in needed)
        assert min(width, channels, patch_size, rows) > 0
    except (KeyError, AttributeError, ValueError, AssertionError):
        found = (f"{key} {shape_of(state.get(key, 'missing'))}" for key in needed)
        raise ValueError(
            f"the network's shape cannot be read: {' and '.join(found)} should have 4 and 2 axes"
        ) from None

    known = {size["width"]: size["heads"] for size in SIZES.values()}
    heads = heads or hints.get("heads") or known.get(width)
    if heads is None:
        raise ValueError(f"width {width} is none of DiT's: say --heads, which no tensor tells")
    image_size = image_size or hints.get("image_size")
    table = getattr(state.get(layout["positions"]), "shape", ())
    if image_size is None and len(table) == 3:
        image_size = math.isqrt(table[1]) * patch_size
    if image_size is None:
        raise ValueError("the file has no position table: say --image-size (latents: a side / 8)")
    config = DiTConfig(
        channels,
        (image_size, image_size),
        hints.get("num_classes", rows - 1),  # the last row is the null class
        patch_size,
        width,
        hints.get("depth", 1 + max(blocks)),
        heads,
        "per-block",
        time_scale=999.0,
    )
    return config, layout


def match(
    state: dict, layout: dict[str, str], config: DiTConfig, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, list[str]], list[str]]:
    """(the keys of each of our parameters, the keys that nothing needs); every key is explained.

    shapes: of our parameters. Raises ValueError that names each key which is missing, unknown or of
    another shape, with both shapes.
    """
    plan = {name: source_keys(name, layout, config.depth) for name in shapes}
    expected = {
        key: (shapes[name][0] // len(keys), *shapes[name][1:])
        for name, keys in plan.items()
        for key in keys
    }
    size = config.patch_size
    expected[plan["trunk.patch_embed.weight"][0]] = (config.width, config.in_channels, size, size)
    for (key,) in (plan["head.weight"], plan["head.bias"]):
        doubled = (2 * expected[key][0], *expected[key][1:])  # learned sigma
        if shape_of(state.get(key)) == str(doubled):
            expected[key] = doubled
    tokens = math.prod(config.image_size) // size**2
    positions = layout["positions"]
    copies = {
        key.replace(".0.", f".{block}.", 1): key
        for key in expected
        if key.startswith(EMBEDDER)
        for block in range(1, config.depth)
    }
    expected |= {copy: expected[key] for copy, key in copies.items()}
    expected |= {positions: (1, tokens, config.width)} if positions in state else {}

    wrong = [
        f"{key} should be {shape} and is {shape_of(state.get(key, 'missing'))}"
        for key, shape in expected.items()
        if shape_of(state.get(key)) != str(shape)
    ]
    unknown = [f"{key} {shape_of(x)} is unknown" for key, x in state.items() if key not in expected]
    if wrong or unknown:
        listed = wrong[:8] + unknown[:8]
        more = len(wrong + unknown) - len(listed)
        raise ValueError("; ".join(listed) + (f"; and {more} more keys do not fit" if more else ""))
    for copy, key in copies.items():
        if not torch.equal(state[copy], state[key]):
            raise ValueError(f"{copy} differs from block 0's: this block embeds time or class anew")
    if positions in state:
        check_positions(state[positions], config)
    return plan, [key for key in state if key in copies or key == positions]


def check_positions(stored: Tensor, config: DiTConfig) -> None:
    """Raise ValueError unless the stored table is the fixed one, which we compute ourselves."""
    height, width = (size // config.patch_size for size in config.image_size)
    error = (stored[0].float() - position_table(height, width, config.width)).abs().max().item()
    if not error <= max(1e-4, torch.finfo(stored.dtype).eps):
        raise ValueError(f"the position table is not DiT's fixed one: it differs by {error:.2g}")


def cut_variance(rows: Tensor, channels: int, patch_size: int) -> Tensor:
    """Drop the learned variance from the head's rows, [p^2 2C, ...] -> [p^2 C, ...].

    Rows run over pixels of the patch, then channels: each pixel has C of the mean and C of the
    variance, so the first half of the rows would be all channels of half of the pixels.
    """
    return rows.unflatten(0, (patch_size**2, -1))[:, :channels].flatten(0, 1)
