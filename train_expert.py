"""Train one expert, alone: ordinary diffusion training on one cluster of the data.

    python train_expert.py --data digits --run runs/digits --cluster 2
    python train_expert.py --data digits --run runs/digits --cluster 0 --objective ddpm

    python train_expert.py --data digits --run runs/more --cluster all --init other.safetensors
    python train_expert.py --data digits --run runs/student --cluster all --teacher runs/digits

Nothing here knows of other experts, unless they are its teachers. What an island adds to plain
training is the line that takes its shard, and the statistics of the shard that go into the file.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ddm_min import data
from ddm_min.adaln_single import MODULATIONS
from ddm_min.cli import amount, data_arguments, one_sentence_errors, share, training_arguments
from ddm_min.data import to_float
from ddm_min.distillation import believed_pair
from ddm_min.dit import PRESETS, DiT, DiTConfig
from ddm_min.expert import Expert
from ddm_min.objectives import NAMED, Objective, draw_times, drop_labels, loss, normal_like
from ddm_min.partition import Partition, exported_shard
from ddm_min.router import ShardStats
from ddm_min.run import load_experts
from ddm_min.schedule import Betas, Cosine, Linear
from ddm_min.training import TrainConfig, describe, draw_batch, my_share, resume_file, train

SCHEDULES = {"linear": Linear, "cosine": Cosine, "betas": Betas.ddpm}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("what to train on, and where it goes")
    data_arguments(where)
    where.add_argument("--run", type=Path, required=True, help="folder of the ensemble")
    where.add_argument("--cluster", required=True, help="a number from the partition, or all")
    where.add_argument("--classes", type=Path, help="classes.json, if --data is an exported shard")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--objective", choices=NAMED, help="default: that of --init, else flow")
    what.add_argument("--schedule", choices=SCHEDULES, help="default: linear for flow, else cosine")
    what.add_argument(
        "--time-interval", type=float, nargs=2, default=(0.0, 1.0), metavar=("A", "B"),
        help="train for (A, B] of the linear path only: an MDM expert",
    )  # fmt: skip
    what.add_argument("--model", choices=PRESETS, help="default: that of --init, else tiny")
    what.add_argument("--modulation", choices=MODULATIONS, help="default: --init's, else single")
    what.add_argument("--label-dropout", type=share, default=0.1, help="share of null labels")
    what.add_argument("--init", help="start from the weights and objective of an expert file")
    what.add_argument("--teacher", help="a RUN: learn what its expert of the image's cluster says")
    what.add_argument(
        "--max-weight", type=amount, default=25.0,
        help="cap on a sample's weight where the loss is measured in another space than the "
        "prediction's (convert_ckpt.py --head keep)",
    )  # fmt: skip
    training_arguments(parser, steps=2500, batch_size=32, lr=8e-3)
    return parser.parse_args(argv)


def new_model(args: argparse.Namespace, dataset: data.Dataset) -> DiT:
    """An untrained network for this data; what was left out of the arguments is filled in."""
    args.objective, args.model = args.objective or "flow", args.model or "tiny"
    args.modulation = args.modulation or "single"
    config = DiTConfig(
        dataset.images.shape[1], dataset.images.shape[2:], dataset.num_classes,
        modulation=args.modulation, **PRESETS[args.model],
    )  # fmt: skip
    torch.manual_seed(args.seed)
    return DiT(config).to(args.device)


def load_init(args: argparse.Namespace, dataset: data.Dataset) -> tuple[DiT, Objective]:
    """Network and objective of --init. Raises ValueError if it does not fit data or arguments."""
    init = Expert.load(args.init, args.device)
    found = {"image_shape": init.image_shape, **vars(init.model.config)}
    asked = {"image_shape": tuple(dataset.images.shape[1:]), "num_classes": dataset.num_classes}
    asked |= PRESETS.get(args.model, {})
    asked |= {"modulation": args.modulation} if args.modulation else {}
    unlike = [f"{k} {found[k]} and not {value}" for k, value in asked.items() if found[k] != value]
    numbers = [str(label) for label in range(len(init.class_names))]  # stand for unknown names
    pairs = zip(init.class_names, dataset.class_names, strict=False)
    if init.class_names != numbers and not unlike:
        unlike = [f"class {a!r} and not {b!r}" for a, b in pairs if a != b][:1]
    if unlike:
        raise ValueError(f"--init {args.init} has {'; '.join(unlike)}")
    if args.schedule and not args.objective:
        raise ValueError("--schedule belongs to --objective, and --init brings its own of both")
    return init.model.train().requires_grad_(True), init.objective


def load_teacher(args: argparse.Namespace, dataset: data.Dataset) -> tuple[list[Expert], Tensor]:
    """Experts of --teacher and cluster of every image. Raises ValueError if they do not fit."""
    folder = Path(args.teacher)
    if args.cluster != "all":
        raise ValueError(f"--teacher needs --cluster all: a student learns all of {folder}")
    partition = Partition.load(folder / "partition.safetensors", dataset)
    _, experts = load_experts(folder, args.device)
    if {expert.fingerprint for expert in experts} - {partition.fingerprint, ""}:
        raise ValueError(f"the experts in {folder} were trained for another partition than its own")
    return experts, partition.assignment.to(args.device)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    dataset = data.load(args.data, args.image_size)
    cluster, fingerprint = "all", ""
    if args.classes:
        dataset, cluster, fingerprint = exported_shard(dataset, args.classes, args.cluster)
    elif args.cluster != "all":
        partition = Partition.load(args.run / "partition.safetensors", dataset)
        cluster, fingerprint = partition.check_cluster(args.cluster), partition.fingerprint
        dataset = dataset.subset(partition.assignment == cluster)  # all that this island ever sees

    model, objective = load_init(args, dataset) if args.init else (new_model(args, dataset), None)
    if args.objective:
        objective = NAMED[args.objective]
    if args.schedule:
        objective = replace(objective, schedule=SCHEDULES[args.schedule]())
    stats = ShardStats.measure(
        dataset.images, dataset.labels, dataset.num_classes, as_floats=to_float
    )
    latents = dataset.images.dtype.is_floating_point
    expert = Expert(
        model, objective, cluster, tuple(args.time_interval), stats, dataset.class_names,
        fingerprint, args.label_dropout, args.steps, args.seed, latents,
    )  # fmt: skip
    arguments = describe(args, dataset.fingerprint())
    teachers, clusters = load_teacher(args, dataset) if args.teacher else ([], None)
    dataset = dataset.to(args.device)

    def batch_loss(model, rng):
        x0, labels, rows = draw_batch(dataset, args.batch_size, rng, args.flip)
        labels = drop_labels(labels, dataset.num_classes, args.label_dropout, rng)
        t = draw_times(len(x0), objective.schedule, expert.time_interval, rng).to(x0.device)
        x0, eps, t, labels, rows = my_share(x0, normal_like(x0, rng), t, labels, rows)
        if teachers:  # the same x_t, and the teacher's belief in what it is made of (DDM 3.6)
            asked = (x0, eps, t, labels, objective.schedule, dataset.num_classes)
            x0, eps = believed_pair(teachers, clusters[rows], *asked)
        return loss(model, x0, eps, t, labels, objective, args.max_weight).mean()

    file = args.run / expert.file_name
    expert.model, _ = train(
        expert.model, batch_loss, TrainConfig.of(args), resume_file(file), arguments
    )
    expert.save(file)
    what = args.objective or objective.prediction
    print(f"wrote {file}: {what} on {len(dataset)} images of cluster {cluster}")


if __name__ == "__main__":
    main()
