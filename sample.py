"""Draw images from an ensemble: every expert in RUN, a router, one velocity field.

python sample.py runs/digits --num 100 --out samples.png
python sample.py runs/digits --num 16 --label 3 --strategy full --out threes.png
python sample.py runs/digits --num 1000 --out samples.npz     # for python -m ddm_min.fid
"""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from ddm_min.cli import amount, device, not_negative, one_sentence_errors, positive
from ddm_min.ensemble import Ensemble
from ddm_min.router import STRATEGIES
from ddm_min.run import check_out, choose_labels, load_run, write_samples
from ddm_min.sampler import sample, sample_ddim, start_noise
from ddm_min.schedule import Linear


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder with the expert files")
    parser.add_argument("--num", type=positive, default=64, help="how many images")
    parser.add_argument("--label", help="a class, by name or number; default: all, in equal shares")
    parser.add_argument("--strategy", default="coupled", help=f"{STRATEGIES}; default: coupled")
    parser.add_argument(
        "--router",
        choices=("learned", "gaussian", "prior"),
        help="default: learned where RUN has one, else gaussian",
    )
    parser.add_argument(
        "--solver",
        default="euler",
        choices=("euler", "heun", "ddim", "ddpm"),
        help="ddim and ddpm run on a lone expert's own schedule",
    )
    parser.add_argument("--num-steps", type=positive, default=50, help="solver steps; default: 50")
    parser.add_argument("--guidance-scale", type=amount, default=1.0, help="1 is no guidance")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="share a missing expert's part among those present",
    )
    parser.add_argument("--batch-size", type=positive, default=256)
    parser.add_argument("--seed", type=not_negative, default=0)
    parser.add_argument("--device", type=device, default="auto", help="auto, cuda, mps or cpu")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("samples.png"),
        help="a .png grid, an .npz with labels, or a folder of pictures",
    )
    return parser.parse_args(argv)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    run = load_run(args.run, args.router, args.device)
    labels = choose_labels(args.label, args.num, run.class_names, run.counts).to(args.device)
    path = Linear()
    if args.solver in ("ddim", "ddpm"):
        if len(run.experts) != 1 or run.experts[0].objective.schedule == path:
            raise ValueError(
                f"--solver {args.solver} needs a lone expert with a schedule of DDPM's kind"
            )
        path = run.experts[0].objective.schedule
    if args.guidance_scale != 1 and not all(e.label_dropout and e.class_names for e in run.experts):
        raise ValueError(
            "guidance needs experts that were trained on classes, with --label-dropout"
        )
    ensemble = Ensemble(
        run.experts,
        run.router,
        path,
        num_clusters=len(run.counts),
        counts=run.counts,
        num_classes=len(run.class_names),
        allow_missing=args.allow_missing,
    )
    print(f"{len(run.experts)} experts, {run.router_name} router, strategy {args.strategy}")

    seeds = [(args.seed, index) for index in range(args.num)]
    batches = [slice(i, i + args.batch_size) for i in range(0, args.num, args.batch_size)]
    fields = [
        ensemble.field(labels[rows], args.strategy, args.guidance_scale, seeds[rows])
        for rows in batches
    ]
    check_out(args.out, run.experts[0].latents)

    images = []
    with tqdm(total=args.num_steps * len(batches), desc="sampling", unit="step") as progress:
        for field in fields:
            x = start_noise(run.experts[0].image_shape, field.seeds).to(args.device)
            if args.solver in ("euler", "heun"):
                x = sample(
                    field, x, args.num_steps, args.solver, on_step=lambda step: progress.update()
                )
            else:
                eta = float(args.solver == "ddpm")
                x = sample_ddim(
                    field,
                    x,
                    args.num_steps,
                    path,
                    eta,
                    field.seeds,
                    on_step=lambda step: progress.update(),
                )
            images.append(x.cpu())
    forwards, switches = (
        sum(getattr(f, name) for f in fields) for name in ("forwards", "switches")
    )
    print(
        f"per image: {forwards / args.num:.1f} expert forwards, {switches / args.num:.2f} switches"
    )
    write_samples(
        args.out, torch.cat(images), labels.cpu(), run.class_names, run.experts[0].latents
    )


if __name__ == "__main__":
    main()
