"""Times blocks of steps, and counts what they do beside computing. Owns no state.

Runs on the training thread and its current stream. A block begins and ends with the device idle; inside it nothing of
ours waits, so that the host may run ahead as it does in training.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flightrec.bench.results import Quiet

Step = Callable[[], object]

_WAITS = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
)
"""Waits that torch's debug mode for synchronisation does not tell of."""


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block_s(step: Step, num_steps: int, device: torch.device) -> float:
    """Mean seconds of a step, from the first one's begin to the last one's end on the device.

    The mean, since what a budget records differs from step to step; across blocks medians are taken.
    """
    wait(device)
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        return (time.perf_counter() - began) / num_steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_steps):
        step()
    end.record()
    wait(device)
    return float(begin.elapsed_time(end)) / 1e3 / num_steps


def host_s(step: Step, num_steps: int, device: torch.device) -> float:
    """Median seconds until a step returns, the device being idle when it begins."""
    found = []
    for _ in range(num_steps):
        wait(device)
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    wait(device)
    return statistics.median(found)


def look(step: Step, num_steps: int, device: torch.device, directory: Path | None) -> Quiet:
    """Run steps and count what they do beside computing.

    Args:
        step: one iteration.
        num_steps: that are counted.
        device: where it computes.
        directory: in which files are counted; None if nothing writes any.
    """
    files = _num_files(directory)
    if device.type != "cuda":
        for _ in range(num_steps):
            step()
        return Quiet(num_steps, None, None, None, None, _num_files(directory) - files)
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    with _counted_waits() as count:
        for _ in range(num_steps):
            step()
    after = torch.cuda.memory_stats(device)
    wait(device)
    requests, segments = (
        int(after.get(name, 0)) - int(before.get(name, 0)) for name in ("allocation.all.allocated", "num_device_alloc")
    )
    peak = int(torch.cuda.max_memory_allocated(device))
    return Quiet(num_steps, count(), requests, segments, peak, _num_files(directory) - files)


@contextmanager
def _counted_waits() -> Iterator[Callable[[], int]]:
    """Inside, count what waits for the device: by torch's debug mode, and by its explicit calls."""
    calls: list[str] = []
    with warnings.catch_warnings(record=True) as told, _noting(calls):
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: len(calls) + sum("synchronizing CUDA operation" in str(one.message) for one in told)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _noting(calls: list[str]) -> Iterator[None]:
    """Note each explicit wait."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _WAITS]

    def noted(original: Callable[..., object]) -> Callable[..., object]:
        def wait_and_note(*args: object, **options: object) -> object:
            calls.append(original.__qualname__)
            return original(*args, **options)

        return wait_and_note

    for owner, name, original in originals:
        setattr(owner, name, noted(original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _num_files(directory: Path | None) -> int:
    return 0 if directory is None else sum(1 for path in directory.rglob("*") if path.is_file())
