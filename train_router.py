"""Train the router: which cluster does a noisy image come from (DDM algorithm 1)?

    python train_router.py --data digits --run runs/digits

The same loop as train_expert.py with another loss: cross-entropy with the cluster of each image, on
x_t of the path that is sampled. Batches keep the data's proportions, because the prior n_k / N
belongs to the posterior.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from ddm_min import data
from ddm_min.cli import data_arguments, one_sentence_errors, training_arguments
from ddm_min.dit import PRESETS, DiTConfig
from ddm_min.expert import save_router
from ddm_min.objectives import draw_times
from ddm_min.partition import Partition
from ddm_min.router import LearnedRouter
from ddm_min.schedule import Linear, add_noise
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("what to train on, and where it goes")
    data_arguments(where)
    where.add_argument("--run", type=Path, required=True, help="folder with the partition")
    where.add_argument("--model", default="router", choices=PRESETS, help="default: router")
    training_arguments(parser, steps=2000, batch_size=128, lr=8e-3)
    return parser.parse_args(argv)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    dataset = data.load(args.data, args.image_size)
    partition = Partition.load(args.run / "partition.safetensors", dataset)
    num_classes = dataset.num_classes

    torch.manual_seed(args.seed)
    config = DiTConfig(
        dataset.images.shape[1], dataset.images.shape[2:], num_classes, **PRESETS[args.model]
    )
    router = LearnedRouter(config, partition.num_clusters).to(args.device)
    dataset = dataset.to(args.device)
    clusters = partition.assignment.to(args.device)

    def batch_loss(model, rng):
        x0, labels, rows = draw_batch(dataset, args.batch_size, rng, args.flip)
        labels = drop_labels(labels, num_classes, args.label_dropout, rng)
        t = draw_times(len(x0), Linear(), (0.0, 1.0), rng).to(x0.device)
        x_t = add_noise(x0, normal_like(x0, rng), t, Linear())
        x_t, t, labels, rows = my_share(x_t, t, labels, rows)
        return F.nll_loss(model(x_t, t, labels), clusters[rows])

    file = args.run / "router.safetensors"
    arguments = describe(args, partition.fingerprint)
    router, _ = train(router, batch_loss, TrainConfig.of(args), resume_file(file), arguments)
    save_router(
        file,
        router,
        partition.counts,
        class_names=dataset.class_names,
        fingerprint=partition.fingerprint,
        step=args.steps,
    )
    print(f"wrote {file}: {partition.num_clusters} clusters, {len(dataset)} images")


if __name__ == "__main__":
    main()
