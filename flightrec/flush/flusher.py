"""Incidents from the first firing to the last byte handed to the writer.

Training thread only. ``on_verdict`` decides (new incident, one more firing for an open one, suppressed), ``pump`` moves
one slot at a time into staging memory and messages into the writer's inbox; neither waits. ``drain`` does wait, for an
exception or the end of the run. Holds no reference to the user's tensors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.flush.history import ScalarHistory, TickInfo, TickLog
from flightrec.flush.staging import Segment, SlotCopy, pin, staging_tensor, unpin
from flightrec.flush.verdicts import VerdictView
from flightrec.records import NUM_STATISTICS, Firing, RecordLayout, Severity
from flightrec.ring.ring import Ring
from flightrec.rules.limits import Limits
from flightrec.writer import messages
from flightrec.writer.client import WriterClient

logger = logging.getLogger("flightrec")

LAYOUTS_PER_MESSAGE = 2000
RECORDS_PER_MESSAGE = 20_000
MAX_EXTENSIONS = 2
"""How often a graver firing may lengthen an open incident by ``after`` iterations."""

MAX_PRECURSORS = 200
"""Latest firings that wrote no incident (``watch``, or beyond a limit); the next incident tells them."""


@dataclass(slots=True)
class _Incident:
    number: int
    primary: Firing
    trigger_tick: int
    end_tick: int
    ticks: list[int] = field(default_factory=list)
    """Ticks told to the writer, in order."""
    to_stage: list[int] = field(default_factory=list)
    """Ticks whose slots are held and not yet copied, most suspect first."""
    facts_ended: bool = False
    extensions: int = 0
    blind: list[messages.Blind] = field(default_factory=list)


class Flusher:
    """See the module.

    Args:
        ring: whose slots are read.
        client: the writer.
        limits: how many incidents each rule may write.
        after: iterations to record beyond the fault.
        log: which iteration each tick was.
        history: loss and metrics for the incident.
        view_of: the verdict of a past tick that is still kept.
    """

    def __init__(
        self,
        ring: Ring,
        client: WriterClient,
        limits: Limits,
        *,
        after: int,
        log: TickLog,
        history: ScalarHistory,
        view_of: Callable[[int], VerdictView | None],
    ) -> None:
        self._ring = ring
        self._client = client
        self._limits = limits
        self._after = after
        self._view_of = view_of
        self._rule_index = {rule.name: index for index, rule in enumerate(limits.rules)}
        self._log = log
        self._history = history
        self._incidents: list[_Incident] = []
        self._next_number = 0
        self._outgoing: deque[messages.Outgoing] = deque()
        self._num_layouts_sent = 0
        self._num_quantizers_sent = 0
        self._slot_of: dict[int, int] = {}
        self._held: set[int] = set()
        self._precursors: deque[Firing] = deque(maxlen=MAX_PRECURSORS)
        self._copy: tuple[_Incident, int, SlotCopy] | None = None
        self._stream = torch.cuda.Stream(ring.device) if ring.device.type == "cuda" else None
        self._staging = staging_tensor(client)
        self._pinned = False
        self._notes: dict[tuple[str, str], str] = {}
        self._dead = False
        self.done: list[dict[str, Any]] = []
        """Headers of the writer's ``incident_done`` messages, the latest 100."""

    # -- what the recorder tells -------------------------------------------------------------------------------------

    def note_blind(self, layer: str, tensor: str, reason: str) -> None:
        """Remember what cannot be recorded; it goes into every incident."""
        self._notes.setdefault((layer, tensor), reason)

    def prepare(self, held_bytes: int) -> None:
        """Pin staging memory for ``held_bytes``, once, when the size of the ring is known. Waits on CUDA."""
        if self._stream is None or self._pinned:
            return
        num_bytes = pin(self._staging, held_bytes)
        if num_bytes:
            self._staging = self._staging[:num_bytes]
            self._pinned = True

    def send_config(self, text: str, environment: Mapping[str, Any]) -> None:
        """Tell the writer what every incident carries."""
        self._post(messages.config(text, environment))

    def on_verdict(self, view: VerdictView, firings: Sequence[Firing]) -> None:
        """Take one tick's verdict.

        Args:
            view: of the tick.
            firings: its firings, host rules and precursors included.
        """
        info = self._log.get(view.tick)
        if info is None:  # forgotten: the device is further behind than the ring is deep
            return
        state = self._ring.slots.decode(torch.from_numpy(view.slots.astype(np.int64)))
        self._see_slots(state.slot_tick, state.held)
        for incident in self._incidents:
            if not incident.facts_ended and incident.trigger_tick < view.tick <= incident.end_tick:
                self._add_tick(incident, view.tick)
        if firings:
            self._dispatch(info, list(firings))
        for incident in self._incidents:
            if not incident.facts_ended and view.tick >= incident.end_tick:
                self._end_facts(incident)

    def pump(self) -> bool:
        """Move what can be moved without waiting; returns whether anything did."""
        moved = self._receive()
        moved |= self._advance_copy()
        for incident in [i for i in self._incidents if i.facts_ended and not i.to_stage and not self._copying(i)]:
            self._post(messages.end(incident.number, incident.blind))
            self._incidents.remove(incident)
            moved = True
        return self._send_posted() or moved

    def take_releases(self) -> list[tuple[int, int]]:
        """(slot, tick) pairs that are held on the device and that no incident needs any more."""
        needed = {tick for incident in self._incidents for tick in incident.to_stage}
        needed |= {tick for tick in self._held if self._may_be_needed(tick)}
        if self._copy is not None:
            needed.add(self._copy[1])
        free = [(self._slot_of[tick], tick) for tick in self._held if tick not in needed]
        self._held &= needed
        return free

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """No further iteration comes: end the facts of every open incident with what there is."""
        for incident in self._incidents:
            if not incident.facts_ended:
                self._end_facts(incident)

    def drain(self, timeout_s: float) -> bool:
        """Pump until everything was handed to the writer or ``timeout_s`` passed; waits. For the end of a run."""
        deadline = time.monotonic() + timeout_s
        while (self._incidents or self._outgoing) and time.monotonic() < deadline and self._client.alive:
            if not self.pump():
                time.sleep(0.002)
        return not self._incidents and not self._outgoing

    def close(self, timeout_s: float) -> bool:
        """Hand over what is pending, stop the writer, unpin. Returns whether all of it was written."""
        drained = self.drain(timeout_s)
        if self._copy is not None:
            self._copy[2].abandon()
            self._copy = None
        finished = self._client.close(timeout_s)
        self._receive(closed=True)
        if self._pinned:
            unpin(self._staging)
            self._pinned = False
        return drained and finished

    @property
    def busy(self) -> bool:
        """Whether an incident is open or a message waits."""
        return bool(self._incidents or self._outgoing)

    # -- opening and joining -----------------------------------------------------------------------------------------

    def _dispatch(self, info: TickInfo, firings: list[Firing]) -> None:
        firings.sort(key=lambda firing: -firing.severity.order)  # stable: blame order within a severity
        loud = [firing for firing in firings if firing.severity is not Severity.WATCH]
        open_one = next((i for i in self._incidents if not i.facts_ended), None)
        if open_one is not None:
            self._join(open_one, info, firings)
            return
        writable = [f for f in loud if self._limits.allows(self._rule_index[f.rule], info.tick, f.severity)]
        if writable:
            self._open(info, writable[0], firings)
        elif loud:
            for incident in self._incidents:
                self._post(messages.firing(incident.number, loud))
            for firing in loud:
                logger.info("flightrec: %s (no incident: limit or cooldown of %r)", firing.message, firing.rule)
            self._precursors.extend(firings)
        else:
            self._precursors.extend(firings)

    def _join(self, incident: _Incident, info: TickInfo, firings: list[Firing]) -> None:
        worst = firings[0]
        if worst.severity.order > incident.primary.severity.order and incident.extensions < MAX_EXTENSIONS:
            incident.primary = worst
            incident.end_tick = max(incident.end_tick, info.tick + self._after)
            incident.extensions += 1
            self._count(worst, info.tick)
            logger.error("flightrec: %s", worst.message)
        self._post(messages.firing(incident.number, firings))

    def _open(self, info: TickInfo, primary: Firing, firings: list[Firing]) -> None:
        self._count(primary, info.tick)
        incident = _Incident(self._next_number, primary, info.tick, info.tick + self._after)
        self._next_number += 1
        self._incidents.append(incident)
        log = logger.error if primary.severity is Severity.FAULT else logger.warning
        log("flightrec: %s - an incident is being written", primary.message)
        self.post_tables()
        firings = [*self._precursors, *firings]
        self._precursors.clear()
        self._post(messages.open_incident(incident.number, primary, firings, history=self._history.columns()))
        num_complete = self._ring.iterations - (0 if info.partial else 1)  # before the iteration of the firing
        for tick in range(info.tick - num_complete, info.tick + 1):
            self._add_tick(incident, tick)
        incident.to_stage.sort(reverse=True)  # the faulty iteration first, then backwards

    def _count(self, firing: Firing, tick: int) -> None:
        self._limits.count(self._rule_index[firing.rule], tick, firing.severity)

    def _add_tick(self, incident: _Incident, tick: int) -> None:
        info = self._log.get(tick)
        if info is None:  # before the first iteration
            return
        self._send_iteration(incident, info, self._view_of(tick))
        if tick in self._slot_of:
            incident.to_stage.append(tick)
            self._held.add(tick)
            return
        reason = "no slot holds this iteration any more: all were in use by an earlier incident"
        incident.blind.append((info.attempt, info.iteration, "", "", reason))

    def _may_be_needed(self, tick: int) -> bool:
        return any(not i.facts_ended and i.trigger_tick < tick <= i.end_tick for i in self._incidents)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _post(self, message: messages.Outgoing) -> None:
        self._outgoing.append(message)
        self._send_posted()

    def _send_posted(self) -> bool:
        moved = False
        while self._outgoing and self._client.send(*self._outgoing[0]):
            self._outgoing.popleft()
            moved = True
        return moved

    def post_tables(self) -> None:
        """Tell the writer layouts and quantizers that are new: in the first iterations, hardly ever later."""
        quantizers = self._ring.quantizers
        if len(quantizers) > self._num_quantizers_sent:
            self._post(messages.quantizers(self._num_quantizers_sent, quantizers[self._num_quantizers_sent :]))
            self._num_quantizers_sent = len(quantizers)
        layouts = self._ring.layouts
        while self._num_layouts_sent < len(layouts):
            some = layouts[self._num_layouts_sent : self._num_layouts_sent + LAYOUTS_PER_MESSAGE]
            self._post(messages.layouts(some))
            self._num_layouts_sent += len(some)

    def _send_iteration(self, incident: _Incident, info: TickInfo, view: VerdictView | None) -> None:
        self.post_tables()
        layout_ids = np.asarray(self._ring.index(info.tick).layout_ids, dtype=np.int32)
        statistics = rows_of(view, self._ring.layouts, layout_ids)
        for start in range(0, max(len(layout_ids), 1), RECORDS_PER_MESSAGE):
            part = slice(start, start + RECORDS_PER_MESSAGE)
            self._post(
                messages.iteration(
                    incident.number,
                    info.tick,
                    attempt=info.attempt,
                    iteration=info.iteration,
                    num_microbatches=info.num_microbatches,
                    layout_ids=layout_ids[part],
                    statistics=statistics[part],
                    loss=info.loss,
                    partial=info.partial,
                    metrics=info.metrics,
                )
            )
        incident.ticks.append(info.tick)

    def _end_facts(self, incident: _Incident) -> None:
        incident.facts_ended = True
        blind = [(-1, -1, layer, tensor, reason) for (layer, tensor), reason in self._notes.items()]
        self._post(messages.facts_end(incident.number, blind=[*incident.blind, *blind], trigger=incident.primary))

    def _receive(self, *, closed: bool = False) -> bool:
        received = self._client.poll()
        for message in received:
            if message.kind == "incident_done":
                self.done = [*self.done[-99:], dict(message.header)]
                logger.info("flightrec: incident complete: %s", message.header.get("path"))
            elif message.kind == "error":
                logger.error("flightrec: an incident could not be written: %s", message.header.get("message"))
                self._forget(message.header.get("incident"))
        if not self._dead and not closed and not self._client.alive:
            self._dead = True
            logger.error("flightrec: the writer died, no further incident can be written: %s", self._client.log_tail())
            self._incidents.clear()
            self._outgoing.clear()
        return bool(received)

    def _forget(self, number: object) -> None:
        self._incidents = [incident for incident in self._incidents if incident.number != number]

    # -- copies ------------------------------------------------------------------------------------------------------

    def _see_slots(self, slot_tick: Sequence[int], held: Sequence[bool]) -> None:
        self._slot_of = {tick: slot for slot, tick in enumerate(slot_tick) if tick >= 0}
        self._held = {tick for tick, slot in self._slot_of.items() if held[slot]}

    def _copying(self, incident: _Incident) -> bool:
        return self._copy is not None and self._copy[0] is incident

    def _advance_copy(self) -> bool:
        if self._copy is None:
            waiting = [incident for incident in self._incidents if incident.to_stage]
            if not waiting:
                return False
            # A later fault goes before a warning that is still being staged.
            incident = max(waiting, key=lambda i: (i.primary.severity.order, -i.number))
            tick = incident.to_stage.pop(0)
            pieces = self._ring.read_slot(self._slot_of[tick]) if tick in self._slot_of else iter(())
            copy = SlotCopy(self._client, self._staging, pieces, self._stream)
            for segment in copy.dropped:
                logger.error("flightrec: segment %d is larger than incident.staging_memory: not written", segment)
            self._copy = (incident, tick, copy)
        incident, tick, copy = self._copy

        def send(segments: list[Segment], last: bool) -> None:
            self._post(messages.payload(incident.number, tick, segments, last=last))

        moved = copy.advance(send)
        if copy.copied:
            self._copy = None
            moved = True
        return moved


def rows_of(view: VerdictView | None, layouts: Sequence[RecordLayout], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Statistics rows of the records ``ids``, float64 [n, C]; NaN where the verdict has none."""
    out = np.full((len(ids), NUM_STATISTICS), np.nan)
    if view is not None and len(ids):
        rows = np.fromiter((layouts[i].row for i in ids), np.int64, len(ids))
        known = rows < len(view.statistics)
        out[known] = view.statistics[rows[known]]
    return out
