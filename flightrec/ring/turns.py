"""Turns of what captured graphs record: a table on the device, by unit, that the first node of each replay reads.

A unit is what is recorded or left out together; the caller numbers them. The host decides between iterations, after
``advance`` of one and before the first replay of the next, so that it knows of each iteration what its replays
recorded. Host bookkeeping under the ring's lock; ``choose`` queues a copy on the caller's stream and does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flightrec.kernels import replays as words_of
from flightrec.kernels.driver import allocate
from flightrec.kernels.pinned import HostBuffer
from flightrec.kernels.replays import Groups

ALWAYS = -1
"""Unit of what takes no turns."""

MAX_UNITS = 1 << 13
"""Further ones take no turns."""

_MAX_GROUPS = 1 << 12  # of one graph, likewise
_NUM_COPIES = 64  # that may be on their way


class Turn(NamedTuple):
    """What a record of a graph takes turns with.

    Attributes:
        unit: its number, or ``ALWAYS``.
        is_in: whether the unit has its turn in this iteration; asked where the unit is new.
        num_units: that one graph may have, as far as is known.
    """

    unit: int = ALWAYS
    is_in: bool = True
    num_units: int = 0


NO_TURNS = Turn()


class GraphGroups:
    """The units of one graph, and the slot of each.

    Args:
        table: of all units.
        num_groups: that there is room for.
        device: of the ring.
    """

    def __init__(self, table: torch.Tensor, num_groups: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            units = allocate(device, lambda: torch.zeros(1 + num_groups, dtype=torch.int64, device=device))
            slots = allocate(device, lambda: torch.full((num_groups, 2), words_of.NO_SLOT, device=device))
        self.words = Groups(units, slots, table)
        self._slots: dict[int, torch.Tensor] = {}

    def slot(self, unit: int) -> torch.Tensor | None:
        """int64 ``[2]``, a view: where a unit's records go. None for one too many. Allocates nothing."""
        found = self._slots.get(unit)
        if found is None:
            number, units = len(self._slots), self.words.units
            if number == self.words.slots.shape[0]:
                return None
            units[1 + number : 2 + number].fill_(unit)
            units[:1].fill_(number + 1)
            found = self._slots[unit] = self.words.slots[number]
        return found


class Turns:
    """See the module.

    Attributes:
        state: by unit, whether it has its turn in the current iteration.

    Args:
        device: of the ring.
    """

    def __init__(self, device: torch.device) -> None:
        self.state: list[bool] = []
        self._device = device
        with torch.inference_mode(False):
            self._table = allocate(device, lambda: torch.ones(MAX_UNITS, dtype=torch.int8, device=device))
        self._told: list[bool] = []  # what the table holds; ones beyond
        self._known: set[int] = set()
        self._copies: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._memory: HostBuffer | None = None
        self._next_copy = 0

    def groups(self, num_groups: int) -> GraphGroups:
        """Room for the units of a graph that begins to record."""
        room = min(max(num_groups, 0), _MAX_GROUPS, MAX_UNITS)
        return GraphGroups(self._table, room, self._device)

    def slot(self, groups: GraphGroups, turn: Turn) -> torch.Tensor | None:
        """The slot that a record of a graph reads; None: every replay records it.

        Where memory beside the capture may be written.
        """
        slot = groups.slot(turn.unit) if 0 <= turn.unit < MAX_UNITS else None
        if slot is not None and turn.unit not in self._known:
            self._known.add(turn.unit)
            more = [True] * (turn.unit + 1 - len(self.state))
            self.state, self._told = self.state + more, self._told + more
            if self._told[turn.unit] != turn.is_in:
                self._table[turn.unit : turn.unit + 1].fill_(int(turn.is_in))
            self.state[turn.unit] = self._told[turn.unit] = turn.is_in
        return slot

    def choose(self, in_turn: Sequence[bool]) -> bool:
        """Which units the replays from here on record; those beyond ``in_turn`` are recorded.

        Returns:
            Whether something was queued on the current stream.
        """
        num_units = len(self.state)
        self.state = [*in_turn[:num_units], *[True] * (num_units - len(in_turn))]
        if self.state == self._told:
            return False
        self._told = [*self.state]
        memory, event = self._copy()
        memory[:num_units].copy_(torch.tensor(self.state, dtype=torch.int8, device="cpu"))  # whatever the default is
        self._table[:num_units].copy_(memory[:num_units], non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        return True

    def _copy(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Host memory that no copy reads any more."""
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = HostBuffer(self._device, _NUM_COPIES * MAX_UNITS)
        number, self._next_copy = self._next_copy, (self._next_copy + 1) % _NUM_COPIES
        if number == len(self._copies):
            with torch.inference_mode(False):
                memory = self._memory.tensor[number * MAX_UNITS : (number + 1) * MAX_UNITS].view(torch.int8)
            self._copies.append((memory, torch.cuda.Event() if self._device.type == "cuda" else None))
        memory, event = self._copies[number]
        if event is not None and not event.query():
            event.synchronize()  # the host is that many iterations ahead
        return memory, event
