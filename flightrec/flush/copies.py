"""Copies of held slots into the writer's staging memory: which one goes on, how much a step, what is pinned.

Training thread only. Nothing here waits on CUDA but ``prepare``, ``renew`` and ``abandon``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from flightrec.flush.incidents import OpenIncident
from flightrec.flush.outbox import Outbox
from flightrec.flush.staging import Piece, SlotCopy, piece_bytes_for, pin, staging_tensor, unpin
from flightrec.kernels import driver
from flightrec.ring.ring import Ring
from flightrec.writer import messages

CPU_BYTES_PER_STEP = 256 << 20
"""On the CPU a copy takes the training thread's time; beyond this the rest waits for the next step."""

UNPINNED_BYTES_PER_STEP = 16 << 20
"""On CUDA a copy to memory that could not be pinned makes the host wait: a few milliseconds of each step at most."""

REPLACED_PINNED_BYTES = 512 << 20
"""Pinned of a new writer's staging memory, in the middle of a run: a seventh of a second."""


@dataclass(slots=True)
class _Job:
    incident: OpenIncident
    tick: int
    copy: SlotCopy


class Copies:
    """See the module.

    Args:
        ring: whose slots are read.
        outbox: the way to the writer; its client owns the staging memory.
        slot_of: the slot that held a tick when the device was last heard of, None if none did.
    """

    def __init__(self, ring: Ring, outbox: Outbox, slot_of: Callable[[int], int | None]) -> None:
        self._ring, self._outbox, self._slot_of = ring, outbox, slot_of
        self._jobs: list[_Job] = []
        """Slots being copied, in the order in which they began."""
        self._stream = driver.own_stream(ring.device, "incidents") if ring.device.type == "cuda" else None
        self._staging = staging_tensor(outbox.client)
        self._held_bytes = 0
        self._pinned = False

    def prepare(self, held_bytes: int) -> None:
        """Pin staging memory for ``held_bytes``, once, in the step that allocates the ring. Waits on CUDA.

        Not later: page-locking takes a good part of a second a GiB and holds the driver's locks.
        """
        self._held_bytes = held_bytes
        self._pin(held_bytes)

    def renew(self) -> None:
        """The writer is another one, with staging memory of its own."""
        self.abandon()
        self.unpin()
        self._staging = staging_tensor(self._outbox.client)
        self._pin(min(self._held_bytes, REPLACED_PINNED_BYTES))

    @property
    def ticks(self) -> set[int]:
        """Whose slots are being copied."""
        return {job.tick for job in self._jobs}

    def is_copying(self, incident: OpenIncident) -> bool:
        """Whether a slot is on its way for this incident."""
        return any(job.incident is incident for job in self._jobs)

    def advance(self, incidents: Sequence[OpenIncident]) -> bool:
        """Take what has arrived, then queue copies for all the room that there is; waits for nothing on CUDA.

        Returns:
            Whether anything moved.
        """
        if not self._jobs and not any(incident.to_stage for incident in incidents):
            return False
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            return False  # asking for an event now would end the capture
        moved = self._collect()
        room = self._max_bytes_a_step
        while room > 0 and (job := self._next(incidents)) is not None:
            num_bytes = job.copy.start(room)
            room -= num_bytes
            moved = moved or num_bytes > 0
            if job.copy.waiting:  # no room now
                break
        return self._collect() or moved

    def cancel(self, number: object) -> None:
        """Queue nothing more for the incident of this number; what is under way arrives."""
        for job in self._jobs:
            if job.incident.number == number:
                job.copy.cancel()

    def abandon(self) -> None:
        """Wait for copies under way and give their memory back."""
        for job in self._jobs:
            job.copy.abandon()
        self._jobs.clear()

    def lose(self) -> list[tuple[OpenIncident, int]]:
        """The device cannot be read any more: incidents and ticks whose copies were under way. Makes no CUDA call."""
        lost = [(job.incident, job.tick) for job in self._jobs]
        self._jobs.clear()
        return lost

    def unpin(self) -> None:
        """Give page-locked memory back."""
        if self._pinned:
            unpin(self._staging)
            self._pinned = False

    def _pin(self, num_bytes: int) -> None:
        if self._stream is None or self._pinned or torch.cuda.is_current_stream_capturing():
            return
        num_bytes = pin(self._staging, num_bytes)
        if num_bytes:
            self._staging = self._staging[:num_bytes]
            self._pinned = True

    @property
    def _max_bytes_a_step(self) -> int:
        if self._stream is None:
            return CPU_BYTES_PER_STEP
        return self._staging.numel() if self._pinned else UNPINNED_BYTES_PER_STEP

    def _collect(self) -> bool:
        moved = False
        for job in list(self._jobs):
            moved = job.copy.collect(partial(self._send, job)) or moved
            if job.copy.copied:
                self._jobs.remove(job)
                moved = True
        return moved

    def _send(self, job: _Job, pieces: list[Piece], last: bool) -> None:
        self._outbox.post(messages.payload(job.incident.number, job.tick, pieces, last=last))

    def _next(self, incidents: Sequence[OpenIncident]) -> _Job | None:
        """The slot to go on with."""
        job = max((job for job in self._jobs if job.copy.waiting), key=lambda job: job.incident.urgency, default=None)
        waiting = (incident for incident in incidents if incident.to_stage)
        most_urgent = max(waiting, key=lambda incident: incident.urgency, default=None)
        if most_urgent is not None and (job is None or most_urgent.urgency > job.incident.urgency):
            job = self._begin(most_urgent)
        return job

    def _begin(self, incident: OpenIncident) -> _Job:
        tick = incident.to_stage.pop(0)
        slot = self._slot_of(tick)
        piece_bytes = piece_bytes_for(self._staging)
        if self._stream is not None and not self._pinned:
            piece_bytes = min(piece_bytes, UNPINNED_BYTES_PER_STEP)
        areas = iter(()) if slot is None else self._ring.read_slot(slot)
        copy = SlotCopy(
            self._outbox.client, self._staging, areas, self._stream, first=incident.suspect, piece_bytes=piece_bytes
        )
        job = _Job(incident, tick, copy)
        self._jobs.append(job)
        return job
