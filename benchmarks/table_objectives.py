"""All flow, all DDPM, and mixtures (HDDM's 11.88 against 12.45), aligned and naive, guards or none.

    python -m benchmarks.table_objectives

K = 4 on the digits, class-conditional, learned router, `coupled`; the files of an all-flow and an
all-DDPM ensemble are mixed, so a row differs from the next in nothing but who answers. Reading:

    aligned    asked at equal log-SNR (conversion.py), x0 clamped to the shard's range, the class
               mean at t = 1; "unclamped" leaves both out
    naive      asked at the same (x_t, t), and read as if trained on the linear path
    guards     the paper's three: x0_hat clamped to [-20, 20], alpha floored at 0.01, and velocity
               scaled down for t > 0.85. Its scale is not given; here no image's root mean square
               gets above 1.6, about that of eps - x0

Budget: no training beyond table_routing's but 4 experts per seed (3 minutes on one core), and 15
minutes of sampling. Writes benchmarks/results/objectives.json and .png.
"""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.trials import (
    HOME,
    SEEDS,
    distance_chart,
    gather,
    row,
    split_run,
    start,
    train_experts,
    train_the_router,
    write_table,
)
from ddm_min.conversion import matching_point
from ddm_min.expert import Expert
from ddm_min.objectives import FLOW
from ddm_min.schedule import Linear, expand

COLUMNS = {
    "to train": "to_train",
    "to held-out": "to_heldout",
    "as asked": "as_asked",
    "diversity": "diversity",
    "nearest": "nearest",
}
LARGEST_VELOCITY = 1.6


class Guarded(torch.nn.Module):
    """HDDM's conversion of an epsilon expert, with its guards: (x_t, t, labels) -> velocity."""

    def __init__(self, expert: Expert, align: bool):
        super().__init__()
        self.network, self.schedule, self.align = expert.model, expert.objective.schedule, align
        self.config = expert.model.config

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        schedule = self.schedule if self.align else Linear()
        s, c = matching_point(Linear(), schedule, t)
        x_s = expand(c, x_t) * x_t
        eps = self.network(x_s, s, labels)
        alpha = expand(schedule.alpha(s), x_t).clamp(min=0.01)
        x0 = ((x_s - expand(schedule.sigma(s), x_t) * eps) / alpha).clamp(-20, 20)
        velocity = eps - x0
        size = velocity.flatten(1).square().mean(1).sqrt()
        scale = torch.where(t > 0.85, (LARGEST_VELOCITY / size).clamp(max=1), 1)
        return expand(scale, velocity) * velocity


def reread(experts: list[Expert], reading: str) -> list[Expert]:
    """The same experts, their epsilon ones read in one of the ways of the page top."""
    changed = []
    for expert in experts:
        if expert.objective.prediction == "eps" and "unclamped" in reading:
            expert = replace(expert, stats=None)
        if expert.objective.prediction == "eps" and "guards" in reading:
            model = Guarded(expert, align="aligned" in reading)
            expert = replace(expert, model=model, objective=FLOW, stats=None)
        changed.append(expert)
    return changed


def main() -> None:
    source, judge = start(__doc__)
    for seed in SEEDS:
        flow = split_run(HOME / f"k4_s{seed}", source, 4)
        train_experts(flow, source, range(4), seed)
        train_the_router(flow, source, seed)
        ddpm = split_run(HOME / f"ddpm4_s{seed}", source, 4)
        train_experts(ddpm, source, range(4), seed, "--objective", "ddpm")
        shared = {n: flow / n for n in ("partition.safetensors", "router.safetensors")}
        gather(ddpm, {"router.safetensors": flow / "router.safetensors"})
        for name, by_ddpm in (("mix13", [0]), ("mix22", [0, 2]), ("mix31", [0, 1, 2])):
            experts = {
                f"expert_{k}.safetensors": (ddpm if k in by_ddpm else flow)
                / f"expert_{k}.safetensors"
                for k in range(4)
            }
            gather(HOME / f"{name}_s{seed}", shared | experts)

    def line(name: str, run: str, reading: str) -> dict:
        how = dict(strategy="coupled", router="learned", reading=reading, reread=reread)
        return row(name, run, judge, COLUMNS, **how)

    panels = {
        "aligned": [
            line("4 flow", "k4", "aligned"),
            line("1 DDPM : 3 flow", "mix13", "aligned"),
            line("2 DDPM : 2 flow", "mix22", "aligned"),
            line("3 DDPM : 1 flow", "mix31", "aligned"),
            line("4 DDPM", "ddpm4", "aligned"),
            line("2 : 2, unclamped", "mix22", "aligned unclamped"),
            line("4 DDPM, unclamped", "ddpm4", "aligned unclamped"),
            line("2 : 2, paper's guards", "mix22", "aligned guards"),
            line("4 DDPM, paper's guards", "ddpm4", "aligned guards"),
        ],
        "naive": [
            line("4 flow", "k4", "aligned"),
            line("2 DDPM : 2 flow", "mix22", "naive"),
            line("4 DDPM", "ddpm4", "naive"),
            line("2 : 2, unclamped", "mix22", "naive unclamped"),
            line("4 DDPM, unclamped", "ddpm4", "naive unclamped"),
            line("2 : 2, paper's guards", "mix22", "naive guards"),
            line("4 DDPM, paper's guards", "ddpm4", "naive guards"),
        ],
    }
    floor = judge.floor()
    note = (
        f"seeds {list(SEEDS)}; diversity within a class: held-out digits {floor['diversity']:.3f}"
    )
    for panel, rows in panels.items():
        write_table(f"objectives_{panel}", panel, list(COLUMNS), rows, note)
    title = "Digits, K = 4: experts of two objectives in one ensemble"
    distance_chart("objectives", title, panels, judge)


if __name__ == "__main__":
    main()
