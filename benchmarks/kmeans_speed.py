"""Two-stage k-means on as many features as ImageNet has: time and memory.

    python benchmarks/kmeans_speed.py --num 1281167 --dims 768

Random float32 features (a mixture of 64 Gaussians, so that there is something to find) lie in an
unnamed file, as `partition` puts them; 1,024 fine centroids, then --clusters coarse. The process
may own --limit GB (RLIMIT_DATA); pages of the file come on top, and can be dropped at any moment.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from ddm_min import kmeans

GB = 1e9


def status(key: str) -> float:
    """A line of /proc/self/status in GB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) * 1024 / GB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=1_281_167)
    parser.add_argument("--dims", type=int, default=768)
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--fine", type=int, default=1024)
    parser.add_argument("--limit", type=float, default=4.0, help="GB that the process may own")
    parser.add_argument("--out", type=Path, default=Path("runs/kmeans_speed.json"))
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (int(args.limit * GB), int(args.limit * GB)))

    rng = np.random.default_rng(0)
    centres = 2 * rng.standard_normal((64, args.dims), dtype=np.float32)
    with tempfile.TemporaryFile() as file:
        for start in range(0, args.num, 8192):
            count = min(8192, args.num - start)
            rows = rng.standard_normal((count, args.dims), dtype=np.float32)
            file.write(rows + centres[rng.integers(0, 64, count)])
        file.flush()
        points = np.memmap(file, np.float32, "r+").reshape(args.num, args.dims)
    row = {"num": args.num, "dims": args.dims, "fine": args.fine, "features_gb": points.nbytes / GB}
    print(f"{args.num} x {args.dims} features, {row['features_gb']:.2f} GB", flush=True)

    start, cpu = time.monotonic(), time.process_time()
    fine = kmeans.kmeans(points, args.fine, None, 0)
    row["fine_seconds"] = time.monotonic() - start
    kmeans.nearest(points, fine)
    row["nearest_seconds"] = time.monotonic() - start - row["fine_seconds"]
    print(json.dumps(row), flush=True)
    start, cpu = time.monotonic(), time.process_time()
    assignment = kmeans.two_stage(points, args.clusters, args.fine, 0)
    row["two_stage_seconds"], row["cpu_seconds"] = (
        time.monotonic() - start,
        time.process_time() - cpu,
    )
    row["sizes"] = np.bincount(assignment, minlength=args.clusters).tolist()
    row |= {"peak_rss_gb": status("VmHWM"), "rss_file_gb": status("RssFile")}
    row |= {"rss_anon_gb": status("RssAnon"), "limit_gb": args.limit}
    print(json.dumps(row, indent=2))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
