"""Host time of a record, by stage: from a source's hook to the launch, with the real kernels or with none.

    python tests/benchmarks/host_time.py [--model mlp|te] [--steps 30] [--budget none] [--kernels] [--profile]

``mlp`` is a stack of linear layers under the ``modules`` source; ``te`` the Transformer Engine tap: on a CPU its real
modules over kernels written in torch, on a GPU the model of ``te_cost.py``. Without ``--kernels`` the implementation
that ``kernels.ops.choose`` would give is replaced by a function that does nothing, so that what is left is the way to
the launch. Each stage is timed by a clock around the function that begins it and holds what is not in a later one;
``whole step`` is the difference of a step with and without the recorder, for each record. Prints a
Markdown table in microseconds; shares are worth more than the figures of a machine that does other things beside.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

import flightrec
from flightrec.capture import Capture
from flightrec.kernels import ops
from flightrec.ring.registry import Registry
from flightrec.ring.ring import Ring
from flightrec.ring.streams import Streams
from flightrec.sources import hooks
from flightrec.sources.base import Keeper
from flightrec.sources.te import TeSource

PLACES: tuple[tuple[Any, str, str], ...] = (
    (hooks.EnterHook, "__call__", "hook"),
    (hooks.LeaveHook, "__call__", "hook"),
    (hooks.GradientHook, "__call__", "hook"),
    (hooks.AccumulatedHook, "__call__", "hook"),
    (TeSource, "operand", "operand of a product"),
    (Keeper, "keep", "looking at a plain tensor"),
    (Capture, "capture", "selection, turn, extraction"),
    (Ring, "record", "ring"),
    (Registry, "claim", "ring: claim"),
    (Registry, "find", "ring: find"),
    (Streams, "enter", "ring: streams"),
)
"""Function that begins a stage, and the stage's name; in the order in which a record passes them."""

LAUNCH = "launch"
CLOCK = time.perf_counter_ns


class Stages:
    """Time inside each stage that is not inside a later one; a step's sum by stage."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}
        self._inner: list[int] = [0]

    def wrap(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """The same function under the clock."""
        clock, inner, spent = CLOCK, self._inner, self.spent_ns

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - began
                spent[stage] = spent.get(stage, 0) + took - inner.pop()
                inner[-1] += took

        return timed

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """All places are timed while the context lasts."""
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in PLACES if name in vars(owner)]
        for owner, name, stage in PLACES:
            if name in vars(owner):
                setattr(owner, name, self.wrap(vars(owner)[name], stage))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


def nothing(*_: Any, **__: Any) -> None:
    """Stands for the kernels."""


class Mlp:
    """Linear layers with activations, forward and backward."""

    def __init__(self, device: str) -> None:
        width = 4096 if device == "cuda" else 8
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))).to(device)
        self.x = torch.randn(width, width, device=device, requires_grad=True)

    def step(self) -> None:
        self.model(self.x).mean().backward()
        self.model.zero_grad()


class Layers:
    """Transformer Engine's own modules on a CPU, with delayed scaling."""

    def __init__(self, te: Any) -> None:
        options = {"params_dtype": torch.bfloat16, "device": "cpu"}
        self.model = nn.Sequential(
            *(nn.Sequential(te.LayerNormLinear(16, 16, **options), te.Linear(16, 16, **options)) for _ in range(4))
        )
        self.x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
        self._te, self._recipe = te, te.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max")

    def step(self) -> None:
        with self._te.autocast(enabled=True, recipe=self._recipe):
            y = self.model(self.x)
        y.float().mean().backward()
        self.model.zero_grad()


@contextlib.contextmanager
def workload(name: str) -> Iterator[Any]:
    """An object with ``model`` and ``step``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "mlp":
        yield Mlp(device)
    elif device == "cuda":
        import te_cost

        yield te_cost.Bench("delayed", 4)
    else:
        import pytest
        import te_cpu_modules

        with pytest.MonkeyPatch.context() as patches, te_cpu_modules.running(patches) as te:
            yield Layers(te)


def steps(bench: Any, count: int, after: Callable[[], object] = lambda: None) -> list[float]:
    """Host seconds of each step, the device idle before it and not waited for in it."""
    found = []
    for _ in range(count):
        if torch.cuda.is_available() and bench.x.device.type == "cuda":
            torch.cuda.synchronize()
        began = CLOCK()
        bench.step()
        found.append((CLOCK() - began) / 1e9)
        after()
    return found


def quantile(samples: Sequence[float], at: float) -> float:
    """The sample below which this share of them lies."""
    return sorted(samples)[min(int(at * len(samples)), len(samples) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "te"), default="mlp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--budget", default="none")
    parser.add_argument("--at", type=float, default=0.5, help="quantile; a low one on a machine that is not quiet")
    parser.add_argument("--kernels", action="store_true", help="launch the real kernels")
    parser.add_argument("--profile", action="store_true", help="print where the time goes by function")
    options = parser.parse_args()
    with workload(options.model) as bench:
        if not options.kernels:
            ops.choose = lambda _: nothing
        measure(bench, options)


def measure(bench: Any, options: argparse.Namespace) -> None:
    """Time steps without the recorder, with it, and with it under the clock; print the table."""
    config = {"budget": options.budget, "triggers": [], "ring": {"iterations": 2, "memory": "40 GiB"}}
    if bench.x.device.type == "cpu":
        config["ring"] = {"iterations": 2}
    count, stages = options.steps, Stages()
    steps(bench, 5)
    quiet = steps(bench, count)
    with tempfile.TemporaryDirectory() as folder, flightrec.Recorder(config, directory=folder) as recorder:
        recorder.attach(bench.model)
        steps(bench, 8, recorder.step)
        ring = recorder._capture.engine.ring
        recorded = steps(bench, count, recorder.step)
        num_records = statistics.median(
            len(ring.index(recorder._tick - 1 - i).layout_ids) for i in range(min(count, 32))
        )
        if options.profile:
            profile(bench, count, recorder)
        with stages.installed():
            ring._capture = stages.wrap(ring._capture, LAUNCH)
            sums: dict[str, list[float]] = {}

            def note() -> None:
                for stage, spent in stages.spent_ns.items():
                    sums.setdefault(stage, []).append(spent / 1e3)
                stages.spent_ns.clear()
                recorder.step()
                stages.spent_ns.clear()

            steps(bench, count, note)
    per = max(num_records, 1)
    print(f"{options.model}, budget {options.budget}: {num_records:g} records a step; us a record\n")
    print("| stage | us a record |\n|---|---|")
    for stage in dict.fromkeys([*(name for _, _, name in PLACES), LAUNCH]):
        if stage in sums:
            print(f"| {stage} | {quantile(sums[stage], options.at) / per:.2f} |")
    total = sum(quantile(samples, options.at) for samples in sums.values()) / per
    before = quantile(quiet, options.at)
    added = (quantile(recorded, options.at) - before) * 1e6
    print(f"| sum, clock included | {total:.2f} |")
    print(f"| whole step, clock not included | {added / per:.2f} |")
    print(f"\nstep: {before * 1e6:.0f} us without, {added:+.0f} us with the recorder")


def profile(bench: Any, count: int, recorder: Any) -> None:
    """Print the functions that take most."""
    profiler = cProfile.Profile()
    for _ in range(count):
        profiler.enable()
        bench.step()
        profiler.disable()
        recorder.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
