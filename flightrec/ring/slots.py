"""Which slot holds which tick, which slots are held, which comes next: decided on the device.

Either in one go, when the verdict is there (``advance``), or in two (``turn`` beside the training, ``hold_closed`` when
the verdict comes). Everything lives in one small int64 tensor, so that the host gets all of it with a single copy
beside the verdict. Runs on its caller's stream; no operation waits for the device and nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TABLE_SIZE = 64
"""Ticks whose slot the device remembers, so that a late kernel of an earlier tick still finds its slot."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """Host copy of the slot table.

    Attributes:
        slot_tick: the tick that each real slot holds, -1 for none.
        held: slots that recording may not take.
        hold_until: slots of ticks up to this one are held as they come.
        table: ``tick % TABLE_SIZE`` -> slot; the number of real slots stands for scrap.
    """

    slot_tick: tuple[int, ...]
    held: tuple[bool, ...]
    hold_until: int
    table: tuple[int, ...]

    def slot_of(self, tick: int) -> int | None:
        """The real slot that holds ``tick``, or None: it went to scrap, or was overwritten since."""
        return self.slot_tick.index(tick) if tick >= 0 and tick in self.slot_tick else None


class SlotTable:
    """The device's slot table for ``num_slots`` real slots; slot ``num_slots`` is scrap.

    Attributes:
        state: int64 ``[2 * num_slots + 1 + TABLE_SIZE]`` on ``device``; ``decode`` takes a CPU copy of it apart.
        slot_tick, held, hold_until, table: views of ``state``; ``held`` is 0 or 1.
        ticks: int64 ``[TABLE_SIZE]``, the tick that each table entry belongs to.
        tick: int64 ``[1]``, the tick that is being recorded: the device's own count.
    """

    def __init__(self, device: torch.device, num_slots: int, *, iterations: int, after: int, first_tick: int) -> None:
        """``first_tick`` gets slot 0; everything else is free and unheld."""
        self.num_slots, self._iterations, self._after = num_slots, iterations, after
        with torch.inference_mode(False), torch.no_grad():
            self.state = torch.full((2 * num_slots + 1 + TABLE_SIZE,), -1, dtype=torch.int64, device=device)
            self.slot_tick = self.state[:num_slots]
            self.held = self.state[num_slots : 2 * num_slots]
            self.hold_until = self.state[2 * num_slots : 2 * num_slots + 1]
            self.table = self.state[2 * num_slots + 1 :]
            self.ticks = torch.full((TABLE_SIZE,), -1, dtype=torch.int64, device=device)
            self.tick = torch.full((1,), first_tick, dtype=torch.int64, device=device)
            self._numbers = torch.arange(num_slots, device=device)
            self._ranks = self._numbers + num_slots + 1  # of a slot that holds tick 0, in steps of num_slots + 1 a tick
            self._scrap_rank = torch.full((1,), 2 * num_slots + 1, dtype=torch.int64, device=device)
            self._entries = torch.arange(TABLE_SIZE, device=device)
            self.held.zero_()
            self.table.fill_(num_slots)
            self.slot_tick[:1].fill_(first_tick)
            self.table_entry(first_tick).zero_()
            self.tick_entry(first_tick).fill_(first_tick)

    def table_entry(self, tick: int) -> torch.Tensor:
        """int64 ``[1]``, a view: the slot of ``tick``."""
        at = tick % TABLE_SIZE
        return self.table[at : at + 1]

    def tick_entry(self, tick: int) -> torch.Tensor:
        """int64 ``[1]``, a view: ``tick`` itself."""
        at = tick % TABLE_SIZE
        return self.ticks[at : at + 1]

    def advance(
        self, tick: int, fired: torch.Tensor | None, release: torch.Tensor | None, hold_request: torch.Tensor | None
    ) -> None:
        """Close ``tick``, whose verdict is known, and choose the slot of ``tick + 1``. As in ``Ring.advance``."""
        self.tick.fill_(tick)
        self._give_back(release)
        hold = _either(fired, hold_request)
        if hold is not None:
            self._hold(hold, self.tick)
        self._choose(self.slot_tick == self.tick, spare=False)

    def turn(self, release: torch.Tensor) -> None:
        """Close the current tick, whose verdict is not known yet, and choose the next one's slot.

        The verdict may still want the last N ticks. With one more slot than ``advance`` needs, it finds what
        ``advance`` would have kept: slots that are not held are taken in order of age, so that one more of them is one
        more tick back, and the slot taken now is the one that ``advance`` took a tick ago. A fault while nothing is
        held has all N; while an earlier one still holds slots, either order has what there is. A slot that is held, or
        the closing tick's own, is never taken. Nothing here depends on the host.
        """
        self._give_back(release)
        self._choose(self.slot_tick == self.tick, spare=True)

    def hold_closed(self, hold: torch.Tensor) -> None:
        """Hold the evidence of the tick that ``turn`` closed, if ``hold`` (bool scalar on the device) is true."""
        self._hold(hold, self.tick - 1)

    def current_slot(self) -> torch.Tensor:
        """int64 ``[1]``, fresh: the slot of the current tick, found on the device."""
        return self.table.index_select(0, self.tick % TABLE_SIZE)

    def _give_back(self, release: torch.Tensor | None) -> None:
        if release is not None:
            self.held.mul_(self.slot_tick != release)

    def _hold(self, hold: torch.Tensor, tick: torch.Tensor) -> None:
        window = (self.slot_tick > tick - self._iterations) & (self.slot_tick <= tick) & (self.slot_tick >= 0)
        self.held.logical_or_(hold & window)
        until = torch.maximum(self.hold_until, tick + self._after)
        self.hold_until.copy_(torch.where(hold, until, self.hold_until))

    def _choose(self, current: torch.Tensor, *, spare: bool) -> None:
        """Hold the current tick if it is to be, give the next one a slot that is not held (nor ``current``)."""
        self.held.logical_or_(current & (self.hold_until >= self.tick))
        kept = torch.logical_or(self.held, current) if spare else self.held != 0
        following, span = self.tick + 1, self.num_slots + 1
        # The oldest slot that is not held; free ones first; scrap after all. No two candidates are equal.
        scrap = torch.add(self._scrap_rank, following, alpha=span)
        candidates = torch.where(kept, scrap, torch.add(self._ranks, self.slot_tick, alpha=span))
        chosen = candidates.amin(dim=0, keepdim=True).remainder_(span)
        torch.where(self._numbers == chosen, following, self.slot_tick, out=self.slot_tick)
        entry = self._entries == following % TABLE_SIZE
        torch.where(entry, chosen, self.table, out=self.table)
        torch.where(entry, following, self.ticks, out=self.ticks)
        self.tick.add_(1)

    @staticmethod
    def decode(state: torch.Tensor) -> SlotState:
        """Take a CPU copy of ``state`` (int64) apart."""
        numbers = [int(number) for number in state.numpy()]
        count = (len(numbers) - 1 - TABLE_SIZE) // 2
        return SlotState(
            slot_tick=tuple(numbers[:count]),
            held=tuple(number != 0 for number in numbers[count : 2 * count]),
            hold_until=numbers[2 * count],
            table=tuple(numbers[2 * count + 1 :]),
        )


def _either(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
