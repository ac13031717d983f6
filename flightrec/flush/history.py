"""What the host remembers of past iterations: their identity, their loss and metrics.

Host only, training thread only, bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class TickInfo:
    """Which iteration a tick was, as the host saw it.

    Attributes:
        tick: recorder-internal count of steps.
        attempt: attempt number.
        iteration: the user's iteration number.
        num_microbatches: how many were seen.
        partial: recorded only in part (an exception came in between).
        left_out: which layers were not in turn, for people; empty if all that is selected was recorded.
        loss: known once the verdict was read.
        metrics: likewise, by name.
        facts: what ``/iterations`` says of it: times, optimizer settings, values given with microbatches.
        random_states: by name, uint8 [n], as they were when the iteration began; encoded when an incident asks.
    """

    tick: int
    attempt: int
    iteration: int
    num_microbatches: int = 1
    partial: bool = False
    left_out: str = ""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    random_states: Callable[[], dict[str, NDArray[np.uint8]]] = dict


class TickLog:
    """The infos of the latest ticks."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._infos: OrderedDict[int, TickInfo] = OrderedDict()

    def add(self, info: TickInfo) -> None:
        """Remember a tick; the oldest one beyond ``depth`` is forgotten."""
        self._infos[info.tick] = info
        while len(self._infos) > self._depth:
            self._infos.popitem(last=False)

    def get(self, tick: int) -> TickInfo | None:
        """The info of a tick, or ``None`` when it was forgotten or never known."""
        return self._infos.get(tick)


MAX_SERIES = 4096
"""Names that are remembered; later ones are not."""

MAX_SAMPLES = 500_000
"""Samples that one incident carries (12 MB), so that they fit into a message."""


class ScalarHistory:
    """Loss and metrics of the last iterations, by name, exactly; statistics of tensors have ``SampleHistory``.

    Args:
        iterations: how many are kept for each name.
    """

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self._series: dict[str, deque[tuple[int, float, int]]] = {}

    def add(self, name: str, iteration: int, value: float, attempt: int = 0) -> None:
        """Append one sample."""
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                return
            series = self._series[name] = deque(maxlen=self._iterations)
        series.append((iteration, value, attempt))

    def columns(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]]:
        """Name to (iterations, values float64, attempts) [n]; together ``MAX_SAMPLES`` at most, the latest ones."""
        most = max(1, MAX_SAMPLES // max(1, len(self._series)))
        columns = {}
        for name, series in self._series.items():
            iterations, values, attempts = zip(*list(series)[-most:], strict=True)
            columns[name] = (np.array(iterations, np.int64), np.array(values, np.float64), np.array(attempts, np.int64))
        return columns

    def state_dict(self) -> dict[str, list[tuple[int, float, int]]]:
        """Plain data for a checkpoint."""
        return {name: list(series) for name, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Add the samples that ``state_dict`` gave and that are not here already (in a rewind they are)."""
        for name, samples in list(state.items())[:MAX_SERIES]:
            if name not in self._series and len(self._series) >= MAX_SERIES:
                continue
            merged = {(int(a[0]) if a else 0, int(i)): float(v) for i, v, *a in samples}
            merged |= {(attempt, iteration): value for iteration, value, attempt in self._series.get(name, ())}
            kept = [(iteration, merged[attempt, iteration], attempt) for attempt, iteration in sorted(merged)]
            if kept:
                self._series[name] = deque(kept, maxlen=self._iterations)
