"""One device's recording: ring, rules, verdicts and flusher, wired for ``step``.

The recorder's inner half: knows ticks, not the user's model. ``record`` may be called from autograd's threads; the rest
runs on the training thread and its current CUDA stream. In steady state ``step`` launches the evaluation and a copy to
pinned memory, reads verdicts that have arrived, and waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.boundary import last_word
from flightrec.budget.rotation import Rotation
from flightrec.config.model import Config
from flightrec.config.sizes import Share
from flightrec.flush.flusher import Flusher
from flightrec.flush.history import ScalarHistory, TickInfo, TickLog
from flightrec.flush.host_tier import HostTier
from flightrec.flush.outbox import Outbox
from flightrec.flush.samples import SampleHistory
from flightrec.flush.verdicts import VerdictQueue, VerdictView
from flightrec.judging import Beside, Judge
from flightrec.records import NO_MICROBATCH, Firing, RecordLayout, Severity, Statistic
from flightrec.ring.memory import free_memory_bytes
from flightrec.ring.ring import Ring
from flightrec.rules.evaluate import Evaluator
from flightrec.rules.limits import Limits
from flightrec.writer.client import WriterClient

logger = logging.getLogger("flightrec")

LATENCY_TICKS = 2
"""Slots for the iterations between a fault and the host's answer to it, and while held slots are copied."""

MAX_TROUBLES = 16
"""Failures of parts that recording can do without; after more of them it ends."""

_T = TypeVar("_T")

MAX_FIRINGS = 1000
"""Rows of one iteration that are told as firings; beyond that a fault is everywhere and the records tell."""


