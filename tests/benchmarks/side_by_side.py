"""The recorder beside the alternatives: the same model, one process, each way paired with the step without any.

    python tests/benchmarks/side_by_side.py --output results.json [--tokens 4096 16384] [--only WORD ...] [--pairs 20]

Needs a GPU and Transformer Engine; debug mode nvdlfw_inspect, and the others their packages: what is missing says so in
its row. The JSON is that of ``flightrec bench --output`` and is written again after each row, so that a run that is cut
short keeps what it has; ``python docs/cost_picture.py results.json`` makes table and chart of it. With more than one
``--tokens`` the alternatives are measured for the first only, and the others have a third of the pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import te_models
import torch
from te_stack import DO_NOTHING, TOKENS, TeRun, debug_mode

from flightrec.bench import tables
from flightrec.bench.arms import Bare, Plain, WithRecorder
from flightrec.bench.compare import Plan, compare
from flightrec.bench.machine import machine
from flightrec.bench.results import Comparison, Study, document
from flightrec.config.load import load, packaged
from flightrec.config.model import Config

SIX = "[activation, weight, gradient, output, wgrad, dgrad]"
STATISTICS = "[min, max, mean]"
ALL_STATISTICS = "[min, max, mean, std, l1_norm, l2_norm, cur_amax, dynamic_range]"
SETTLING_STEPS = 4
"""Of a model that was made anew, before anything is timed."""

SETTLING_STEPS_IN_TURNS = 32
"""Of a recorder, before its steps are timed."""

Open = Callable[[TeRun], contextlib.AbstractContextManager[Bare]]


@dataclass(frozen=True)
class Way:
    """One row: how it is opened on a run, how much is measured, and the package it needs."""

    open: Open | Config
    plan: Plan
    needs: str = ""


@dataclass(frozen=True)
class Alternative:
    """An arm of ``flightrec.bench``."""

    name: str
    run: TeRun
    way: Open

    def open(self) -> contextlib.AbstractContextManager[Bare]:
        return self.way(self.run)


def debugging(line: str) -> Open:
    """Transformer Engine's debug mode with one feature; it holds for a model's whole life, so it has one of its own."""

    @contextlib.contextmanager
    def opened(run: TeRun) -> Iterator[Bare]:
        with tempfile.TemporaryDirectory() as name, debug_mode(Path(name), ".*", line) as debug_api:
            run.renew()

            def step() -> torch.Tensor:
                loss = run.step()
                debug_api.step()
                return loss

            yield Bare(step, Path(name))
        run.renew()
        for _ in range(SETTLING_STEPS):
            run.step()

    return opened


@contextlib.contextmanager
def underflow_overflow(run: TeRun) -> Iterator[Bare]:
    """Hugging Face's; it keeps no handles of its hooks, so that ours are told apart by what was there before."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: list(module._forward_hooks) for module in run.model.modules()}
    DebugUnderflowOverflow(run.model)
    try:
        yield Bare(run.step)
    finally:
        for module, known in before.items():
            for number in set(module._forward_hooks) - set(known):
                del module._forward_hooks[number]


