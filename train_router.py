"""Train the router: which cluster does a noisy image come from (DDM algorithm 1)?

    python train_router.py --data digits --run runs/digits
    python train_router.py --run runs/digits --from-experts

The same loop as train_expert.py with another loss: cross-entropy with the cluster and class of each
image, on x_t of the path that is sampled. Batches keep the data's proportions, because the prior
n_k / N belongs to the posterior.

Where nobody may pool the data (DDM's private-data setting), --from-experts trains on samples of the
experts, as many of each class and cluster as their files say there are images.
"""

import argparse
from pathlib import Path

import torch

from ddm_min import data
from ddm_min.cli import data_arguments, one_sentence_errors, training_arguments
from ddm_min.dit import PRESETS, DiTConfig
from ddm_min.expert import save_router
from ddm_min.objectives import draw_times, normal_like
from ddm_min.partition import Partition
from ddm_min.router import LearnedRouter
from ddm_min.run import load_run
from ddm_min.sampler import sample_clusters
from ddm_min.schedule import Linear, add_noise
from ddm_min.training import TrainConfig, describe, draw_batch, my_share, resume_file, train

MOST_SAMPLES = 20_000  # that --from-experts draws


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("what to train on, and where it goes")
    data_arguments(where)
    where.add_argument("--run", type=Path, required=True, help="folder with the partition")
    private = "train on samples of RUN's experts: needs no --data and no partition"
    where.add_argument("--from-experts", action="store_true", help=private)
    where.add_argument("--model", default="router", choices=PRESETS, help="default: router")
    training_arguments(parser, steps=4000, batch_size=128, lr=8e-3)
    return parser.parse_args(argv)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.from_experts:
        run = load_run(args.run, "prior", args.device)
        counts, prints = run.counts, {expert.fingerprint for expert in run.experts} - {""}
        if len(prints) != 1:
            raise ValueError(f"{args.run} has experts of {len(prints)} partitions: there must be 1")
        print(f"drawing samples of {len(run.experts)} experts", flush=True)
        samples, labels, clusters = sample_clusters(run.experts, counts, args.seed, MOST_SAMPLES)
        dataset = data.Dataset(samples.cpu(), labels.cpu(), run.class_names)
        fingerprint, source = prints.pop(), dataset.fingerprint()
    else:
        dataset = data.load(args.data, args.image_size)
        partition = Partition.load(args.run / "partition.safetensors", dataset)
        clusters, counts = partition.assignment.to(args.device), partition.counts
        source = fingerprint = partition.fingerprint
    num_classes = dataset.num_classes

    torch.manual_seed(args.seed)
    channels, *size = dataset.images.shape[1:]
    config = DiTConfig(channels, size, num_classes, **PRESETS[args.model])
    router = LearnedRouter(config, len(counts)).to(args.device)
    dataset = dataset.to(args.device)

    def batch_loss(model, rng):
        x0, labels, rows = draw_batch(dataset, args.batch_size, rng, args.flip)
        t = draw_times(len(x0), Linear(), (0.0, 1.0), rng).to(x0.device)
        x_t = add_noise(x0, normal_like(x0, rng), t, Linear())
        x_t, t, labels, rows = my_share(x_t, t, labels, rows)
        joint = model(x_t, t)  # b k c
        return -joint[torch.arange(len(t)), clusters[rows], labels].mean()

    file = args.run / "router.safetensors"
    arguments = describe(args, source)
    router, _ = train(router, batch_loss, TrainConfig.of(args), resume_file(file), arguments)
    names = dict(class_names=dataset.class_names, fingerprint=fingerprint)
    save_router(file, router, counts, **names, step=args.steps)
    print(f"wrote {file}: {len(counts)} clusters, {len(dataset)} images")


if __name__ == "__main__":
    main()
