"""DDM tables 1 and 2 at our scale: every strategy, K = 4 and 8, with and without labels.

    python -m benchmarks.table_routing

Equal training FLOPs: an ensemble's K experts see 32 images per step each, the monolith beside it
32 K, all for 1,500 steps at the same learning rate. Also shown: one monolith at the batch of a
single expert, and a random split (DDM figure 4c) of the first training seed alone. Budget: 49
trainings, about 80 minutes on one core, and 25 minutes of sampling; stop it whenever you like, it
goes on where it was.
Writes benchmarks/results/routing.json and .png.
"""

from benchmarks.trials import (
    HOME,
    NUM_SAMPLES,
    SEEDS,
    STEPS,
    distance_chart,
    row,
    split_run,
    start,
    train_experts,
    train_the_router,
    write_table,
)

STRATEGIES = (
    "full",
    "top-1",
    "top-2",
    "sample-1",
    "sample-2",
    "threshold-0.1",
    "nucleus-0.9",
    "coupled",
)
FEWER = ("full", "top-1", "top-2", "sample-1", "coupled")  # for K = 8, and without labels
COLUMNS = {
    "to train": "to_train",
    "to held-out": "to_heldout",
    "class shares off": "class_shares_off",
    "as asked": "as_asked",
    "nearest": "nearest",
    "forwards": "forwards",
    "switches": "switches",
    "seconds": "seconds",
}


def main() -> None:
    source, judge = start(__doc__)

    for seed in SEEDS:
        splits = [("k4", 4, "pixels"), ("k8", 8, "pixels"), ("random4", 4, "random")]
        for name, k, features in splits[: 3 if seed == 0 else 2]:
            run = split_run(HOME / f"{name}_s{seed}", source, k, features)
            train_experts(run, source, range(k), seed)
            train_the_router(run, source, seed)
        for k in (1, 4, 8):
            train_experts(HOME / f"mono{k}_s{seed}", source, ["all"], seed, batch_size=32 * k)

    def rows_of(label: str | None) -> dict[str, list[dict]]:
        """Panels of rows: the same experts asked with all labels in turn, or without any."""

        def line(name: str, run: str, strategy: str, router: str) -> dict:
            seeds = [0] if run == "random4" else SEEDS
            how = dict(strategy=strategy, router=router, label=label)
            return row(name, run, judge, COLUMNS, seeds, **how)

        panels = {}
        for k in (4, 8):
            rows = [line(f"monolith, batch {32 * k}", f"mono{k}", "full", "prior")]
            shown = STRATEGIES if k == 4 and label is None else FEWER
            rows += [line(strategy, f"k{k}", strategy, "learned") for strategy in shown]
            rows += [
                line("prior + coupled", f"k{k}", "coupled", "prior"),
                line("gaussian + coupled", f"k{k}", "coupled", "gaussian"),
            ]
            panels[f"K = {k}"] = rows
        if label is None:
            panels["K = 4"] += [
                line("monolith, batch 32", "mono1", "full", "prior"),
                line("random split, full", "random4", "full", "learned"),
                line("random split, coupled", "random4", "coupled", "learned"),
            ]
        return panels

    floor = judge.floor()
    note = (
        f"{NUM_SAMPLES} samples, 50 Euler steps, {STEPS} training steps; pixel "
        f"Frechet distance; held-out digits in the place of samples: {floor['to_train']:.3f} to "
        f"train, nearest {floor['nearest']:.3f}, as asked {floor['as_asked']:.3f}"
    )
    for kind, label in (("with labels", None), ("without labels", "none")):
        panels = rows_of(label)
        for panel, rows in panels.items():
            name = f"routing {panel} {kind}".replace(" = ", "").replace(" ", "_")
            write_table(name, f"{panel}, {kind}", list(COLUMNS), rows, note)
        name = "routing_" + kind.replace(" ", "_")
        title = f"Digits, {kind}: Frechet distance of each way to route (dots: training seeds)"
        distance_chart(name, title, panels, judge)


if __name__ == "__main__":
    main()
