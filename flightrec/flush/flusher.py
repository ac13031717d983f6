"""Incidents from the first firing to the last byte handed to the writer.

Training thread only. ``on_verdict`` decides (new incident, one more firing for an open one, suppressed), ``pump`` moves
held slots into staging memory, the most suspect records first, and messages into the writer's inbox; neither waits.
``drain`` does wait, for an exception or the end of the run. Holds no reference to the user's tensors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.flush.copies import Copies
from flightrec.flush.history import ScalarHistory, TickInfo, TickLog
from flightrec.flush.host_tier import HostIteration, HostTier
from flightrec.flush.incidents import OpenIncident
from flightrec.flush.outbox import Outbox
from flightrec.flush.staging import Range
from flightrec.flush.verdicts import VerdictView
from flightrec.records import NUM_STATISTICS, Firing, RecordLayout, Severity
from flightrec.ring.ring import Ring
from flightrec.rules.limits import Limits
from flightrec.writer import messages

logger = logging.getLogger("flightrec")

RECORDS_PER_MESSAGE = 20_000
MAX_EXTENSIONS = 2
"""How often a graver firing may lengthen an open incident, so that it has its own iterations beyond."""

NOT_IN_TURN = "*"
"""Stands in ``/blind`` for the layers whose turn an iteration was not."""

WITH_THE_WRITER = "the writer died before it had written them, and their slot had been released"

MAX_PRECURSORS = 200
"""Latest firings that wrote no incident (``watch``, or beyond a limit); the next incident tells them."""


class Flusher:
    """See the module.

    Args:
        ring: whose slots are read.
        outbox: the way to the writer.
        limits: how many incidents each rule may write.
        after: iterations to record beyond the fault.
        log: which iteration each tick was.
        history: loss and metrics for the incident.
        view_of: the verdict of a past tick that is still kept.
        tier: the host tier, if there is one.
    """

    def __init__(
        self,
        ring: Ring,
        outbox: Outbox,
        limits: Limits,
        *,
        after: int,
        log: TickLog,
        history: ScalarHistory,
        view_of: Callable[[int], VerdictView | None],
        tier: HostTier | None = None,
    ) -> None:
        self._ring = ring
        self._outbox = outbox
        self._limits = limits
        self._after = after
        self._view_of = view_of
        self._tier = tier
        self._readable = True
        self._why_lost = "no slot holds this iteration any more: all were in use by an earlier incident"
        self._rule_index = {rule.name: index for index, rule in enumerate(limits.rules)}
        self._log = log
        self._history = history
        self._incidents: list[OpenIncident] = []
        self._handed_over: dict[int, OpenIncident] = {}
        """By number: all of it is with the writer, which has not said yet that it is on disk."""
        self._next_number = 0
        self._slot_of: dict[int, int] = {}
        self._held: set[int] = set()
        self._precursors: deque[Firing] = deque(maxlen=MAX_PRECURSORS)
        self._copies = Copies(ring, outbox, self._slot)
        self._notes: dict[tuple[str, str], str] = {}
        self.done: list[dict[str, Any]] = []
        """Headers of the writer's ``incident_done`` messages, the latest 100."""

    # -- what the recorder tells -------------------------------------------------------------------------------------

    def note_blind(self, layer: str, tensor: str, reason: str) -> None:
        """Remember what cannot be recorded; it goes into every incident."""
        self._notes.setdefault((layer, tensor), reason)

    def prepare(self, held_bytes: int) -> None:
        """Pin staging memory for ``held_bytes``: see ``Copies.prepare``. Waits on CUDA."""
        self._copies.prepare(held_bytes)

    def send_config(self, text: str, environment: Mapping[str, Any]) -> None:
        """Tell the writer what every incident carries."""
        self._outbox.post_config(text, environment)

    def post_tables(self) -> None:
        """Tell the writer layouts and quantizers that are new."""
        self._outbox.post_tables()

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
        if self._outbox.replace_dead_writer():
            self._tell_anew()
        elif self._outbox.dead:
            self._copies.abandon()
            self._incidents.clear()
            self._handed_over.clear()
        moved = self._copies.advance(self._incidents) or moved
        is_copying = self._copies.is_copying
        for incident in [i for i in self._incidents if i.facts_ended and not i.to_stage and not is_copying(i)]:
            self._post(messages.end(incident.number, incident.blind))
            self._incidents.remove(incident)
            self._handed_over[incident.number] = incident
            moved = True
        return self._outbox.send_waiting() or moved

    def take_releases(self) -> list[tuple[int, int]]:
        """(slot, tick) pairs that are held on the device and that no incident needs any more."""
        needed = {tick for incident in self._incidents for tick in incident.to_stage}
        needed |= {tick for tick in self._held if self._may_be_needed(tick)}
        needed |= self._copies.ticks
        free = [(self._slot_of[tick], tick) for tick in self._held if tick not in needed]
        self._held &= needed
        return free

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """No further iteration comes: end the facts of every open incident with what there is."""
        for incident in self._incidents:
            if not incident.facts_ended:
                self._end_facts(incident)

    def lose_device(self, info: TickInfo, firings: Sequence[Firing]) -> None:
        """The device cannot be read any more: what incidents still need of it, the host tier has, or nobody.

        Makes no CUDA call.

        Args:
            info: of the iteration that was under way.
            firings: why the run ends.
        """
        self._readable = False
        self._why_lost = "the device could not be read any more, and no copy of this iteration had reached the host"
        lost = self._copies.lose()
        self._slot_of, self._held = {}, set()
        for incident in self._incidents:
            ticks, incident.to_stage = incident.to_stage, []
            ticks = [*(tick for owner, tick in lost if owner is incident), *ticks]
            for known in filter(None, map(self._log.get, ticks)):
                self._take_from_tier(incident, known)
        self._log.add(info)
        self._dispatch(info, list(firings))

    def drain(self, timeout_s: float) -> bool:
        """Pump until everything was handed to the writer or ``timeout_s`` passed; waits. For the end of a run."""
        deadline = time.monotonic() + timeout_s
        while self.busy and not self._outbox.dead and time.monotonic() < deadline:
            if not self.pump():
                time.sleep(0.002)
        return not self.busy

    def close(self, timeout_s: float) -> bool:
        """Hand over what is pending, stop the writer, unpin. Returns whether all of it was written."""
        drained = self.drain(timeout_s)
        self._copies.abandon()
        finished = self._outbox.client.close(timeout_s)
        self._receive()
        self._copies.unpin()
        return drained and finished and not self._outbox.dead

    @property
    def recording_until(self) -> int:
        """The last tick that an open incident still records, -1 for none."""
        return max((incident.end_tick for incident in self._incidents), default=-1)

    @property
    def busy(self) -> bool:
        """Whether an incident is open or a message waits."""
        return bool(self._incidents) or not self._outbox.empty

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

    def _join(self, incident: OpenIncident, info: TickInfo, firings: list[Firing]) -> None:
        worst = firings[0]
        if worst.severity.order > incident.primary.severity.order and incident.extensions < MAX_EXTENSIONS:
            # Equal ones do not lengthen it: a NaN spoils everything in the iterations after it.
            incident.primary = worst
            incident.end_tick = max(incident.end_tick, info.tick + self._after)
            incident.extensions += 1
            incident.suspect = [*self._suspects(info.tick, firings), *incident.suspect]
            self._count(worst, info.tick)
            logger.error("flightrec: %s", worst.message)
        incident.firings += firings
        self._post(messages.firing(incident.number, firings))

    def _open(self, info: TickInfo, primary: Firing, firings: list[Firing]) -> None:
        if self._outbox.dead:
            logger.error("flightrec: %s - no incident: the writer died", primary.message)
            return
        self._count(primary, info.tick)
        incident = OpenIncident(self._next_number, primary, info.tick, info.tick + self._after)
        self._next_number += 1
        self._incidents.append(incident)
        log = logger.error if primary.severity is Severity.FAULT else logger.warning
        log("flightrec: %s - an incident is being written", primary.message)
        self.post_tables()
        incident.suspect = self._suspects(info.tick, firings)
        firings = [*self._precursors, *firings]
        self._precursors.clear()
        incident.firings = firings
        self._post(messages.open_incident(incident.number, primary, firings, history=self._history.columns()))
        num_complete = self._ring.iterations - (0 if info.partial else 1)  # before the iteration of the firing
        for tick in range(info.tick - num_complete, info.tick + 1):
            self._add_tick(incident, tick)
        self._add_older(incident, info.tick - num_complete)
        incident.to_stage.sort(reverse=True)  # the faulty iteration first, then backwards

    def _count(self, firing: Firing, tick: int) -> None:
        self._limits.count(self._rule_index[firing.rule], tick, firing.severity)

    def _add_tick(self, incident: OpenIncident, tick: int, lost: str = "") -> None:
        """Tell the writer one iteration; ``lost``: why its slot is not to be copied, if that is so."""
        is_there = not lost and tick in self._slot_of
        is_safe = is_there and tick in self._held  # else the slot may be overwritten before it is staged
        kept = None if self._tier is None or is_safe else self._tier.get(tick)
        info = self._log.get(tick) if kept is None else kept.info
        if info is None:  # before the first iteration, or forgotten
            row: messages.Blind = (-1, -1, "", "", f"iterations of the incident: {lost}")
            if lost and row not in incident.blind:
                incident.blind.append(row)
            return
        self._send_iteration(incident, info, self._view_of(tick), kept)
        if info.left_out:
            incident.blind.append((info.attempt, info.iteration, NOT_IN_TURN, "", info.left_out))
        if is_there and kept is None:
            incident.to_stage.append(tick)
            self._held.add(tick)
            return
        self._take_from_tier(incident, info, lost)

    def _add_older(self, incident: OpenIncident, before: int) -> None:
        """Tell the iterations of the host tier from before the tick ``before``, and as many as the ring's are lost."""
        if self._tier is None:
            return
        lost = 0 if self._readable else sum(self._tier.get(tick) is None for tick in incident.ticks)
        for tick in self._tier.choose(before, incident.trigger_tick, lost):
            self._add_tick(incident, tick)

    def _take_from_tier(self, incident: OpenIncident, info: TickInfo, lost: str = "") -> None:
        """No slot has this iteration: the writer finds it in the host tier, or it is blind."""
        if self._tier is not None and self._tier.get(info.tick) is not None:
            self._tier.hold(incident.number, info.tick)
        else:
            incident.blind.append((info.attempt, info.iteration, "", "", lost or self._why_lost))

    def _may_be_needed(self, tick: int) -> bool:
        return any(not i.facts_ended and i.trigger_tick < tick <= i.end_tick for i in self._incidents)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _post(self, message: messages.Outgoing) -> None:
        self._outbox.post(message)

    def _tell_anew(self) -> None:
        """A new writer knows nothing: tell it what is not on disk, and copy what the ring still holds of it.

        Slots that were copied are released, and on CUDA they may hold another iteration before the host hears of it:
        what the dead writer had of those is lost, unless the host tier has it.
        """
        sure = self._copies.ticks.union(*(incident.to_stage for incident in self._incidents))
        is_up_to_date = self._ring.device.type == "cpu"  # the latest verdict is of now
        self._copies.renew()
        self._incidents = [*self._handed_over.values(), *self._incidents]
        self._handed_over.clear()
        for incident in self._incidents:
            ticks, incident.ticks, incident.to_stage, incident.blind = incident.ticks, [], [], []
            history = self._history.columns()
            self._post(messages.open_incident(incident.number, incident.primary, incident.firings, history=history))
            for tick in ticks:
                is_there = tick in sure or (is_up_to_date and tick in self._slot_of)
                self._add_tick(incident, tick, "" if is_there else WITH_THE_WRITER)
            incident.to_stage.sort(key=lambda tick: (tick > incident.trigger_tick, -tick))
            if incident.facts_ended:
                self._end_facts(incident)

    def _send_iteration(
        self, incident: OpenIncident, info: TickInfo, view: VerdictView | None, kept: HostIteration | None = None
    ) -> None:
        self.post_tables()
        if kept is None:
            layout_ids = np.asarray(self._ring.index(info.tick).layout_ids, dtype=np.int32)
            statistics = rows_of(view, self._ring.layouts, layout_ids)
        else:
            layout_ids, statistics = kept.layout_ids, kept.statistics
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
                    facts=info.facts,
                    random_states=info.random_states() if start == 0 else None,
                    tier="ring" if kept is None else "host",
                    landmark=self._tier.landmark(info.tick, incident.trigger_tick) if kept and self._tier else 0,
                )
            )
        incident.ticks.append(info.tick)

    def _end_facts(self, incident: OpenIncident) -> None:
        incident.facts_ended = True
        blind = [(-1, -1, layer, tensor, reason) for (layer, tensor), reason in self._notes.items()]
        if self._tier is not None and (told := self._tier.told()):
            blind.append((-1, -1, "", "host tier", told))
        self._post(messages.facts_end(incident.number, blind=[*incident.blind, *blind], trigger=incident.primary))
        incident.blind = []  # told; what comes later goes with the end

    def _receive(self) -> bool:
        received = self._outbox.poll()
        for message in received:
            if message.kind == "incident_done":
                self._handed_over.pop(message.header.get("incident", -1), None)
                self.done = [*self.done[-99:], dict(message.header)]
                self._release_tier(message.header.get("incident"))
                logger.info("flightrec: incident complete: %s", message.header.get("path"))
            elif message.kind == "error":
                logger.error("flightrec: an incident could not be written: %s", message.header.get("message"))
                self._forget(message.header.get("incident"))
        return bool(received)

    def _release_tier(self, number: object) -> None:
        if self._tier is not None:
            self._tier.release(number)

    def _forget(self, number: object) -> None:
        self._release_tier(number)
        self._handed_over = {known: one for known, one in self._handed_over.items() if known != number}
        self._incidents = [incident for incident in self._incidents if incident.number != number]
        self._copies.cancel(number)

    # -- slots -------------------------------------------------------------------------------------------------------

    def _see_slots(self, slot_tick: Sequence[int], held: Sequence[bool]) -> None:
        self._slot_of = {tick: slot for slot, tick in enumerate(slot_tick) if tick >= 0}
        self._held = {tick for tick, slot in self._slot_of.items() if held[slot]}

    def _slot(self, tick: int) -> int | None:
        return self._slot_of.get(tick)

    def _suspects(self, tick: int, firings: Sequence[Firing]) -> list[Range]:
        """Where the records of these firings lie: in the same place in every slot."""
        found: list[Range] = []
        layout_ids = self._ring.index(tick).layout_ids
        for firing in firings:
            if firing.key is None or not 0 <= firing.sequence < len(layout_ids):
                continue
            layout = self._ring.layouts[layout_ids[firing.sequence]]
            if layout.components:
                last = layout.components[-1]
                stop = layout.offset_bytes + last.offset_bytes + last.num_bytes
                found.append((layout.segment, layout.offset_bytes, stop))
        return found


def rows_of(view: VerdictView | None, layouts: Sequence[RecordLayout], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Statistics rows of the records ``ids``, float64 [n, C]; NaN where the verdict has none."""
    out = np.full((len(ids), NUM_STATISTICS), np.nan)
    if view is not None and len(ids):
        rows = np.fromiter((layouts[i].row for i in ids), np.int64, len(ids))
        known = rows < len(view.statistics)
        out[known] = view.statistics[rows[known]]
    return out
