"""Measures one way of recording against the same model without it, in pairs of blocks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flightrec.bench.arms import Arm, Told
from flightrec.bench.bound import byte_bound_s
from flightrec.bench.pairing import orders, relative_overhead
from flightrec.bench.results import Comparison, Quiet, Recorded
from flightrec.bench.timing import block_s, host_s, look, wait

MAX_BOUND_ITERATIONS = 4
"""Iterations whose byte bound is measured: turns differ."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        num_steps: timed steps of a block.
        num_warm_up: steps before them, of which the last are timed on the host.
        min_pairs, max_pairs: pairs of blocks.
        half_width: of the interval, as a share of a step, at which no more pairs are made.
        num_looks: steps whose synchronisations, allocations and files are counted, once; 0 leaves that out.
        num_host_steps: steps of a warm-up that are timed on the host.
        seed: of the order.
    """

    num_steps: int = 12
    num_warm_up: int = 10
    min_pairs: int = 8
    max_pairs: int = 40
    half_width: float = 0.003
    num_looks: int = 16
    num_host_steps: int = 3
    seed: int = 0


@dataclass(slots=True)
class _Side:
    """What one arm gave so far."""

    arm: Arm
    step_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    quiet: Quiet | None = None
    told: Told | None = None


def compare(
    off: Arm, on: Arm, plan: Plan, device: torch.device, on_pair: Callable[[Comparison], None] | None = None
) -> Comparison:
    """Measure ``on`` against ``off``, blocks alternating, until the interval is narrow enough or the pairs are used up.

    Args:
        off: without.
        on: with.
        plan: how much.
        device: of the model; waited for between blocks.
        on_pair: told of what is known after each pair.

    Raises:
        FlightrecError: an arm cannot be opened.
    """
    sides = _Side(off), _Side(on)
    with _warnings_told_once():
        for number, off_first in enumerate(orders(plan.max_pairs, seed=plan.seed), 1):
            for side in sides if off_first else sides[::-1]:
                _block(side, plan, device)
            if on_pair is not None:
                on_pair(_comparison(*sides, None))
            if number >= plan.min_pairs and _is_enough(*sides, plan.half_width):
                break
    told = sides[1].told
    return _comparison(*sides, None if told is None else _recorded(told, device))


def _block(side: _Side, plan: Plan, device: torch.device) -> None:
    with side.arm.open() as running:
        num_host = min(plan.num_host_steps, plan.num_warm_up)
        for _ in range(plan.num_warm_up - num_host):
            running.step()
        if num_host:
            side.host_s.append(host_s(running.step, num_host, device))
        if plan.num_looks and side.quiet is None:
            side.quiet = look(running.step, plan.num_looks, device, running.directory)
        side.step_s.append(block_s(running.step, plan.num_steps, device))
        side.told = running.told(plan.num_steps) or side.told
        directory = running.directory
    if directory is not None:
        gc.collect()  # what a recorder leaves to the collector goes now, not within the next block
    wait(device)


@contextmanager
def _warnings_told_once() -> Iterator[None]:
    """Inside, a recorder that is started again does not repeat what another one has logged."""
    seen: set[object] = set()

    def is_new(record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        said = (record.msg, *(str(one) for one in arguments if not isinstance(one, float)))
        is_known = said in seen
        seen.add(said)
        return not is_known

    logger = logging.getLogger("flightrec")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _is_enough(off: _Side, on: _Side, half_width: float) -> bool:
    return relative_overhead(off.step_s, on.step_s).half_width <= half_width


def _comparison(off: _Side, on: _Side, recorded: Recorded | None) -> Comparison:
    return Comparison(
        on.arm.name,
        tuple(off.step_s),
        tuple(on.step_s),
        tuple(off.host_s),
        tuple(on.host_s),
        off.quiet,
        on.quiet,
        recorded,
    )


def _recorded(told: Told, device: torch.device) -> Recorded:
    iterations = told.iterations
    count = max(1, len(iterations))
    shown = iterations[-MAX_BOUND_ITERATIONS:]
    bounds = [byte_bound_s(sizes.copied, sizes.read, device) for sizes in shown]
    return Recorded(
        num_records=sum(sizes.num_records for sizes in iterations) / count,
        num_bytes=sum(sum(sizes.copied) for sizes in iterations) / count,
        num_read_bytes=sum(sum(sizes.read) for sizes in iterations) / count,
        predicted_s=told.predicted_s,
        bound_s=sum(bounds) / len(bounds) if bounds else None,
        told=told.lines,
    )
