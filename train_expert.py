"""Train one expert, alone: ordinary diffusion training on one cluster of the data.

    python train_expert.py --data digits --run runs/digits --cluster 2
    python train_expert.py --data digits --run runs/digits --cluster 0 --objective ddpm

Nothing here knows of other experts. What an island adds to plain training is the line that takes
its shard, and the statistics of the shard that go into the file.
"""

import argparse
from pathlib import Path

import torch

from ddm_min import data
from ddm_min.cli import one_sentence_errors, training_arguments
from ddm_min.data import to_float
from ddm_min.dit import PRESETS, DiT, DiTConfig
from ddm_min.expert import Expert
from ddm_min.objectives import Objective, draw_times, loss
from ddm_min.partition import Partition
from ddm_min.router import ShardStats
from ddm_min.schedule import Betas, Cosine, Linear
from ddm_min.training import (
    TrainConfig,
    describe,
    draw_batch,
    drop_labels,
    my_share,
    normal_like,
    resume_file,
    train,
)

SCHEDULES = {"linear": Linear, "cosine": Cosine, "betas": Betas.ddpm}
OBJECTIVES = {  # name -> prediction and the schedule that it is usually trained on
    "flow": ("velocity", "linear"),
    "ddpm": ("eps", "cosine"),
    "x0": ("x0", "cosine"),
    "v": ("v", "cosine"),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("what to train on, and where it goes")
    where.add_argument("--data", default="digits", help=data.NAMES)
    where.add_argument("--run", type=Path, required=True, help="folder of the ensemble")
    where.add_argument("--cluster", required=True, help="a number from the partition, or all")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--objective", default="flow", choices=OBJECTIVES)
    what.add_argument("--schedule", choices=SCHEDULES, help="default: linear for flow, else cosine")
    what.add_argument(
        "--time-interval",
        type=float,
        nargs=2,
        default=(0.0, 1.0),
        metavar=("A", "B"),
        help="train for (A, B] of the linear path only: an MDM expert",
    )
    what.add_argument("--model", default="tiny", choices=PRESETS, help="default: tiny")
    what.add_argument("--modulation", default="single", choices=("single", "per-block"))
    training_arguments(parser, steps=2500, batch_size=32, lr=8e-3)
    return parser.parse_args(argv)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    dataset = data.load(args.data)
    cluster, fingerprint = "all", ""
    if args.cluster != "all":
        partition = Partition.load(args.run / "partition.safetensors", dataset)
        cluster, fingerprint = partition.check_cluster(args.cluster), partition.fingerprint
        dataset = dataset.subset(partition.assignment == cluster)  # all that this island ever sees

    prediction, usual_schedule = OBJECTIVES[args.objective]
    objective = Objective(prediction, SCHEDULES[args.schedule or usual_schedule]())
    config = DiTConfig(
        dataset.images.shape[1],
        dataset.images.shape[2:],
        dataset.num_classes,
        modulation=args.modulation,
        **PRESETS[args.model],
    )
    stats = ShardStats.measure(to_float(dataset.images), dataset.labels, dataset.num_classes)
    torch.manual_seed(args.seed)
    expert = Expert(
        DiT(config).to(args.device),
        objective,
        cluster,
        tuple(args.time_interval),
        stats,
        dataset.class_names,
        fingerprint,
        args.label_dropout,
        args.steps,
        args.seed,
        dataset.images.is_floating_point(),
    )
    arguments = describe(args, dataset.fingerprint())
    dataset = dataset.to(args.device)

    def batch_loss(model, rng):
        x0, labels, _ = draw_batch(dataset, args.batch_size, rng, args.flip)
        labels = drop_labels(labels, dataset.num_classes, args.label_dropout, rng)
        t = draw_times(len(x0), objective.schedule, expert.time_interval, rng).to(x0.device)
        x0, eps, t, labels = my_share(x0, normal_like(x0, rng), t, labels)
        return loss(model, x0, eps, t, labels, objective).mean()

    file = args.run / expert.file_name
    expert.model, _ = train(
        expert.model, batch_loss, TrainConfig.of(args), resume_file(file), arguments
    )
    expert.save(file)
    print(f"wrote {file}: {args.objective} on {len(dataset)} images of cluster {cluster}")


if __name__ == "__main__":
    main()
