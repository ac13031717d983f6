"""What the start-up line predicts beside what is measured, for six configurations.

    python tests/benchmarks/prediction.py --output prediction.json [--pairs 5] [--model te|builtin]

``te`` needs a GPU and Transformer Engine; ``builtin`` is the model of ``flightrec bench`` and runs anywhere. Writes the
JSON of ``flightrec bench --output``, again after each row, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from flightrec.bench.arms import Plain, WithRecorder
from flightrec.bench.compare import Plan, compare
from flightrec.bench.machine import machine
from flightrec.bench.results import Comparison, Study, document
from flightrec.bench.tables import head, machine_line
from flightrec.bench.workload import builtin
from flightrec.config.load import load

SETTLING_STEPS = 32
"""Of each recorder, before its steps are timed: its first iterations see every tensor for the first time."""

OPERANDS = ["activation", "gradient"]
RING: dict[str, Any] = {"ring": {"iterations": 2, "memory": "60 GiB"}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default: budget 1%": {},
    "budget 10%": {"budget": "10%"},
    "everything": {"budget": "none", **RING},
    "everything, statistics only": {
        "budget": "none",
        "select": [{"tensors": ["input", "activation", "weight", "gradient", "output"], "keep": ["statistics"]}],
    },
    "operands, quantized": {"budget": "none", "select": [{"tensors": OPERANDS, "keep": ["quantized"]}], **RING},
    "outputs": {"budget": "none", "select": [{"tensors": ["output"], "keep": ["high_precision"]}], **RING},
}


def line(found: Comparison) -> str:
    """A row of the table."""
    recorded, error = found.recorded, found.prediction_error
    assert recorded is not None
    predicted = "" if recorded.predicted_s is None else f"{1e3 * recorded.predicted_s:.3g}"
    interval = found.overhead
    ends = [1e3 * share * found.quiet_s for share in (interval.low, interval.high)]
    off_by = "" if error is None else f"{100 * error:+.0f}%"
    return (
        f"| {found.name} | {recorded.num_records:.4g} | {recorded.num_bytes / 2**20:.4g} | {predicted} | "
        f"{1e3 * found.added_s:.3g} [{ends[0]:.3g}, {ends[1]:.3g}] | {off_by} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=["te", "builtin"], default="te")
    options = parser.parse_args()
    if options.model == "te":
        from te_stack import TeRun

        workload: Any = TeRun()
    else:
        workload = builtin("cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(3):
        workload.step()
    plan = Plan(
        num_steps=options.steps,
        num_warm_up=SETTLING_STEPS,
        min_pairs=min(3, options.pairs),
        max_pairs=options.pairs,
        num_looks=0,
    )
    facts = machine(workload.device)
    print("| | records | MiB | predicted, ms | measured, ms [95%] | error |\n|---|---|---|---|---|---|", flush=True)
    found = []
    for name, settings in CONFIGURATIONS.items():
        found.append(compare(Plain(workload), WithRecorder(workload, load(settings), name), plan, workload.device))
        print(line(found[-1]), flush=True)
        study = Study(workload.name, tuple(found))
        options.output.write_text(json.dumps(document([study], facts), indent=1, allow_nan=False) + "\n")
    print(f"\n{machine_line(facts)}; {head(study)}")


if __name__ == "__main__":
    main()