class Engine:
    """See the module.

    Args:
        device: where the tensors live that are recorded.
        config: the recorder's.
        client: the running writer.
        start_writer: starts another one, should it die.
        first_tick: the tick of the next iteration.
        on_failure: told once of each rule that raised and was disabled.
        rotation: whose turn it is under a budget; None for none.
        on_trouble: told of each other part that raised while the rest goes on.
    """

    def __init__(
        self,
        device: torch.device,
        config: Config,
        client: WriterClient,
        start_writer: Callable[[], WriterClient],
        *,
        first_tick: int = 0,
        on_failure: Callable[[str, Exception], None] | None = None,
        rotation: Rotation | None = None,
        on_trouble: Callable[[str, Exception], None] = last_word,
    ) -> None:
        self.device = device
        self._on_trouble = on_trouble
        self._num_troubles = 0
        self._config = config
        self._rules = config.triggers
        self._rotation = rotation
        self.limits = Limits(self._rules, config.incident.limit, config.incident.cooldown)
        self._beside = Beside(device)
        latency_ticks = LATENCY_TICKS + (self._beside.stream is not None)  # judged a tick later: one slot more
        with self._beside.allocating():
            self.evaluator = Evaluator(device, self._rules, on_failure=on_failure)
        self.ring = Ring(
            device,
            iterations=config.ring.iterations,
            after=config.incident.after,
            latency=latency_ticks,
            memory_bytes=_memory_bytes(config, device),
            on_out_of_memory=config.ring.on_out_of_memory,
            microbatches=config.ring.microbatches,
            graph_replays=config.ring.graph_replays,
            on_layout=self.evaluator.register,
        )
        depth = config.ring.iterations + config.incident.after + 2 * latency_ticks + 2
        self._queue = VerdictQueue(device, depth)
        self._judge = Judge(
            self.ring, self.evaluator, self._queue, self._beside, self._contain, takes_turns=rotation is not None
        )
        self._log = TickLog(depth)
        self.history = ScalarHistory(config.history.iterations)
        self.tier: HostTier | None = None
        if client.host is not None:
            older = config.incident.older_iterations
            self.tier = HostTier(self.ring, client.host, older=older, on_failure=on_trouble)
        self._ended = False
        self.flusher = Flusher(
            self.ring,
            Outbox(client, start_writer, self.ring),
            self.limits,
            after=config.incident.after,
            log=self._log,
            history=self.history,
            view_of=self._queue.get,
            tier=self.tier,
        )
        self._samples: SampleHistory | None = None
        if client.history is not None:
            note_blind = self.flusher.note_blind
            self._samples = SampleHistory(client.history, lambda reason: note_blind("", "history", reason))
        self._host_firings: dict[int, list[Firing]] = {}
        self._allowed: tuple[bool, ...] = ()
        self._scalars: dict[int, RecordLayout] = {}
        """Layouts of losses and metrics, by id."""
        self._scalars_of: tuple[list[int], list[int]] = ([], [])
        """The records of the last iteration, and which of them are losses and metrics."""
        self._num_layouts_seen = 0
        self.ring.begin(first_tick)

    @torch.no_grad()
    def step(self, info: TickInfo, host_firings: Sequence[Firing] = ()) -> None:
        """End the tick of ``info``, judge it, begin the next one. Never waits for the device.

        Args:
            info: which iteration the tick was.
            host_firings: firings of host rules (manual) in this iteration.

        Raises:
            RingMemoryError: in the first iteration, if ``ring.on_out_of_memory`` is ``error`` and it does not fit.
        """
        self._close_tick(info, host_firings)
        self.ring.begin(info.tick + 1)
        if self.tier is not None:
            self.tier.advance()
        for view in self._contain("reading verdicts", self._queue.poll) or ():
            self._contain("taking a verdict", self._take, view)
        self._contain("writing incidents", self.flusher.pump)

    def can_tell(self, was_off: bool) -> bool:
        """Whether ``fault`` has something to tell: once, and after recording has ended only from the host tier."""
        held = self.tier is not None and self.tier.num_iterations > 0
        return not self._ended and (held or not was_off)

    @torch.no_grad()
    def fault(self, info: TickInfo, host_firings: Sequence[Firing], timeout_s: float, *, readable: bool = True) -> bool:
        """The training loop is being left by an exception: judge the unfinished tick, write all. Waits.

        If the device cannot be read any more (its CUDA context is dead), the incident is written without it: from the
        host tier, if there is one.

        Args:
            info: of the unfinished iteration.
            host_firings: of the rule ``exception``, and manual ones.
            timeout_s: give up waiting for the writer after this long.
            readable: False: recording failed before, and the device is not asked again.

        Returns:
            Whether all was handed to the writer in time.
        """
        self._ended = True
        views: list[VerdictView] = []
        lost = "recording had failed before"
        try:
            if readable:
                self._close_tick(info, host_firings)
                views = self._queue.poll(wait=True)
        except Exception as error:  # a dead CUDA context
            readable, lost = False, str(error)
        if not readable:
            logger.error("flightrec: the device cannot be read any more (%s): what only its ring held is lost", lost)
            self._contain("the incident of a dead device", self.flusher.lose_device, info, host_firings)
        for view in views:
            self._contain("taking a verdict", self._take, view)
        self._contain("ending incidents", self.flusher.finish)
        return self.flusher.drain(timeout_s)

    def close(self, info: TickInfo | None, host_firings: Sequence[Firing], timeout_s: float) -> bool:
        """Judge what the last, unfinished tick holds, write what is pending, stop the writer; waits for both.

        Args:
            info: of the current tick, None when recording had ended before.
            host_firings: of host rules that no ``step`` took.
            timeout_s: as in ``fault``.

        Returns:
            Whether all of it was written.
        """
        try:
            if info is not None and (host_firings or self.ring.has_records(info.tick)):
                self._close_tick(info, host_firings)
            self._take_what_comes()
        except Exception as error:  # a dead CUDA context
            logger.error("flightrec: the last verdicts cannot be read (%s)", error)
        self._contain("ending incidents", self.flusher.finish)
        closed = self.flusher.close(timeout_s)
        if self.tier is not None:
            self.tier.close()
        return closed

    def _contain(self, part: str, call: Callable[..., _T], *args: Any) -> _T | None:
        """Call something whose failure costs its own result only: told, and tried again the next time.

        Raises:
            Exception: it failed again and again; there is no use in going on.
        """
        try:
            return call(*args)
        except Exception as error:
            self._num_troubles += 1
            if self._num_troubles > MAX_TROUBLES:
                raise
            self._on_trouble(part, error)
            return None

    # -- one tick ----------------------------------------------------------------------------------------------------

    def _close_tick(self, info: TickInfo, host_firings: Sequence[Firing]) -> None:
        ring = self.ring
        ring.join()
        if not ring.committed:
            ring.commit()
            num_bytes = ring.bytes_per_iteration * (ring.iterations + self._config.incident.after + 1)
            self._contain("pinning staging memory", self.flusher.prepare, num_bytes)
            logger.info("flightrec: %s", self._contain("the ring's summary", ring.summary))
        if len(ring.layouts) != self._num_layouts_seen:
            self._contain("telling layouts", self._see_layouts)
        if host_firings:
            self._host_firings[info.tick] = list(host_firings)
        self._contain("the limits", self._set_limits, info.tick)
        releases = self._contain("releasing slots", self.flusher.take_releases)
        self._judge.close(info.tick, releases or (), bool(host_firings), self._left_out(info))
        self._log.add(info)

    def _set_limits(self, tick: int) -> None:
        allowed = self.limits.allowed(tick)
        if allowed != self._allowed:
            for number, may_hold in enumerate(allowed):
                self.evaluator.set_may_hold(number, may_hold)
            self._allowed = allowed

    def _left_out(self, info: TickInfo) -> NDArray[np.bool_] | None:
        """Rows that rotation left out of this tick, bool [R]; None if no rule wants to know."""
        if self._rotation is None:
            return None
        info.left_out = self._rotation.note
        return self._rotation.left_out(self.ring.shape[2]) if self.evaluator.wants_left_out else None

    def _see_layouts(self) -> None:
        layouts = self.ring.layouts
        for layout in layouts[self._num_layouts_seen :]:
            if layout.key.tensor in ("loss", "metric") and not layout.key.layer:
                self._scalars[layout.layout_id] = layout
        self._num_layouts_seen = len(layouts)
        self.flusher.post_tables()

    # -- a verdict on the host ---------------------------------------------------------------------------------------

    def _take(self, view: VerdictView) -> None:
        info = self._log.get(view.tick)
        if info is None:
            return
        firings = self._host_firings.pop(view.tick, [])
        self._contain("what CUDA graphs recorded", self._see_replays, info)
        layout_ids = self.ring.index(view.tick).layout_ids
        self._take_scalars(info, view.statistics, layout_ids)
        if self._samples is not None:
            self._samples.add(info.attempt, info.iteration, view.statistics, layout_ids, self.ring.layouts)
        if view.firings:
            firings = self._firings(view, info) + firings
        if self.tier is not None:
            self.tier.on_verdict(view, info, layout_ids, is_good=not firings, paused=self.flusher.busy)
        self.flusher.on_verdict(view, firings)
        if firings and self._rotation is not None:
            self._rotation.on_verdict(firings, self.flusher.recording_until)

    def _see_replays(self, info: TickInfo) -> None:
        replayed = self.ring.take_replays(info.tick)
        info.num_microbatches = max(info.num_microbatches, replayed.num_microbatches)
        if replayed.advice:
            logger.info("flightrec: %s", replayed.advice)
        for layer, reason in replayed.dropped:
            self.flusher.note_blind(layer, "", reason)
            logger.warning("flightrec: %r: %s", layer, reason)

    def _take_scalars(self, info: TickInfo, statistics: NDArray[np.float64], layout_ids: list[int]) -> None:
        whole: float | None = None
        parts: list[float] = []
        if layout_ids != self._scalars_of[0]:  # in every step: no Python loop over all records
            self._scalars_of = layout_ids, sorted(self._scalars.keys() & layout_ids)
        for layout_id in self._scalars_of[1]:
            key, row = self._scalars[layout_id].key, self._scalars[layout_id].row
            value = scalar_of(statistics[row])
            if key.part.startswith("data.") and key.microbatch != NO_MICROBATCH:
                if statistics[row][Statistic.NUMEL] == 1:  # longer ones, such as sample ids, are records only
                    info.facts.setdefault("data", {}).setdefault(key.part[5:], {})[str(key.microbatch)] = value
            elif key.tensor == "metric":
                info.metrics[key.part] = value
            elif key.microbatch == NO_MICROBATCH:
                whole = value
            else:
                parts.append(value)
        if whole is None and parts:
            whole = float(np.mean(parts))
        info.loss = whole
        if whole is not None:
            self.history.add("loss", info.iteration, whole, info.attempt)
        for name, value in info.metrics.items():
            self.history.add(f"metric.{name}", info.iteration, value, info.attempt)

    def _firings(self, view: VerdictView, info: TickInfo) -> list[Firing]:
        where = {}
        for sequence, layout_id in enumerate(self.ring.index(view.tick).layout_ids):
            layout = self.ring.layouts[layout_id]
            where[layout.row] = (sequence, layout)
        firings = []
        for fired in view.firings[:MAX_FIRINGS]:
            rule = self._rules[fired.rule]
            if fired.row not in where and rule.kind not in ("missing_record", "expert"):
                continue
            sequence, layout = where.get(fired.row) or (-1, self._layout_of(fired.row))
            message = self.evaluator.explain(
                fired.rule, layout.key, fired.value, fired.threshold, view.statistics[fired.row], watch=fired.watch
            )
            firings.append(
                Firing(
                    rule=rule.name,
                    kind=rule.kind,
                    severity=Severity.WATCH if fired.watch else rule.severity,
                    attempt=info.attempt,
                    iteration=info.iteration,
                    key=layout.key,
                    sequence=sequence,
                    value=fired.value,
                    threshold=fired.threshold,
                    message=f"{message}, iteration {info.iteration}",
                )
            )
        firings.sort(key=lambda f: f.key.blame_order(f.sequence, info.num_microbatches) if f.key else (0, 0, 0))
        return firings

    def _layout_of(self, row: int) -> RecordLayout:
        """The latest layout of a row that this iteration did not record."""
        return next(layout for layout in reversed(self.ring.layouts) if layout.row == row)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Windows, limits and history for a checkpoint, those of the latest iteration included. Synchronises."""
        self._take_what_comes()
        return {
            "rules": self.evaluator.state_dict(),
            "limits": self.limits.state_dict(),
            "history": self.history.state_dict(),
            "samples": self._samples.state_dict() if self._samples is not None else None,
        }

    def _take_what_comes(self) -> None:
        """Wait for the verdicts that are on their way."""
        for view in self._queue.poll(wait=True):
            self._contain("taking a verdict", self._take, view)
        self._beside.rejoin()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, each part that can be used. Synchronises."""
        self._take_what_comes()  # of iterations before
        loads: dict[str, Callable[[Any], None]] = {
            "rules": self.evaluator.load_state_dict,
            "limits": self.limits.load_state_dict,
            "history": self.history.load_state_dict,
        }
        if self._samples is not None and state.get("samples"):
            loads["samples"] = self._samples.load_state_dict
        for name, load in loads.items():
            self._contain(f"load_state_dict: {name}", lambda name=name, load=load: load(state[name]))


def scalar_of(row: NDArray[np.float64]) -> float:
    """The value (or mean) that a statistics row of a loss or metric stands for, NaN and infinities included."""
    positive, negative = row[Statistic.POSITIVE_INF_COUNT], row[Statistic.NEGATIVE_INF_COUNT]
    if row[Statistic.NAN_COUNT] > 0 or (positive > 0 and negative > 0):
        return float("nan")
    if positive > 0:
        return float("inf")
    if negative > 0:
        return float("-inf")
    numel = row[Statistic.NUMEL]
    return float(row[Statistic.SUM] / numel) if numel > 0 else float("nan")


def _memory_bytes(config: Config, device: torch.device) -> int | None:
    memory = config.ring.memory
    return memory.of(free_memory_bytes(device)) if isinstance(memory, Share) else memory
