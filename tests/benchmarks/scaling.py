"""How the cost grows with records, bytes, tokens and layers, one of them at a time.

    python tests/benchmarks/scaling.py --output scaling.json [--pairs 2] [--quick]

Runs on a GPU, or on the CPU with ``--quick`` and small sizes. A chain of linear layers in bfloat16, forward and
backward; everything that is selected is recorded in every iteration (``budget: none``), with all default rules. Writes
the JSON of ``flightrec bench --output``, a study a row of points; ``python docs/cost_picture.py`` plots it.

| what grows | model | records |
|---|---|---|
| records | n layers of 256 x 256, 256 tokens | input, output and their gradients: four a layer |
| bytes | 8 layers of width 1024, more and more rows | the same; tensors of 64 KiB to 64 MiB |
| tokens | 8 layers of width 4096 | activation and output |
| layers | n layers of width 4096, 4 096 tokens | activation and output |
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from flightrec.bench.arms import Plain, WithRecorder
from flightrec.bench.compare import Plan, compare
from flightrec.bench.machine import machine
from flightrec.bench.results import Comparison, Study, document
from flightrec.bench.tables import markdown, row
from flightrec.bench.workload import Workload
from flightrec.config.load import load

FOUR = ["activation", "output", "gradient", "dgrad"]
TWO = ["activation", "output"]


@dataclass(frozen=True)
class Point:
    """One measurement: the number that grows, and the chain."""

    value: int
    num_layers: int
    width: int
    num_rows: int
    tensors: list[str]


def points(quick: bool) -> Iterator[tuple[str, list[Point]]]:
    """What grows, and where it is measured."""
    if quick:
        yield "records", [Point(4 * n, n, 16, 16, FOUR) for n in (2, 4)]
        yield "bytes", [Point(2 * 64 * n, 2, 64, n, FOUR) for n in (16, 64)]
        return
    yield "records", [Point(4 * n, n, 256, 256, FOUR) for n in (4, 16, 64, 160, 320, 500)]
    yield "bytes", [Point(2 * 1024 * n, 8, 1024, n, FOUR) for n in (32, 512, 4096, 16384, 32768)]
    yield "tokens", [Point(n, 8, 4096, n, TWO) for n in (1024, 4096, 16384)]
    yield "layers", [Point(n, n, 4096, 4096, TWO) for n in (4, 16, 48)]


def chain(point: Point, device: torch.device) -> Workload:
    """The model and its step."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            *(nn.Linear(point.width, point.width, bias=False, dtype=torch.bfloat16) for _ in range(point.num_layers))
        )
        x = torch.randn(point.num_rows, point.width, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return Workload(str(point.value), model, step, device)


def measure(point: Point, device: torch.device, plan: Plan, say: Callable[[str], None]) -> Comparison:
    """One point, named by its number."""
    config = load(
        {
            "budget": "none",
            "ring": {"iterations": 1, "memory": "60 GiB" if device.type == "cuda" else "64 MiB"},
            "select": [{"layers": "*", "tensors": point.tensors}],
        }
    )
    workload = chain(point, device)
    for _ in range(3):
        workload.step()
    found = compare(Plain(workload), WithRecorder(workload, config, str(point.value)), plan, device)
    say(" | ".join(row(found)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(num_steps=options.steps, num_warm_up=8, min_pairs=options.pairs, max_pairs=options.pairs, num_looks=0)
    facts, studies = machine(device), []
    for name, row_of_points in points(options.quick):
        found = []
        for point in row_of_points:
            found.append(measure(point, device, plan, lambda text: print(text, flush=True)))
            if device.type == "cuda":
                torch.cuda.empty_cache()
        studies.append(Study(name, tuple(found)))
        options.output.write_text(json.dumps(document(studies, facts), indent=1, allow_nan=False) + "\n")
    print(markdown(studies, facts))


if __name__ == "__main__":
    main()
