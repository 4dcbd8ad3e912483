"""The Frechet distance at Inception's size, beside pytorch-fid: time, agreement, and memory.

    python benchmarks/fid_speed.py            (pip install '.[peers]')

Both get the same float64 moments of random features, positive and correlated as Inception's are, of
more samples than dimensions and of fewer; times are for the distance alone, in one process with as
many threads as OMP_NUM_THREADS allows, side by side. Then 50,000 feature rows go through
`FeatureStats` in batches of 256.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from pytorch_fid.fid_score import calculate_frechet_distance

from ddm_min.fid import FeatureStats, frechet_distance

warnings.filterwarnings("ignore", category=DeprecationWarning)  # sqrtm's argument disp


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, default=2048)
    parser.add_argument("--num", type=int, nargs="*", default=[10_000, 1000])
    parser.add_argument("--stream", type=int, default=50_000, help="rows through FeatureStats")
    parser.add_argument("--out", type=Path, default=Path("runs/fid_speed.json"))
    args = parser.parse_args()

    rng, rows = np.random.default_rng(0), []
    mix = rng.standard_normal((args.dims, args.dims), dtype=np.float32) / args.dims**0.5
    for num in args.num:
        moments = []
        for scale in (1.0, 1.1):
            stats = FeatureStats(args.dims)
            for start in range(0, num, 500):
                count = min(500, num - start)
                x = np.abs(rng.standard_normal((count, args.dims), dtype=np.float32) @ mix * scale)
                stats.update(torch.from_numpy(x))
            moments += [stats.mean, stats.cov]
        start = time.monotonic()
        ours = frechet_distance(*moments)
        middle = time.monotonic()
        peer = calculate_frechet_distance(*(x.numpy() for x in moments))
        row = {"num": num, "dims": args.dims, "ours": ours, "pytorch_fid": float(peer)}
        row |= {"relative_difference": abs(ours - peer) / abs(peer)}
        row |= {"ours_seconds": middle - start, "peer_seconds": time.monotonic() - middle}
        row["ratio"] = row["peer_seconds"] / row["ours_seconds"]
        print(json.dumps(row), flush=True)
        rows.append(row)

    stats, batch = FeatureStats(args.dims), torch.randn(256, args.dims)
    start = time.monotonic()
    for _ in range(0, args.stream, 256):
        stats.update(batch)
    seconds = time.monotonic() - start
    rows.append({"streamed": stats.count, "seconds": seconds})
    rows[-1]["megabytes"] = (stats.outer.nbytes + stats.sum.nbytes) / 1e6
    print(json.dumps(rows[-1]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
