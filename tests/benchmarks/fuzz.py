"""Fuzzes the commands that read incidents: seeded mutations, each against each command. Needs no torch.

    python tests/benchmarks/fuzz.py [--seconds 240] [--processes 2] [--seed 0]

Prints the figures of ``docs/hostile-files.md`` and, as JSON, every run that ended as none may. The exit code is 1 if
there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hostile_support import Tally, bases, figures, fuzz, told


def work(folder: str, seed: int, seconds: float) -> Tally:
    """One process's share."""
    whole = sorted(path for path in Path(folder, "bases").glob("*") if path.is_dir())
    whole = [path if list(path.glob("*.h5")) else next(path.iterdir()) for path in whole]
    end = time.monotonic() + seconds
    return fuzz(whole, Path(folder, f"work{seed}"), seed, lambda _: time.monotonic() > end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HDF5_USE_FILE_LOCKING": "FALSE"}
    with tempfile.TemporaryDirectory() as folder:
        list(bases(Path(folder, "bases")))
        shares = [(folder, asked.seed + number, asked.seconds) for number in range(asked.processes)]
        with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
            tallies = pool.starmap(work, shares)
    tally = sum(tallies, Tally())
    print(figures(tally))
    print(told(tally))
    sys.exit(1 if tally.bad else 0)


if __name__ == "__main__":
    main()
