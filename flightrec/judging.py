"""Ending a tick on the device: gather its statistics, judge them, hold the evidence, choose the next tick's slot.

Called by ``step()`` on its thread; nothing waits for the device. While layouts still grow, and always on the CPU, all
of it runs in order: the next record comes after the verdict. On CUDA this is hundreds of small launches, so that as
soon as the layout has settled it is captured, in two graphs:

- the *turn*, on the training's stream: a copy of the tick's statistics, and the next tick's slot;
- the *judgement*, on a stream of our own beside the next iteration: all rules, the slots to hold, and the bytes for the
  host, which are then copied to pinned memory.

The next turn waits for the judgement, which has long passed by then, so that the slot table is only ever written by one
of them, and statistics are not overwritten while they are judged. The slot is chosen before the verdict is there, which
takes one slot more (``SlotTable.turn`` says why).

Whatever the judgement touches is memory of its own stream or of the captures' pool, from the first tick on: freed at
any time, it is never given to the training while a judgement still runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.flush.verdicts import VerdictQueue
from flightrec.kernels.driver import own_stream
from flightrec.ring.ring import Ring
from flightrec.rules.evaluate import Evaluator
from flightrec.rules.replay import Replay
from flightrec.rules.series import upload
from flightrec.rules.verdict import VerdictFormat

logger = logging.getLogger("flightrec")

SETTLED_TICKS = 3
"""Ticks in order with the same layout before it is captured."""


NUM_BRANCHES = 16
"""Rules that are judged at the same time."""

PRIORITY = -2
"""Of the streams: above the training's, so that small kernels get the next gap."""


class Beside:
    """A stream of our own, in order with the training's; on the CPU there is none and nothing to order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = own_stream(device, "judging", PRIORITY) if device.type == "cuda" else None
        self.branches: list[torch.cuda.Stream] = []
        """For the captures of rules that do not wait for each other; only ever captured."""
        if self.stream is not None:
            self.branches = [own_stream(device, f"judging {n}", PRIORITY) for n in range(NUM_BRANCHES)]
        self._begun = torch.cuda.Event() if self.stream is not None else None
        self._ended = torch.cuda.Event() if self.stream is not None else None

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Memory that is allocated in here belongs to the stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """In here work goes to the stream, after all that the current one was given. ``rejoin`` ends it."""
        if self.stream is None or self._begun is None or self._ended is None:
            yield
            return
        self._begun.record(torch.cuda.current_stream(self._device))
        self.stream.wait_event(self._begun)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            self._ended.record(self.stream)

    def rejoin(self) -> None:
        """The current stream waits for what ``following`` was given last; the host does not."""
        if self._ended is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ended)


@dataclass(slots=True)
class _Captured:
    """Both graphs and what the host tells them, by changing it in place on the training's stream."""

    turn: Replay
    judgement: Replay
    release: torch.Tensor  # int64 [S]: the tick whose hold ends, by slot; the turn resets it to -1
    hold_request: torch.Tensor  # bool scalar; the judgement resets it
    left_out: torch.Tensor | None  # bool [R]
    last_left_out: NDArray[np.bool_] | None = None
    last_tick: int = -1


