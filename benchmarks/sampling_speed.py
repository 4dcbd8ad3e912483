"""What a step of sampling costs beside one network of the same shape, side by side in one run.

    python benchmarks/sampling_speed.py
    python benchmarks/sampling_speed.py --model DiT-S/2 --image-size 32 --channels 3 --rounds 3

Every K has K experts of one shape with random weights and the default router, whose last layer is
random too, so that images spread over the clusters. A round times a monolith (one network on all
rows), the router alone, one step of each strategy, one guided step, and the naive loop that runs
all experts on all rows, one after the other; what is printed are medians over rounds of ratios
within a round, which a busy machine leaves alone. At one thread the clock is the processor time of
this process.

Limits at K = 8 and batch 256: one expert per row 1.15 x a monolith, full 8.3 x, guidance 2 x the
same step without it, and the naive loop at least 6 x one expert per row.
"""

import argparse
import statistics
import time

import torch

from ddm_min.conversion import velocity_on
from ddm_min.dit import PRESETS, DiT, DiTConfig
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert
from ddm_min.objectives import DDPM, FLOW
from ddm_min.router import LearnedRouter, ShardStats, select
from ddm_min.schedule import expand

STRATEGIES = ("full", "top-1", "coupled")
GUIDANCE = 1.5


def randomize(network):
    """Random weights also where training starts from zero, so that no product is trivial."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return network.eval().requires_grad_(False)


def make_ensemble(args, num_clusters: int, labels: torch.Tensor) -> Ensemble:
    """Experts of both objectives, as the demo has them, and a router."""
    size = (args.image_size,) * 2
    shape = dict(in_channels=args.channels, image_size=size, num_classes=10)
    images = torch.randn(len(labels), args.channels, *size).clamp(-1, 1)
    experts = [
        Expert(
            randomize(DiT(DiTConfig(**shape, **PRESETS[args.model]))),
            FLOW if k % 2 else DDPM,
            k,
            stats=ShardStats.measure(images, labels, 10),
        )
        for k in range(num_clusters)
    ]
    router = randomize(LearnedRouter(DiTConfig(**shape, **PRESETS[args.router]), num_clusters))
    return Ensemble(experts, router, num_classes=10)


def naive_step(ensemble: Ensemble, field, x_t, t) -> torch.Tensor:
    """The same velocity by the loop that one writes first: all experts on all rows, weighted."""
    log_probs = ensemble.log_probs(x_t, t, field.labels)
    weights = select(log_probs, field.strategy, field.gumbel.to(log_probs.dtype))
    velocity = torch.zeros_like(x_t)
    for k, e in enumerate(ensemble.experts):
        clamp = e.stats.value_range.tolist()
        part = velocity_on(
            ensemble.path, e.model, e.objective, x_t, t, field.labels, x0_range=clamp
        )
        velocity += expand(weights[:, k], part) * part
    return velocity


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
    now = time.process_time if args.threads == 1 else time.perf_counter

    def seconds(call) -> float:
        start = now()
        call()
        return now() - start

    x_t = torch.randn(args.batch_size, args.channels, args.image_size, args.image_size)
    t = torch.full((args.batch_size,), 0.7)
    labels = torch.arange(args.batch_size) % 10
    print(f"{args.model}, batch {args.batch_size}, {args.threads} thread(s): times of a monolith's")
    columns = ["K", "router", *(f"{s}: rows, time" for s in STRATEGIES)]
    columns += ["coupled, guided / unguided", "naive / coupled"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for num_clusters in (2, 4, 8):
        ensemble = make_ensemble(args, num_clusters, labels)
        fields = {strategy: ensemble.field(labels, strategy) for strategy in STRATEGIES}
        calls = {s: lambda field=field: field(x_t, t) for s, field in fields.items()}
        guided = ensemble.field(labels, "coupled", GUIDANCE)
        calls["guided"] = lambda field=guided: field(x_t, t)
        calls["naive"] = lambda e=ensemble, f=fields["coupled"]: naive_step(e, f, x_t, t)
        calls["router"] = lambda router=ensemble.router: router(x_t, t, labels)
        calls["one"] = lambda model=ensemble.experts[0].model: model(x_t, t, labels)
        # Sums of float32 in another order, on as many rows as there are.
        torch.testing.assert_close(calls["naive"](), calls["coupled"](), rtol=1e-3, atol=1e-3)
        for field in fields.values():
            field.forwards = 0
        rounds = [
            {name: seconds(call) for name, call in calls.items()} for _ in range(args.rounds + 2)
        ]
        rows = {s: f.forwards / (args.batch_size * len(rounds)) for s, f in fields.items()}

        def ratio(a: str, b: str, rounds=rounds[2:]) -> float:
            return statistics.median(r[a] / r[b] for r in rounds)

        cells = [f"{rows[s]:.2f}, {ratio(s, 'one'):.2f} x" for s in STRATEGIES]
        cells = [f"{ratio('router', 'one'):.3f} x", *cells, f"{ratio('guided', 'coupled'):.2f} x"]
        cells.append(f"{ratio('naive', 'coupled'):.2f} x")
        print(f"| {num_clusters} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