@contextlib.contextmanager
def anomaly(run: TeRun) -> Iterator[Bare]:
    """torch's own: checks each gradient for NaN, keeps a stack of each forward operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            yield Bare(run.step)


@contextlib.contextmanager
def trainscope(run: TeRun) -> Iterator[Bare]:
    """trainscope with its default settings."""
    from trainscope import TrainScope, TrainScopeConfig

    with tempfile.TemporaryDirectory() as name:
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
        scope = TrainScope(run.model, optimizer, config=TrainScopeConfig(run_dir=name)).attach()
        run.after_backward = lambda loss: scope.step(loss.item())
        try:
            yield Bare(run.step, Path(name))
        finally:
            run.after_backward = None
            scope.detach()


def ways(num_pairs: int) -> dict[str, Way]:
    """Rows by name; the slow ones have few steps."""
    # Under a budget tensors are first seen for a whole round of turns: that is no steady state.
    often = Plan(num_steps=12, num_warm_up=SETTLING_STEPS_IN_TURNS, max_pairs=num_pairs, min_pairs=min(8, num_pairs))
    third = max(1, num_pairs // 3)
    whole = Plan(num_steps=12, num_warm_up=SETTLING_STEPS_IN_TURNS, max_pairs=third, min_pairs=min(4, third))
    some = Plan(num_steps=6, num_warm_up=4, min_pairs=4, max_pairs=4, num_looks=4)
    few = Plan(num_steps=3, num_warm_up=2, min_pairs=2, max_pairs=2, num_looks=1, num_host_steps=1)
    once = Plan(num_steps=1, num_warm_up=0, min_pairs=1, max_pairs=1, num_looks=1, num_host_steps=0)
    everything = load({"budget": "none", "ring": {"iterations": 2, "memory": "60 GiB"}})
    stats = f"LogTensorStats: {{enabled: True, tensors: [activation, weight, gradient], stats: {STATISTICS}}}"
    dump = f"DumpTensors: {{enabled: True, tensors: {SIX}, high_precision_tensor: True, quantized_tensor: True}}"
    inspect = "nvdlfw_inspect"
    return {
        "flightrec, default.yaml": Way(load(packaged("default.yaml")), often),
        "flightrec, te-fp8-pretrain.yaml": Way(load(packaged("te-fp8-pretrain.yaml")), whole),
        "flightrec, everything": Way(everything, whole),
        "Transformer Engine debug mode, a feature that does nothing": Way(debugging(DO_NOTHING), some, inspect),
        "torch.autograd.set_detect_anomaly": Way(anomaly, some),
        "Hugging Face DebugUnderflowOverflow": Way(underflow_overflow, some, "transformers"),
        "LogTensorStats, 3 statistics of 3 tensors": Way(debugging(stats), few, inspect),
        "LogTensorStats, 8 statistics of 3 tensors": Way(
            debugging(stats.replace(STATISTICS, ALL_STATISTICS)), few, inspect
        ),
        "trainscope": Way(trainscope, once, "trainscope"),
        "DumpTensors, six tensors": Way(debugging(dump), once, inspect),
    }


def measure(name: str, way: Way, run: TeRun) -> Comparison:
    """One row; an alternative that is missing or fails says so in it."""
    if isinstance(way.open, Config):
        return compare(Plain(run), WithRecorder(run, way.open, name), way.plan, run.device)
    if way.needs and importlib.util.find_spec(way.needs) is None:
        return Comparison(name, missing=f"{way.needs} is not installed")
    try:
        return compare(Plain(run), Alternative(name, run, way.open), way.plan, run.device)
    except Exception as error:
        run.renew()
        return Comparison(name, missing=f"failed here: {type(error).__name__}: {error}"[:200])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[TOKENS])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipe", choices=te_models.RECIPES, default="delayed")
    parser.add_argument("--only", nargs="+", default=[""], help="words; rows whose name has one of them")
    options = parser.parse_args()
    studies: list[Study] = []
    facts: dict[str, Any] = machine(torch.device("cuda"))
    for number, tokens in enumerate(options.tokens):
        run = TeRun(options.recipe, options.layers, tokens)
        for _ in range(SETTLING_STEPS):
            run.step()
        found: list[Comparison] = []
        for name, way in ways(max(1, options.pairs // (3 if number else 1))).items():
            if not any(word in name for word in options.only) or (number and not isinstance(way.open, Config)):
                continue
            print(f"{name} ...", flush=True)
            began = time.perf_counter()
            found.append(measure(name, way, run))
            print(f"{time.perf_counter() - began:.1f} s: {' | '.join(tables.row(found[-1]))}", flush=True)
            data = document([*studies, Study(run.name, tuple(found))], facts)
            options.output.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        studies.append(Study(run.name, tuple(found)))
        del run
        torch.cuda.empty_cache()
    print(tables.markdown(studies, facts))


if __name__ == "__main__":
    main()
