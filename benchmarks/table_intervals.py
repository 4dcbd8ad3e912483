"""Three time-interval experts against one model (MDM): cost at equal quality, quality at cost.

    python -m benchmarks.table_intervals

A budget of 500, 1,000 or 2,000 steps of batch 32 goes to one model, or is shared by three experts
of the same shape: on equal thirds of t with a third of the steps each, or on the intervals and
shares that `benchmarks.pilot` proposed for these digits. As the paper reports it: total cost is the
sum of the steps, wall-clock the slowest expert's, because no expert waits for another. Equal
quality reads off the line through the monolith's (steps, distance), both logarithmic, what one
model needs to be as good. Budget: 3 seeds x 3,500 steps x 3, 15 minutes on one core.
Writes benchmarks/results/intervals.json and .png.
"""

import json

import numpy as np

from benchmarks.trials import HOME, RESULTS, SEEDS, row, start, train_experts, write_table

BUDGETS = (500, 1000, 2000)
COLUMNS = {"to train": "to_train", "to held-out": "to_heldout", "as asked": "as_asked"}


def steps_for(distance: float, budgets: list[int], distances: list[float]) -> float:
    """What the monolith needs for this distance: a straight line through its logarithms."""
    slope, offset = np.polyfit(np.log(budgets), np.log(distances), 1)
    return float(np.exp((np.log(distance) - offset) / slope))


def draw(rows: dict[str, dict[int, dict]], floor: float) -> None:
    """Distance to held-out digits against total cost and against wall-clock."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    looks = zip(rows.items(), ("#333333", "#0072B2", "#D55E00"), strict=True)
    for (name, by_budget), color in looks:
        for axis, key in zip(panels, ("total", "wall-clock"), strict=True):
            steps = [row[key] for row in by_budget.values()]
            distances = [row["to held-out"] for row in by_budget.values()]
            axis.plot(steps, [np.mean(d) for d in distances], color=color, label=name)
            for step, values in zip(steps, distances, strict=True):
                axis.scatter([step] * len(values), values, color=color, s=14, alpha=0.7)
    for axis, what in zip(panels, ("all experts together", "the slowest expert"), strict=True):
        axis.axhline(floor, color="0.5", ls=":", lw=1)
        axis.set(xscale="log", yscale="log", xlabel=f"training steps of {what}")
        axis.grid(alpha=0.3, which="both")
        axis.set_xticks([200, 500, 1000, 2000], ["200", "500", "1,000", "2,000"])
        axis.set_yticks([0.4, 0.6, 1, 2, 4, 6], ["0.4", "0.6", "1", "2", "4", "6"])
        axis.minorticks_off()
    panels[0].set_ylabel("pixel Frechet distance to held-out digits")
    panels[0].set_title("total cost")
    panels[1].set_title("wall-clock")
    panels[0].plot([], [], color="0.5", ls=":", label="training digits in the samples' place")
    panels[0].legend(fontsize=8)
    figure.savefig(RESULTS / "intervals.png", dpi=130)
    plt.close(figure)


def main() -> None:
    source, judge = start(__doc__)
    pilot = json.loads((RESULTS / "pilot_0.json").read_text())
    splits = {
        "monolith": ("budget", [0.0, 1.0], [1.0]),
        "equal thirds": ("thirds", [0.0, 0.333, 0.667, 1.0], [1 / 3] * 3),
        "the pilot's intervals": ("pilot", pilot["borders"], pilot["shares"]),
    }
    rows: dict[str, dict[int, dict]] = {}
    for name, (run_name, borders, shares) in splits.items():
        rows[name] = {}
        for budget in BUDGETS:
            steps = [round(budget * share) for share in shares]
            for seed in SEEDS:
                run = HOME / f"{run_name}{budget}_s{seed}"
                for low, high, number in zip(borders[:-1], borders[1:], steps, strict=True):
                    interval = (
                        () if len(steps) == 1 else ("--time-interval", f"{low:g}", f"{high:g}")
                    )
                    train_experts(run, source, ["all"], seed, *interval, steps=number)
            how = dict(strategy="full", router="prior", label=None)
            found = row(f"{name}, {budget} steps", f"{run_name}{budget}", judge, COLUMNS, **how)
            rows[name][budget] = found | {"total": sum(steps), "wall-clock": max(steps)}

    one = [np.mean(rows["monolith"][b]["to held-out"]) for b in BUDGETS]
    table = []
    for by_budget in rows.values():
        for found in by_budget.values():
            same = steps_for(np.mean(found["to held-out"]), BUDGETS, one)
            costs = {"total": [found["total"]], "wall-clock": [found["wall-clock"]]}
            costs["one model, same quality"] = [same]
            costs["total / same"] = [found["total"] / same]
            costs["wall-clock / same"] = [found["wall-clock"] / same]
            table.append(found | costs)
    columns = [*COLUMNS, *costs]
    note = f"seeds {list(SEEDS)}; ratios below 1: the experts are cheaper"
    write_table("intervals", "MDM on the digits", columns, table, note)
    floor = judge(judge.train.images, judge.train.labels)["to_heldout"]
    draw(rows, floor)


if __name__ == "__main__":
    main()
