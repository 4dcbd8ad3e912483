"""What an import and a `--help` cost beyond importing torch: medians over interleaved rounds.

    python benchmarks/import_time.py

Every word of a round is a fresh interpreter, after one round that fills the file caches. The clock
is the processor time of the child, which other jobs leave alone; the interpreter itself is part of
all rows. Limits: `import ddm_min` 0.1 s beyond `import torch`, `--help` 0.5 s beyond it.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ("train_expert", "train_router", "sample", "convert_ckpt")
MODULES = ("partition", "fid", "figures")
LIBRARY = "import torch, ddm_min.ensemble, ddm_min.expert, ddm_min.sampler"
IMPORTS = {"import torch": "import torch", "import ddm_min": "import torch, ddm_min"}
COMMANDS = {name: ["-c", text] for name, text in (IMPORTS | {LIBRARY: LIBRARY}).items()}
COMMANDS |= {f"{name}.py --help": [f"{name}.py", "--help"] for name in SCRIPTS}
COMMANDS |= {f"ddm_min.{name} --help": ["-m", f"ddm_min.{name}", "--help"] for name in MODULES}


def seconds(words: list[str]) -> float:
    """Processor time of one fresh interpreter, with one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rounds = [
        {name: seconds(words) for name, words in COMMANDS.items()} for _ in range(args.rounds + 1)
    ][1:]
    print(f"import torch: {statistics.median(r['import torch'] for r in rounds):.2f} s")
    print("| command | seconds beyond it |\n|---|---|")
    for name in list(COMMANDS)[1:]:
        print(f"| {name} | {statistics.median(r[name] - r['import torch'] for r in rounds):+.2f} |")


if __name__ == "__main__":
    main()
