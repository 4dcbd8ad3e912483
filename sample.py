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
    add = parser.add_argument
    add("run", type=Path, help="folder with the expert files")
    add("--num", type=positive, default=64, help="how many images; default: 64")
    add("--label", help="a class, by name or number; default: all, in equal shares")
    add("--strategy", default="coupled", help=f"{STRATEGIES}; default: coupled")
    routers = ("learned", "gaussian", "prior")
    add("--router", choices=routers, help="default: learned where RUN has one, else gaussian")
    on_path = "euler and heun run on the ensemble's path, ddim and ddpm on a lone expert's schedule"
    add("--solver", default="euler", choices=("euler", "heun", "ddim", "ddpm"), help=on_path)
    add("--num-steps", type=positive, default=50, help="solver steps; default: 50")
    add("--guidance-scale", type=amount, default=1.0, help="1 is no guidance")
    share = "share a missing expert's part among those present"
    add("--allow-missing", action="store_true", help=share)
    add("--batch-size", type=positive, default=256)
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="of the experts' networks")
    add("--seed", type=not_negative, default=0)
    add("--device", type=device, default="auto", help="auto, cuda, mps or cpu")
    out = "a .png grid, an .npz with labels, or a folder of pictures; default: samples.png"
    add("--out", type=Path, default=Path("samples.png"), help=out)
    return parser.parse_args(argv)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    run = load_run(args.run, args.router, args.device)
    labels = choose_labels(args.label, args.num, run.class_names, run.drawable_counts)
    labels = labels.to(args.device)
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
    if args.precision == "bf16":  # routing and the solver stay in float32
        autocast = torch.autocast(torch.device(args.device).type, torch.bfloat16)
        for expert in run.experts:
            expert.model.forward = autocast(expert.model.forward)
    ensemble = Ensemble(
        run.experts, run.router, path, num_clusters=len(run.counts), counts=run.counts,
        num_classes=len(run.class_names), allow_missing=args.allow_missing,
    )  # fmt: skip
    print(f"{len(run.experts)} experts, {run.router_name} router, strategy {args.strategy}")

    seeds = [(args.seed, index) for index in range(args.num)]
    batches = [slice(i, i + args.batch_size) for i in range(0, args.num, args.batch_size)]
    how = (args.strategy, args.guidance_scale)
    fields = [ensemble.field(labels[rows], *how, seeds[rows]) for rows in batches]
    check_out(args.out, run.experts[0].latents)

    images = []
    with tqdm(total=args.num_steps * len(batches), desc="sampling", unit="step") as progress:
        for field in fields:
            x = start_noise(run.experts[0].image_shape, field.seeds).to(args.device)
            shown = dict(on_step=lambda step: progress.update())
            if args.solver in ("euler", "heun"):
                x = sample(field, x, args.num_steps, args.solver, **shown)
            else:
                eta = float(args.solver == "ddpm")
                x = sample_ddim(field, x, args.num_steps, path, eta, field.seeds, **shown)
            images.append(x.cpu())
    forwards = sum(field.forwards for field in fields) / args.num
    switches = sum(field.switches for field in fields) / args.num
    print(f"per image: {forwards:.1f} expert forwards, {switches:.2f} switches")
    latents = run.experts[0].latents
    write_samples(args.out, torch.cat(images), labels.cpu(), run.class_names, latents)


if __name__ == "__main__":
    main()
