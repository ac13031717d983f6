"""What each route to Transformer Engine's tensors adds to a step: all of them alternating in one run, medians.

    python tests/benchmarks/te_cost.py [--rounds 2] [--steps 6] [--layers 4] [--recipe delayed]

Needs a GPU and Transformer Engine; the routes through debug mode also nvdlfw_inspect. TransformerLayers of hidden size
4096 with 4096 tokens, forward and backward, timed by CUDA events. Debug mode is switched on for a model's whole life,
so the routes through it have a model of their own, each behind the plain one again. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import te_models
import torch
from te_stack import DO_NOTHING, FFN, HEADS, HIDDEN, TOKENS, TeRun, debug_mode

import flightrec

OPERANDS = ["activation", "gradient"]

TAPS: dict[str, dict[str, Any]] = {
    "tap: activation and gradient, quantized": {
        "budget": "none",
        "select": [{"tensors": OPERANDS, "keep": ["quantized"]}],
    },
    "tap: the same, statistics only": {
        "budget": "none",
        "select": [{"tensors": OPERANDS, "keep": ["statistics"]}],
    },
    "tap: everything selected by default": {"budget": "none"},
    "tap: te-fp8-pretrain.yaml, budget 1%": {},
}
"""Name in the table, and configuration; an empty one is the shipped file."""

RECORD = (
    "FlightRecorder: {enabled: True, tensors: [activation, gradient], high_precision_tensor: False, "
    "quantized_tensor: True, directory: incidents}"
)
FEATURES = {
    "debug mode, nothing matches": ("no_such_layer", DO_NOTHING),
    "debug mode, a feature that does nothing": (".*", DO_NOTHING),
    "feature: activation and gradient, quantized": (".*", RECORD),
}
"""Name in the table, layers, and the feature's line in the configuration."""


class Bench(TeRun):
    """Steps of one model, timed."""

    def steps(self, num: int, *, warm_up: int, after: Callable[[], None] | None = None) -> list[float]:
        """Milliseconds of each of ``num`` steps after ``warm_up`` more."""
        events = []
        for _ in range(warm_up + num):
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self.step()
            if after is not None:
                after()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events[warm_up:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipe", choices=te_models.RECIPES, default="delayed")
    options = parser.parse_args()
    counts = {"num": options.steps, "warm_up": options.warm_up}
    times: dict[str, list[float]] = {"plain": [], **{name: [] for name in (*TAPS, *FEATURES)}}
    sizes: dict[str, str] = {}
    plain = Bench(options.recipe, options.layers)
    for _ in range(options.rounds):
        for name, config in TAPS.items():
            times["plain"] += plain.steps(**counts)
            times[name] += with_tap(plain, config, counts, sizes, name)
        if importlib.util.find_spec("nvdlfw_inspect") is not None:
            for name, (layers, line) in FEATURES.items():
                times["plain"] += plain.steps(**counts)
                with tempfile.TemporaryDirectory() as folder, debug_mode(Path(folder), layers, line) as debug_api:
                    times[name] += Bench(options.recipe, options.layers).steps(**counts, after=debug_api.step)
                te_models.reset_fp8()
                plain = Bench(options.recipe, options.layers)
    report(times, sizes, options)


def with_tap(
    bench: Bench, config: dict[str, Any], counts: dict[str, int], sizes: dict[str, str], name: str
) -> list[float]:
    """Times with a recorder attached; notes records and bytes of the last iteration."""
    from flightrec.config.load import load, packaged

    made = {"ring": {"iterations": 2, "memory": "40 GiB"}, **config} if config else load(packaged("te-fp8-pretrain"))
    with tempfile.TemporaryDirectory() as folder, flightrec.Recorder(made, directory=folder) as recorder:
        recorder.attach(bench.model)
        found = bench.steps(**counts, after=recorder.step)
        ring = recorder._capture.engine.ring
        layouts = [ring.layouts[i] for i in ring.index(recorder._tick - 1).layout_ids]
        sizes[name] = f"{len(layouts)} | {sum(layout.num_bytes for layout in layouts) / 2**20:.0f}"
    return found


def report(times: dict[str, list[float]], sizes: dict[str, str], options: argparse.Namespace) -> None:
    print(
        f"{torch.cuda.get_device_name()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"Transformer Engine {version('transformer_engine')}, flightrec {flightrec.__version__}; {options.layers} "
        f"TransformerLayers, hidden {HIDDEN}, FFN {FFN}, {HEADS} heads, {TOKENS} tokens, {options.recipe} scaling, "
        "forward and backward\n"
    )
    print("| | records | MiB | n | median ms a step | 10% to 90% | added |")
    print("|---|---|---|---|---|---|---|")
    off = statistics.median(times["plain"])
    for name, samples in times.items():
        if samples:
            ordered = sorted(samples)
            low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
            middle = statistics.median(samples)
            print(
                f"| {name} | {sizes.get(name, ' | ')} | {len(samples)} | {middle:.2f} | {low:.2f} to {high:.2f} | "
                f"{100 * (middle / off - 1):+.1f}% |"
            )


if __name__ == "__main__":
    main()
