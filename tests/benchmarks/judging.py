"""What ending an iteration costs: judged launch by launch in order, and replayed beside the next iteration.

    python tests/benchmarks/judging.py [--device cuda] [--rows 261 2000] [--steps 200]

All default rules over rows of a transformer. Prints a Markdown table: operations that are launched one by one; host
time of ``Judge.close``; time that the stream of the training is held up when nothing else runs; on CUDA also a loop of
matrix products of about 25 ms a step with and without judging, alternating.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flightrec
from flightrec import judging
from flightrec.config.rules import default_rules
from flightrec.flush.verdicts import VerdictQueue
from flightrec.judging import Beside, Judge
from flightrec.records import NO_MICROBATCH, Key, Stage
from flightrec.ring.ring import Ring
from flightrec.rules.evaluate import Evaluator

TENSORS = ("input", "activation", "weight", "gradient", "output", "wgrad", "dgrad", "parameter")

STEPS_OF_BLOCK = 4


class Counted(TorchDispatchMode):
    """How many operations were dispatched, less views."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


class Bench:
    """A ring of ``rows`` records, judged in order or replayed."""

    def __init__(self, device: torch.device, rows: int, *, replays: bool) -> None:
        self.device, self.beside = device, Beside(device)
        with self.beside.allocating():
            self.evaluator = Evaluator(device, default_rules())
        self.ring = Ring(
            device, iterations=4, latency=2 + replays, memory_bytes=1 << 20, on_layout=self.evaluator.register
        )
        self.queue = VerdictQueue(device, 12)
        self.judge = Judge(
            self.ring, self.evaluator, self.queue, self.beside, lambda part, call, *args: call(*args), replays=replays
        )
        self.tick = 0
        self.ring.begin(0)
        tiny = torch.ones(1, device=device)
        self.ring.record(Key("", "loss", stage=Stage.LOSS), high_precision=tiny, keep=frozenset())
        for number in range(rows - 1):
            layer, tensor, microbatch = number // 16, TENSORS[number % 8], number // 8 % 2
            at = NO_MICROBATCH if tensor == "parameter" and not microbatch else microbatch
            self.ring.record(Key(f"layers.{layer}", tensor, microbatch=at), high_precision=tiny, keep=frozenset())
        self.ring.join()
        self.ring.commit()
        for _ in range(12):
            self.step()

    def step(self) -> None:
        """End an iteration, and read what has come to the host."""
        self.judge.close(self.tick)
        self.tick += 1
        self.ring.begin(self.tick)
        self.queue.poll()

    def host_ms(self, steps: int) -> list[float]:
        """Host time of ``Judge.close``, the device idle."""
        times = []
        for _ in range(steps):
            synchronize(self.device)
            began = time.perf_counter()
            self.judge.close(self.tick)
            times.append(1e3 * (time.perf_counter() - began))
            self.tick += 1
            self.ring.begin(self.tick)
            self.queue.poll()
        return times

    def device_ms(self, steps: int) -> tuple[float, float]:
        """Median time that the training's stream is held up, and until the verdict is there."""
        held, all_of_it = [], []
        for _ in range(steps):
            torch.cuda.synchronize()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(30_000_000)  # all launches are queued before the first runs
            marks[0].record()
            self.step()
            marks[1].record()
            self.beside.rejoin()
            marks[2].record()
            torch.cuda.synchronize()
            held.append(marks[0].elapsed_time(marks[1]))
            all_of_it.append(marks[0].elapsed_time(marks[2]))
        return statistics.median(held), statistics.median(all_of_it)

    def launches(self) -> int:
        """Operations that are launched one by one in a step."""
        with Counted() as counted:
            self.step()
        return counted.number


def beside_training(benches: dict[str, Bench], pairs: int) -> dict[str, tuple[float, float]]:
    """By name: the ratio to a step without judging, median and half of its 95% confidence interval."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 16384, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(4096, 16384, device="cuda", dtype=torch.bfloat16)

    def block_ms(bench: Bench | None) -> float:
        """Steps in a row: the judgement of one runs beside the next."""
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(STEPS_OF_BLOCK):
            for _ in range(27):
                torch.mm(a, b, out=out)
                out.mul_(0.5)
            if bench is not None:
                bench.step()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    for _ in range(5):
        quiet = block_ms(None)
    print(f"<!-- a step without judging takes {quiet / STEPS_OF_BLOCK:.2f} ms -->")
    ratios: dict[str, list[float]] = {name: [] for name in benches}
    for _ in range(pairs):
        for name, bench in benches.items():
            quiet = block_ms(None)
            ratios[name].append(block_ms(bench) / quiet)
    return {
        name: (statistics.median(values), 1.25 * 1.96 * statistics.stdev(values) / len(values) ** 0.5)
        for name, values in ratios.items()
    }


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[261, 2000])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--priority", type=int, default=judging.PRIORITY, help="of the streams beside the training")
    options = parser.parse_args()
    judging.PRIORITY = options.priority
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    print(f"{name}; Python {platform.python_version()}, torch {torch.__version__}, flightrec {flightrec.__version__}\n")
    print("| rows | judged | launches | host ms (p50, p95) | stream held up, ms | verdict after, ms | step beside |")
    print("|---|---|---|---|---|---|---|")
    for rows in options.rows:
        benches = {"in order": Bench(device, rows, replays=False), "replayed": Bench(device, rows, replays=True)}
        ratios = beside_training(benches, options.pairs) if on_gpu else {}
        for label, bench in benches.items():
            assert bench.judge.is_replayed == (label == "replayed")
            times = bench.host_ms(options.steps)
            middle, high = np.percentile(times, [50, 95])
            held, total = bench.device_ms(30) if on_gpu else (float("nan"), float("nan"))
            ratio = "{:.4f} ± {:.4f}".format(*ratios[label]) if label in ratios else ""
            launches = bench.launches()
            print(f"| {rows} | {label} | {launches} | {middle:.3f}, {high:.3f} | {held:.3f} | {total:.3f} | {ratio} |")


if __name__ == "__main__":
    main()