class Judge:
    """See the module.

    Args:
        ring: whose ticks end; on CUDA with one slot more of latency.
        evaluator: the rules. Made inside ``beside.allocating()``.
        queue: takes the verdicts to the host.
        beside: the stream for it.
        contain: calls a part whose failure costs its own result only, as ``Engine._contain``.
        takes_turns: whether ``left_out`` is ever given.
        replays: capture and replay; by default on CUDA only.
    """

    def __init__(
        self,
        ring: Ring,
        evaluator: Evaluator,
        queue: VerdictQueue,
        beside: Beside,
        contain: Callable[..., Any],
        *,
        takes_turns: bool = False,
        replays: bool | None = None,
    ) -> None:
        self._ring, self._evaluator, self._queue = ring, evaluator, queue
        self._beside, self._contain = beside, contain
        self._takes_turns = takes_turns
        self._may_capture = beside.stream is not None if replays is None else replays
        self._pool = torch.cuda.graph_pool_handle() if beside.stream is not None else None
        self._layout: object = None
        self._num_settled = 0
        self._captured: _Captured | None = None
        self._retired: list[_Captured] = []  # kept while they may still run; the last one also keeps the pool alive
        with beside.allocating(), torch.inference_mode(False):
            self._true = torch.ones((), dtype=torch.bool, device=ring.device)

    @torch.inference_mode(False)  # what is made here outlives a loop that is in inference mode
    @torch.no_grad()
    def close(
        self,
        tick: int,
        releases: Sequence[tuple[int, int]] = (),
        hold_request: bool = False,
        left_out: NDArray[np.bool_] | None = None,
    ) -> None:
        """End ``tick``; records from here on are the next one's. Launches, never waits.

        Args:
            tick: one more than the last time.
            releases: (slot, tick) pairs whose hold ends.
            hold_request: hold the evidence whatever the rules say.
            left_out: bool [rows] on the host, whose turn it was not; None for none.
        """
        self._beside.rejoin()
        self._evaluator.prepare()
        captured = self._settle()
        if captured is None:
            with self._beside.following():
                self._in_order(tick, releases, hold_request, left_out)
            self._beside.rejoin()
        else:
            self._replay(captured, tick, releases, hold_request, left_out)

    @property
    def is_replayed(self) -> bool:
        """Whether the last tick was judged beside, from what was captured."""
        return self._captured is not None

    # -- in order

    def _in_order(
        self, tick: int, releases: Sequence[tuple[int, int]], hold_request: bool, left_out: NDArray[np.bool_] | None
    ) -> None:
        ring = self._ring
        statistics, valid = ring.gather(tick)
        rows = None if left_out is None else upload(left_out, ring.device)
        verdict = self._evaluator.evaluate(tick, statistics, valid, rows)
        release = None
        if releases:
            release = torch.full((ring.num_slots,), -1, dtype=torch.int64, device=ring.device)
            _set_releases(release, releases)
        ring.advance(tick, verdict.hold, release, self._true if hold_request else None)
        self._contain("queueing a verdict", lambda: self._queue.push(tick, *verdict.pack(ring.slots.state, statistics)))

    # -- replayed

    def _settle(self) -> _Captured | None:
        """What is captured for the layout of now; captures it, once that has settled."""
        layout = (self._ring.shape, self._evaluator.generation)
        if layout != self._layout:
            self._layout, self._num_settled = layout, 0
            if self._captured is not None:
                self._retired.append(self._captured)
                self._captured = None
        self._num_settled += 1
        if self._captured is None and self._num_settled > SETTLED_TICKS and self._can_capture():
            try:
                self._captured = self._capture()
            except Exception as error:
                self._may_capture = False
                logger.warning("flightrec: judging cannot be captured (%s); it goes on launch by launch", error)
        if self._retired and self._captured is not None:
            self._retired = [old for old in self._retired if old.last_tick >= self._queue.oldest_tick]
        return self._captured

    def _can_capture(self) -> bool:
        if self._beside.stream is None:
            return self._may_capture
        return self._may_capture and not torch.cuda.is_current_stream_capturing()

    def _capture(self) -> _Captured:
        ring, evaluator, stream = self._ring, self._evaluator, self._beside.stream
        with self._beside.following():
            release = torch.full((ring.num_slots,), -1, dtype=torch.int64, device=ring.device)
            request = torch.zeros((), dtype=torch.bool, device=ring.device)
            left_out = None
            if self._takes_turns and evaluator.wants_left_out:
                left_out = torch.zeros((ring.shape[2],), dtype=torch.bool, device=ring.device)
        self._beside.rejoin()  # the training's stream is the first to change them

        def turn(release: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            statistics, valid = ring.turn(release)
            release.fill_(-1)
            return statistics, valid

        def judgement(
            statistics: torch.Tensor, valid: torch.Tensor, request: torch.Tensor, left_out: torch.Tensor | None
        ) -> tuple[torch.Tensor, VerdictFormat]:
            with evaluator.capturing(self._beside.branches):
                verdict = evaluator.evaluate(-1, statistics, valid, left_out)
            ring.slots.hold_closed(verdict.hold | request)
            request.fill_(False)
            return verdict.pack(ring.slots.state, statistics)

        turning = Replay(turn, release, stream=stream, pool=self._pool)
        gathered = turning.outputs or (None, None)
        judging = Replay(judgement, *gathered, request, left_out, stream=stream, pool=self._pool)
        return _Captured(turning, judging, release, request, left_out)

    def _replay(
        self,
        captured: _Captured,
        tick: int,
        releases: Sequence[tuple[int, int]],
        hold_request: bool,
        left_out: NDArray[np.bool_] | None,
    ) -> None:
        if releases:
            _set_releases(captured.release, releases)
        if hold_request:
            captured.hold_request.fill_(True)
        if captured.left_out is not None:
            self._tell_left_out(captured, captured.left_out, left_out)
        statistics, valid = captured.turn.run(captured.release)
        self._ring.advance(tick, turned=True)
        with self._beside.following():
            packed, form = captured.judgement.run(statistics, valid, captured.hold_request, captured.left_out)
            self._contain("queueing a verdict", self._queue.push, tick, packed, form)
        captured.last_tick = tick

    def _tell_left_out(self, captured: _Captured, rows: torch.Tensor, left_out: NDArray[np.bool_] | None) -> None:
        last, captured.last_left_out = captured.last_left_out, left_out
        if left_out is None:
            if last is not None:
                rows.fill_(False)
        elif last is None or not np.array_equal(left_out, last):
            rows.copy_(upload(left_out, self._ring.device))


def _set_releases(release: torch.Tensor, releases: Sequence[tuple[int, int]]) -> None:
    for slot, tick in releases:
        release[slot : slot + 1].fill_(tick)  # scalars travel with the launch: no host memory to keep alive
