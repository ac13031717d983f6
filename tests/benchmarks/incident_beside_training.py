"""How much an incident of 5 000 records slows the training loop on a CPU down while it is written.

    python tests/benchmarks/incident_beside_training.py [--rounds 5] [--writer process|thread]

Quiet stretches and stretches in which an incident is being written alternate in one run with the recorder on, after a
stretch without a recorder. Prints the median iteration of each kind as a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import h5py
import torch
from models import batches, loss_of, make

import flightrec

CONFIG = {
    "select": [{"tensors": "*"}],
    "ring": {"iterations": 4, "memory": "1 GiB"},
    "triggers": [{"kind": "manual"}],
    "incident": {"after": 1, "limit": 1000, "cooldown": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet-iterations", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--writer", choices=["process", "thread"], default="process")
    options = parser.parse_args()
    torch.set_num_threads(1)

    net = make(blocks=options.blocks)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    (x,) = batches(1, rows=options.rows)[0]

    def iterate(recorder: flightrec.Recorder | None) -> float:
        start = time.perf_counter()
        loss_of(net, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
        return time.perf_counter() - start

    bare = [iterate(None) for _ in range(options.quiet_iterations)]
    quiet: list[float] = []
    beside: list[float] = []
    first: list[float] = []
    write_s: list[float] = []
    num_records = 0
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "incident": {**CONFIG["incident"], "writer": options.writer}}
        with flightrec.Recorder(config, directory=folder) as recorder:
            recorder.attach(net)
            for _ in range(10):
                iterate(recorder)
            flusher = recorder._capture.engine.flusher
            for index in range(options.rounds):
                quiet += [iterate(recorder) for _ in range(options.quiet_iterations)]
                recorder.trigger("benchmark")
                start = time.perf_counter()
                first.append(iterate(recorder))
                while len(flusher.done) <= index:
                    beside.append(iterate(recorder))
                write_s.append(time.perf_counter() - start)
            num_records = flusher.done[-1]["num_records"]
            num_bytes = flusher.done[-1]["bytes"]
    report(options, bare, quiet, beside, first, write_s, num_records, num_bytes)


def report(options, bare, quiet, beside, first, write_s, num_records, num_bytes) -> None:
    """Print the table."""
    quiet_ms, beside_ms = 1e3 * statistics.median(quiet), 1e3 * statistics.median(beside)
    print(
        f"{num_records} records an incident, {num_bytes / 2**20:.0f} MiB, {options.rounds} incidents, writer: "
        f"{options.writer}; {os.cpu_count()} cores, {platform.processor() or platform.machine()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, h5py {h5py.__version__}, flightrec "
        f"{flightrec.__version__}\n"
    )
    print("| iteration | n | median ms | against quiet |")
    print("|---|---|---|---|")
    for name, times in (
        ("no recorder", bare),
        ("recorder on, quiet", quiet),
        ("recorder on, an incident is being written", beside),
        ("the one in which the rule fires", first),
    ):
        median = 1e3 * statistics.median(times)
        print(f"| {name} | {len(times)} | {median:.1f} | {median / quiet_ms:.2f}x |")
    print(f"\nFrom the trigger to the complete incident: {statistics.median(write_s):.1f} s (median).")
    print(f"Beside an incident: {beside_ms / quiet_ms:.3f}x of the quiet iteration.")


if __name__ == "__main__":
    main()
