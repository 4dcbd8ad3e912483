"""What a mixture step costs beside one expert: rows per image and time, side by side in one run.

    python benchmarks/mixture_step.py
    python benchmarks/mixture_step.py --model DiT-S/2 --image-size 32 --batch-size 64

Every K has K experts of one shape with random weights and the default router, whose last layer is
random too, so that images spread over the clusters. A round times a single expert, the router
alone, and one mixture step of each strategy, one after the other; what is printed is the median
over rounds of the ratio to the single expert of the same round, which a noisy machine leaves alone.
"""

import argparse
import statistics
import time

import torch

from ddm_min.dit import PRESETS, DiT, DiTConfig
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert
from ddm_min.objectives import DDPM, FLOW
from ddm_min.router import LearnedRouter, ShardStats

STRATEGIES = ("full", "top-1", "coupled")


def seconds(call) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def randomize(network):
    """Random weights also where training starts from zero, so that no product is trivial."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return network.eval().requires_grad_(False)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", choices=PRESETS)
    parser.add_argument("--router", default="router", choices=PRESETS)
    parser.add_argument("--image-size", type=int, default=8)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="1 is the least noisy")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = dict(in_channels=args.channels, image_size=(args.image_size,) * 2, num_classes=10)
    x_t = torch.randn(args.batch_size, args.channels, args.image_size, args.image_size)
    t = torch.full((args.batch_size,), 0.7)
    labels = torch.arange(args.batch_size) % 10
    images = x_t.clamp(-1, 1)
    print(f"{args.model}, batch {args.batch_size}, {args.threads} thread(s): ratios to one expert")
    print("| K | router alone | " + " | ".join(f"{s}: rows, time" for s in STRATEGIES) + " |")
    print("|" + "---|" * (2 + len(STRATEGIES)))
    for num_clusters in (2, 4, 8):
        experts = [
            Expert(
                randomize(DiT(DiTConfig(**shape, **PRESETS[args.model]))),
                FLOW if k % 2 else DDPM,
                k,
                stats=ShardStats.measure(images, labels, 10),
            )
            for k in range(num_clusters)
        ]
        router = LearnedRouter(DiTConfig(**shape, **PRESETS[args.router]), num_clusters)
        randomize(router)
        ensemble = Ensemble(experts, router, num_classes=10)
        fields = {strategy: ensemble.field(labels, strategy) for strategy in STRATEGIES}
        calls = {
            "one": lambda expert=experts[0]: expert.model(x_t, t, labels),
            "router": lambda router=router: router(x_t, t, labels),
        } | {s: lambda field=field: field(x_t, t) for s, field in fields.items()}
        rounds = [
            {name: seconds(call) for name, call in calls.items()} for _ in range(args.rounds + 3)
        ]
        rounds = rounds[3:]
        ratio = {name: statistics.median(r[name] / r["one"] for r in rounds) for name in calls}
        rows = {s: f.forwards / (args.batch_size * (args.rounds + 3)) for s, f in fields.items()}
        cells = [f"{rows[s]:.2f}, {ratio[s]:.2f} x" for s in STRATEGIES]
        print(
            f"| {num_clusters} | {ratio['router']:.3f} x | " + " | ".join(cells) + " |", flush=True
        )


if __name__ == "__main__":
    main()
