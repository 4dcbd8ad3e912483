"""What change of schedule is worth: the error of exact experts, asked aligned and naively.

    python benchmarks/conversion_table.py [--out conversion.json]

The experts are exact (analytic.py), so all error is conversion's. A lone expert of the digits, for
every prediction on every schedule, is asked for its velocity on the linear path and compared with
the exact marginal velocity; then a mixture of four shards with four different objectives, under the
exact router. Float64; error = |velocity - exact| / |exact|, norms over a batch of
x_t = (1 - t) x0 + t eps.

    aligned   asked at equal log-SNR: conversion.py as everything here uses it
    naive     asked at the same (x_t, t), read as if it had been trained on the path (align=False):
              with eps, x0_hat = (x_t - t eps_hat) / (1 - t), which diverges towards t = 1
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from ddm_min import data
from ddm_min.analytic import EmpiricalFlow, exact_router
from ddm_min.conversion import velocity_on
from ddm_min.ensemble import Ensemble
from ddm_min.expert import Expert
from ddm_min.objectives import PREDICTIONS, Objective
from ddm_min.partition import partition
from ddm_min.sampler import start_noise
from ddm_min.schedule import Betas, Cosine, Linear, add_noise

PATH, TABLE = Linear(), Betas.ddpm()
SCHEDULES = {"Linear": PATH, "Cosine": Cosine(), "Betas": TABLE}
ASKED = ("aligned", "naive")
MIXED = [("eps", "Cosine"), ("x0", "Betas"), ("v", "Cosine"), ("velocity", "Linear")]


def relative_error(velocity, exact: EmpiricalFlow, x0: Tensor, eps: Tensor, time: float) -> float:
    """|velocity - exact| / |exact| over the batch x0, eps [B, C, H, W] at one time."""
    t = torch.full((len(x0),), time, dtype=x0.dtype)
    x_t = add_noise(x0, eps, t, PATH)
    truth = exact.velocity(x_t, t)
    return float((velocity(x_t, t) - truth).norm() / truth.norm())


def measure(times: list[float], batch: int) -> list[dict]:
    """A row per expert and way of asking: what it is and its error at each time."""
    dataset = data.load("digits")
    images = data.to_float(dataset.images).double()
    chosen = torch.linspace(0, len(images) - 1, batch).long()
    x0 = images[chosen]
    eps = start_noise(x0.shape[1:], [(0, index) for index in range(batch)]).double()
    labels = torch.zeros(batch, dtype=torch.long)
    exact = EmpiricalFlow(images, PATH)
    assignment = partition(dataset, 4, "pixels", None, seed=0).assignment
    shards = [images[assignment == k] for k in range(4)]

    def row(prediction: str, schedule: str, asked: str, velocity) -> dict:
        errors = [relative_error(velocity, exact, x0, eps, time) for time in times]
        return dict(prediction=prediction, schedule=schedule, asked=asked, errors=errors)

    rows = []
    for prediction in PREDICTIONS:
        for name in SCHEDULES:
            objective = Objective(prediction, SCHEDULES[name])
            for asked in ASKED:

                def alone(x_t, t, objective=objective, align=asked == "aligned"):
                    model = exact.expert(objective)
                    return velocity_on(PATH, model, objective, x_t, t, labels, align)

                rows.append(row(prediction, name, asked, alone))
    objectives = [Objective(prediction, SCHEDULES[name]) for prediction, name in MIXED]
    experts = [
        Expert(EmpiricalFlow(shard, PATH).expert(objective), objective, cluster=k)
        for k, (shard, objective) in enumerate(zip(shards, objectives, strict=True))
    ]
    for asked in ASKED:
        mixture = Ensemble(experts, exact_router(shards, PATH), PATH, align=asked == "aligned")
        rows.append(row("all four", "mixed", asked, mixture.field(labels, "full")))
    return rows


def markdown(rows: list[dict], times: list[float]) -> str:
    """The rows as a Markdown table: rounding errors as powers of ten, the others in percent."""

    def cell(error: float) -> str:
        if error == 0:
            return "0"
        return f"{error:.0e}" if error < 1e-6 else f"{error:.1%}"

    lines = [
        "| prediction | schedule | asked | " + " | ".join(f"t = {time:g}" for time in times) + " |",
        "|---|---|---|" + "---:|" * len(times),
    ]
    for row in rows:
        cells = [row["prediction"], row["schedule"], row["asked"]]
        lines.append("| " + " | ".join(cells + [cell(error) for error in row["errors"]]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The error of conversion, aligned and naive.")
    parser.add_argument("--times", type=float, nargs="+", default=[0.02, 0.3, 0.5, 0.7, 0.98])
    parser.add_argument("--batch", type=int, default=128, help="noisy images per time")
    parser.add_argument("--out", type=Path, help="JSON file for the same numbers")
    args = parser.parse_args()

    rows = measure(args.times, args.batch)
    print(markdown(rows, args.times))
    mixture = ", ".join(f"{prediction} on {schedule}" for prediction, schedule in MIXED)
    print(f"\nThe last rows are a mixture of four shards of the digits: {mixture}.")
    ends = TABLE.log_snr(torch.tensor([0.0, 1.0], dtype=torch.float64))
    low, high = PATH.time_at(ends).tolist()
    print(
        f"The beta table covers log-SNR {ends[0]:+.1f} to {ends[1]:+.1f}: t from {low:.3f} to "
        f"{high:.3f} of the linear path. Beyond, its expert is asked at the table's end."
    )
    if args.out:
        record = dict(times=args.times, batch=args.batch, mixture=MIXED, rows=rows)
        args.out.write_text(json.dumps(record | dict(table_covers=[low, high]), indent=1) + "\n")


if __name__ == "__main__":
    main()
