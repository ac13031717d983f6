"""How long the run's own step takes, observed without waiting for the device.

On CUDA an event in each ``step()`` on the current stream, read in a later one when it has been reached; on the CPU the
clock. Training thread only.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch

NUM_WARM_UP = 2
"""First steps that are no samples: they compile, allocate, tune."""

MIN_SAMPLES = 3
WINDOW = 33
MAX_PENDING = 64
"""Events that wait for the device; while it is further behind, steps are not timed."""

LEAST_SHARE = 0.05
"""A step is never taken for shorter than this share of what was observed, whatever recording is said to cost."""


@dataclass(slots=True)
class _Mark:
    event: torch.cuda.Event
    own_s: float
    follows: bool  # the step before has an event too


class StepClock:
    """The median time of the latest steps, recording's own time taken off.

    Args:
        device: the run's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._num_seen = 0
        self._last_s: float | None = None
        self._pending: deque[_Mark] = deque()
        self._free: list[torch.cuda.Event] = []
        self._follows = False

    @property
    def step_s(self) -> float | None:
        """Seconds of a step without recording; None until enough steps were seen."""
        return statistics.median(self._samples) if len(self._samples) >= MIN_SAMPLES else None

    def tick(self, own_s: float) -> None:
        """A step has ended; call it in every ``step()``. Does not wait.

        Args:
            own_s: what recording took of the step that ends here.
        """
        if self._device.type == "cuda":
            self._tick_cuda(own_s)
            return
        now, last = time.perf_counter(), self._last_s
        self._last_s = now
        if last is not None:
            self._add(now - last, own_s)

    def _tick_cuda(self, own_s: float) -> None:
        if torch.cuda.is_current_stream_capturing():  # neither recording nor asking is allowed in there
            self._follows = False
            return
        if len(self._pending) < MAX_PENDING:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._pending.append(_Mark(event, own_s, self._follows))
            self._follows = True
        else:
            self._follows = False
        while len(self._pending) > 1 and self._pending[1].event.query():
            first, second = self._pending.popleft(), self._pending[0]
            if second.follows:
                self._add(first.event.elapsed_time(second.event) / 1e3, second.own_s)
            self._free.append(first.event)

    def _add(self, elapsed_s: float, own_s: float) -> None:
        self._num_seen += 1
        if self._num_seen > NUM_WARM_UP:
            self._samples.append(max(elapsed_s - own_s, LEAST_SHARE * elapsed_s))


class StreamTimer:
    """What a part of each ``step()`` takes of the current stream: the median of the latest ones.

    On CUDA by a pair of events, read in a later step when they have been reached; elsewhere by the clock. Training
    thread only; never waits.

    Args:
        device: the run's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._begun: float | torch.cuda.Event | None = None
        self._num_seen = 0

    @property
    def median_s(self) -> float | None:
        """Seconds; None until one was seen."""
        return statistics.median(self._samples) if self._samples else None

    def begin(self) -> None:
        """The part begins."""
        self._begun = self._mark() if self._device.type == "cuda" else time.perf_counter()

    def end(self) -> None:
        """It has ended; does nothing if it was not seen to begin."""
        begun, self._begun = self._begun, None
        if isinstance(begun, float):
            self._add(time.perf_counter() - begun)
        elif begun is not None:
            ended = self._mark()
            if ended is None:
                self._free.append(begun)
            else:
                self._pending.append((begun, ended))
        if self._pending and not torch.cuda.is_current_stream_capturing():
            self._read()

    def _mark(self) -> torch.cuda.Event | None:
        if len(self._pending) >= MAX_PENDING or torch.cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            begun, ended = self._pending.popleft()
            self._add(float(begun.elapsed_time(ended)) / 1e3)
            self._free += [begun, ended]

    def _add(self, seconds: float) -> None:
        self._num_seen += 1
        if self._num_seen > NUM_WARM_UP:  # the first ones allocate and compile
            self._samples.append(seconds)
