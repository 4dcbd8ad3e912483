"""Turn a DiT checkpoint into an expert: facebook's .pt, diffusers' folder, or an expert of ours.

    python convert_ckpt.py DiT-XL-2-256x256.pt runs/dit/expert_all.safetensors
    python convert_ckpt.py DiT-XL-2-256x256.pt start.safetensors --head keep --modulation single
    python train_expert.py --init start.safetensors --data npz:x.npz --run runs/dit --cluster 0

As it is, the expert predicts eps on DDPM's beta table exactly as the checkpoint does: t = n / 999
reaches the network as the trained integer n (`time_scale` 999), and learned variance is dropped.
Latents are to be scaled as the checkpoint's were: 0.18215 times those of the autoencoder.

    --head keep      the same network and eps; the loss of further training is that of velocity
    --head reinit    HDDM's start for flow matching: all kept but the last layer, which is zero.
                     Its time is the paper's round(999 t), without the rounding: both agree at
                     t = n / 999, and in between the sinusoids of 999 t move on smoothly.
    --modulation single    AdaLN-Single, the closest in least squares: see adaln_single.py
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ddm_min import checkpoint, dialects
from ddm_min.adaln_single import fit_residual, fit_single
from ddm_min.cli import not_negative, one_sentence_errors, positive
from ddm_min.dit import DiT, DiTConfig, Trunk
from ddm_min.expert import Expert, described_by, part, read_file
from ddm_min.fid import FeatureStats
from ddm_min.objectives import FLOW, Objective
from ddm_min.schedule import Betas, Linear

MODULATION = "trunk.modulation.linear"
SINGLE = (f"{MODULATION}.weight", f"{MODULATION}.bias", "trunk.modulation.offsets")
LAST_LAYER = ("head.weight", "head.bias", "final_modulation.weight", "final_modulation.bias")
NUM_TIMES = 112  # every ninth of 1,000: over these and all classes the shared modulation is fitted


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a .pt, .bin or .safetensors file, or diffusers' folder")
    add("out", type=Path, help="the expert file to write, as RUN/expert_all.safetensors")
    add("--modulation", default="per-block", choices=("per-block", "single"))
    add("--head", choices=("keep", "reinit"), help="how to go on with flow matching; see above")
    matches = "single: what the blocks' offsets match, the mean over times and classes or, as "
    matches += "PixArt-alpha does, t = 500 without class; default: mean"
    add("--match", default="mean", choices=("mean", "t500"), help=matches)
    add("--raw", action="store_true", help="the raw weights of a training file, not their EMA")
    add("--heads", type=positive, help="attention heads, where the width is none of DiT's")
    add("--image-size", type=positive, help="what the network sees; latents: a side / 8")
    add("--cluster", type=cluster, help="the cluster that it is to answer for; default: all")
    return parser.parse_args(argv)


def cluster(text: str) -> int | str:
    """argparse type: a number from 0, or all."""
    return text if text == "all" else not_negative(text)


def empty_model(config: DiTConfig) -> DiT:
    """Names and shapes of a network, without memory for its numbers."""
    with torch.device("meta"):
        return DiT(config)


def shapes_of(model: DiT) -> dict[str, tuple[int, ...]]:
    """{"head.bias": (16,), ...}."""
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


def load(file: Path, args: argparse.Namespace) -> tuple[Expert, dict, dict, list[str], str]:
    """(expert with an empty model, tensors by their keys, keys of each of our parameters, keys that
    nothing needs, which weights they are). The tensors are memory-mapped."""
    if checkpoint.is_ours(file):
        tensors, metadata = read_file(file, "expert")
        with described_by(file, "an expert"):
            state, config = part("model", tensors), DiTConfig(**metadata["config"])
            empty_model(config).load_state_dict(state, assign=True)  # raises where they do not fit
            expert = Expert.of(empty_model(config), metadata, part("stats", tensors))
        if config.modulation == "single":
            raise ValueError(f"{file} has AdaLN-Single already: what is converted is per-block")
        return expert, state, {name: [name] for name in state}, [], "EMA"

    state, which, hints = checkpoint.read(file, args.raw)
    config, layout = dialects.read_architecture(state, hints, args.heads, args.image_size)
    model = empty_model(config)
    plan, unneeded = dialects.match(state, layout, config, shapes_of(model))
    expert = Expert(
        model,
        Objective("eps", Betas.ddpm()),
        class_names=[str(label) for label in range(config.num_classes)],  # the file has no names
        label_dropout=0.1,  # DiT's, for guidance
        latents=config.in_channels not in (1, 3),
    )
    return expert, state, plan, unneeded, which


@torch.no_grad()
def conditions(config: DiTConfig, embedders: dict[str, Tensor], t: Tensor) -> Iterator[Tensor]:
    """z of every time in t [T], for all classes and the null class: T times [num_classes + 1, d].

    embedders: time_embed.*, and label_embed.* where there are classes.
    """
    with torch.device("meta"):
        trunk = Trunk(replace(config, depth=1))
    trunk.load_state_dict(embedders, strict=False, assign=True)
    labels = torch.arange(config.num_classes + 1)
    for time in t:
        yield trunk.condition(time.expand(len(labels)), labels)


def share_modulation(expert: Expert, state: dict, plan: dict, match: str) -> dict[str, Tensor]:
    """AdaLN-Single's three tensors in place of the blocks' own, which leave the plan.

    Prints what they leave unexplained of each block's modulation, relative to its size.
    """
    config = expert.model.config
    depth = config.depth
    weights, biases = (
        [state[key] for key in plan[name]] if plan[name][1:] else state[plan[name][0]].chunk(depth)
        for name in (f"{MODULATION}.weight", f"{MODULATION}.bias")
    )
    embedders = {
        name.removeprefix("trunk."): state[keys[0]].float()
        for name, keys in plan.items()
        if "_embed." in name and "patch" not in name
    }
    ends = Linear().log_snr(torch.tensor(expert.time_interval))
    low, high = expert.objective.schedule.time_at(ends).tolist()
    stats = FeatureStats(config.width)
    for z in conditions(config, embedders, torch.linspace(low, high, NUM_TIMES)):
        stats.update(z)
    mean = stats.mean.float()
    error, power = fit_residual(weights, biases, mean, stats.cov.float())
    best = fit_single(weights, biases, mean)

    at_500 = torch.tensor([500 / config.time_scale])
    (z,) = conditions(replace(config, num_classes=0), embedders, at_500)
    pixart = fit_single(weights, biases, z[0])
    pixart_error = error + (pixart[2] - best[2]).square().sum(1)
    print("modulation left unexplained, relative: by the closed form, by matching t = 500")
    for block, (a, b, of) in enumerate(zip(error, pixart_error, power, strict=True)):
        print(f"  block {block:2}   {(a / of).sqrt():.4f}   {(b / of).sqrt():.4f}")
    return dict(zip(SINGLE, best if match == "mean" else pixart, strict=True))


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    file = checkpoint.find(args.checkpoint)
    if args.out.suffix != ".safetensors" or args.out.resolve() == file.resolve():
        raise ValueError(f"cannot write to {args.out}: name a new file that ends in .safetensors")
    expert, state, plan, dropped, which = load(file, args)
    config = expert.model.config
    shapes = shapes_of(expert.model)

    # Make the new tensors. The keys that they replace are dropped from the plan.
    new, replaced = {}, []
    if args.modulation == "single":
        new |= share_modulation(expert, state, plan, args.match)
        replaced += [name for name in plan if name.startswith(MODULATION)]
        expert.model = empty_model(replace(config, modulation="single"))
    if args.head == "reinit":
        new |= {name: torch.zeros(shapes[name]) for name in LAST_LAYER}
        replaced += LAST_LAYER
        expert.objective = FLOW
    if args.head == "keep":
        expert.objective = replace(expert.objective, loss_space="velocity")
    dropped += [key for name in replaced for key in plan.pop(name)]

    # Map the rest. Pages of a mapped file count as our memory once they were read, so the file is
    # let go and mapped anew after the parts have been joined, and nothing lies in memory twice.
    weights = {n: torch.cat([state[key] for key in keys]) for n, keys in plan.items() if keys[1:]}
    state = None
    state = load(file, args)[1]
    cut = 0
    for name, keys in plan.items():
        if not keys[1:]:
            rows = state[keys[0]]
            if len(rows) > shapes[name][0]:  # only the head's, by `match`
                rows = dialects.cut_variance(rows, config.in_channels, config.patch_size)
                cut += 1
            weights[name] = rows.reshape(shapes[name])  # a convolution's kernel is a matrix
    expert.cluster = expert.cluster if args.cluster is None else args.cluster
    expert.save(args.out, weights | new)

    patterns = sorted({re.sub(r"blocks\.\d+", "blocks.*", key) for key in dropped})
    mapped = sum(map(len, plan.values()))
    print(
        f"{which} weights: {mapped} keys mapped{' (2 without learned variance)' if cut else ''}, "
        f"{len(new)} made new ({', '.join(new) or 'none'}), "
        f"{len(dropped)} dropped ({', '.join(patterns) or 'none'})"
    )
    print(f"wrote {args.out}: {expert.objective.prediction}, {expert.model.config}")


if __name__ == "__main__":
    main()
