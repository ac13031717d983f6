"""What the host remembers of past iterations: their identity, their loss and metrics.

Host only, training thread only, bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

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
    """

    tick: int
    attempt: int
    iteration: int
    num_microbatches: int = 1
    partial: bool = False
    left_out: str = ""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


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
"""Samples that one incident carries (8 MB), so that they fit into a message."""


class ScalarHistory:
    """Loss and metrics of the last iterations, by name.

    Args:
        iterations: how many are kept for each name.
    """

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self._series: dict[str, deque[tuple[int, float]]] = {}

    def add(self, name: str, iteration: int, value: float) -> None:
        """Append one sample."""
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                return
            series = self._series[name] = deque(maxlen=self._iterations)
        series.append((iteration, value))

    def columns(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Name to (iterations int64 [n], values float64 [n]), together at most ``MAX_SAMPLES``, the latest ones."""
        most = max(1, MAX_SAMPLES // max(1, len(self._series)))
        columns = {}
        for name, series in self._series.items():
            latest = list(series)[-most:]
            iterations = np.fromiter((iteration for iteration, _ in latest), np.int64, len(latest))
            columns[name] = (iterations, np.fromiter((value for _, value in latest), np.float64, len(latest)))
        return columns

    def state_dict(self) -> dict[str, list[tuple[int, float]]]:
        """Plain data for a checkpoint."""
        return {name: list(series) for name, series in self._series.items()}

    def load_state_dict(self, state: dict[str, list[tuple[int, float]]]) -> None:
        """Replace the content by what ``state_dict`` gave."""
        self._series = {
            name: deque(((int(i), float(v)) for i, v in samples), maxlen=self._iterations)
            for name, samples in list(state.items())[:MAX_SERIES]
        }
