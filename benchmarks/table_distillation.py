"""One dense student of the ensemble (DDM 3.6), beside a monolith from scratch and the ensemble.

    python -m benchmarks.table_distillation

The teachers are table_routing's K = 4 flow experts (batch 32 each). The student trains as the
monolith does, on the same images and noise, but towards the teacher of each image's cluster: for
1,500 steps at the monolith's batch of 128, and at a quarter of it. Budget: 6 students beside
table_routing's trainings, 20 minutes on one core.
Writes benchmarks/results/distillation.json and .png.
"""

from benchmarks.trials import (
    HOME,
    SEEDS,
    distance_chart,
    row,
    split_run,
    start,
    train_experts,
    train_the_router,
    write_table,
)

COLUMNS = {
    "to train": "to_train",
    "to held-out": "to_heldout",
    "as asked": "as_asked",
    "nearest": "nearest",
    "forwards": "forwards",
}


def main() -> None:
    source, judge = start(__doc__)
    for seed in SEEDS:
        teachers = split_run(HOME / f"k4_s{seed}", source, 4)
        train_experts(teachers, source, range(4), seed)
        train_the_router(teachers, source, seed)
        for batch in (32, 128):
            mono = HOME / f"mono{batch // 32}_s{seed}"
            train_experts(mono, source, ["all"], seed, batch_size=batch)
            student, teacher = HOME / f"student{batch}_s{seed}", ("--teacher", str(teachers))
            train_experts(student, source, ["all"], seed, *teacher, batch_size=batch)

    rows = []
    for name, run, strategy, router in (
        ("student, batch 128", "student128", "full", "prior"),
        ("monolith, batch 128", "mono4", "full", "prior"),
        ("student, batch 32", "student32", "full", "prior"),
        ("monolith, batch 32", "mono1", "full", "prior"),
        ("teachers, full", "k4", "full", "learned"),
        ("teachers, coupled", "k4", "coupled", "learned"),
    ):
        how = dict(strategy=strategy, router=router, label=None)
        rows.append(row(name, run, judge, COLUMNS, **how))
    floor = judge.floor()["to_train"]
    note = f"seeds {list(SEEDS)}; held-out digits to train: {floor:.3f}"
    write_table("distillation", "Distillation on the digits", list(COLUMNS), rows, note)
    title = "Digits: a dense student, K = 4 teachers"
    distance_chart("distillation", title, {"": rows}, judge)


if __name__ == "__main__":
    main()
