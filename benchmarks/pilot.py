"""Time intervals for MDM from a short pilot run: the recipe that the paper's readers asked for.

    python -m benchmarks.pilot --data digits --experts 3

One small model trains on everything for a few hundred steps at a constant learning rate. At growing
numbers of steps its loss is measured on fixed noise in 8 equal bins of t, and each bin gets a time
to converge,

    tau = the step by which 90 % of the fall from the first measurement to the last had happened,

on a curve made monotone by its running minimum. **Criterion**: bins of like tau belong together, so
the intervals are the split into contiguous groups with the smallest sum of squared deviations of
log tau from the group's mean; a group's share of the steps is the largest tau in it, because an
expert is finished when its slowest bin is.

**What it is blind to**: the pilot shares one network between bins, so a slow bin may only be
waiting for its neighbours; what falls after the pilot ends is not seen, so slow bins look faster
than they are; a fall in loss is not a fall in Frechet distance, and bins count alike whatever they
do to a sample; and where all bins are alike the groups are noise: the spread that is printed then
is near 1.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch

import train_expert
from benchmarks.trials import RESULTS
from ddm_min import data
from ddm_min.data import to_float
from ddm_min.expert import Expert
from ddm_min.objectives import FLOW, loss
from ddm_min.sampler import start_noise

BINS = 8
STEPS = (25, 50, 75, 100, 150, 200, 300, 400, 600, 800)


@torch.no_grad()
def loss_per_bin(expert: Expert, dataset: data.Dataset, num: int) -> list[float]:
    """Mean flow-matching loss in each bin of t, on the same images, times and noise every time."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.permutation(len(dataset))[:num])
    x0, labels = to_float(dataset.images[rows]), dataset.labels[rows]
    eps = start_noise(x0.shape[1:], [(0, index) for index in range(len(x0))])
    place = torch.from_numpy(rng.random(len(x0))).float()
    losses = []
    for index in range(BINS):
        t = (index + place) / BINS
        losses.append(loss(expert.model, x0, eps, t, labels, FLOW).mean().item())
    return losses


def times_to_converge(steps: list[int], curves: np.ndarray) -> np.ndarray:
    """tau of each bin: curves [measurements, bins] -> [bins], between measurements linearly."""
    falling = np.minimum.accumulate(curves, axis=0)
    done = (falling[0] - falling) / (falling[0] - falling[-1])  # 0 at the first, 1 at the last
    tau = []
    for column in done.T:
        after = int(np.argmax(column >= 0.9))  # the first such measurement
        tau.append(np.interp(0.9, column[after - 1 : after + 1], steps[after - 1 : after + 1]))
    return np.array(tau)


def propose(tau: np.ndarray, num_experts: int) -> tuple[list[float], list[float]]:
    """(inner and outer borders of the intervals in t, share of the steps of each)."""
    log_tau = np.log(tau)

    def cost(cuts: tuple[int, ...]) -> float:
        groups = np.split(log_tau, cuts)
        return sum(((group - group.mean()) ** 2).sum() for group in groups)

    cuts = min(itertools.combinations(range(1, len(tau)), num_experts - 1), key=cost)
    slowest = np.array([group.max() for group in np.split(tau, cuts)])
    return [0.0, *(c / len(tau) for c in cuts), 1.0], (slowest / slowest.sum()).tolist()


def draw(steps: list[int], curves: np.ndarray, tau: np.ndarray, borders: list[float], file: Path):
    """Left: each bin's loss against step, relative to its first. Right: tau and the intervals."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.95, len(tau)))
    for b, color in enumerate(colors):
        label = f"t in ({b / len(tau):g}, {(b + 1) / len(tau):g}]"
        left.plot(steps, curves[:, b] / curves[0, b], "o-", ms=3, color=color, label=label)
    left.set(xlabel="step of the pilot", ylabel="loss / loss at the first measurement")
    left.set_title("loss per bin of t, the same noise each time")
    left.legend(fontsize=7, ncols=2)
    right.bar((np.arange(len(tau)) + 0.5) / len(tau), tau, width=0.9 / len(tau), color=colors)
    for border in borders[1:-1]:
        right.axvline(border, color="#D55E00", ls="--")
    right.set(xlabel="t (0 = data, 1 = noise)", ylabel="tau in steps")
    right.set_title("steps to 90 % of the fall; dashed: proposed borders")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--experts", type=int, default=3, help="number of intervals")
    parser.add_argument("--run", type=Path, default=Path("runs/pilot"))
    parser.add_argument("--lr", default="2e-3", help="constant; below the default, which decays")
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dataset = data.load(args.data)
    record = args.run / f"pilot_{args.seed}.json"
    measured = json.loads(record.read_text()) if record.exists() else {}
    for steps in STEPS:
        if str(steps) not in measured:
            train_expert.main(
                f"--data {args.data} --run {args.run}/seed{args.seed} --cluster all "
                f"--steps {steps} --lr {args.lr} --lr-schedule constant --seed {args.seed}".split()
            )
            expert = Expert.load(args.run / f"seed{args.seed}" / "expert_all.safetensors")
            measured[str(steps)] = loss_per_bin(expert, dataset, 1024)
            record.write_text(json.dumps(measured))
    curves = np.array([measured[str(steps)] for steps in STEPS])
    tau = times_to_converge(list(STEPS), curves)
    borders, shares = propose(tau, args.experts)
    print("| t | loss first | loss last | tau |\n|---|---|---|---|")
    for b in range(BINS):
        print(
            f"| {b / BINS:g} to {(b + 1) / BINS:g} | {curves[0, b]:.3f} | {curves[-1, b]:.3f} | "
            f"{tau[b]:.0f} |"
        )
    print(f"spread of tau: {tau.max() / tau.min():.2f} from fastest to slowest bin")
    for low, high, share in zip(borders[:-1], borders[1:], shares, strict=True):
        print(f"--time-interval {low:g} {high:g}   {share:.0%} of the steps")
    RESULTS.mkdir(exist_ok=True)
    result = {"steps": STEPS, "losses": curves.tolist(), "tau": tau.tolist()}
    result |= {"borders": borders, "shares": shares}
    (RESULTS / f"pilot_{args.seed}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(list(STEPS), curves, tau, borders, RESULTS / f"pilot_{args.seed}.png")


if __name__ == "__main__":
    main()
