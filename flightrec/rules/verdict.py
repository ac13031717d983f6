"""The answer of one tick: what fired, on the device, and how the host reads it out of the bytes that were copied.

``Verdict`` runs on the stream that evaluated; ``VerdictFormat`` is the host's, and knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flightrec.rules.base import Judgement
from flightrec.rules.series import SeriesTables


@dataclass(frozen=True, slots=True)
class RowFiring:
    """One row on which one rule fired, on the host."""

    rule: int
    row: int
    value: float
    threshold: float
    watch: bool


@dataclass(frozen=True, slots=True)
class RulePart:
    """What one rule said in one tick, still in its own places [S, K]."""

    rule: int
    fires: Tensor
    watches: Tensor | None
    judgement: Judgement
    tables: SeriesTables

    def rows(self, series: Tensor) -> Tensor:
        """Bool [R]: the rows that show it, of the flagged series."""
        return self._place(self.judgement.rows & series[:, None]) & self.tables.row_is_seen

    def numbers(self, values: Tensor) -> Tensor:
        """float64 [R], NaN for rows that the rule does not see."""
        return torch.where(self.tables.row_is_seen, self._place(values), torch.nan)

    def _place(self, values: Tensor) -> Tensor:
        return values.expand(self.tables.shape).reshape(-1).index_select(0, self.tables.place_of_row)


class Verdict:
    """The answer for one tick.

    Attributes:
        tick: whose.
        hold: bool scalar on the device: a rule that may hold fired with severity ``warning`` or ``fault``.
        any: bool scalar on the device: some rule fired or watches. While it is false the matrices need not be read.

    The matrices ``fired``, ``watch``, ``value`` and ``threshold`` are put together when first asked for, by operations
    on the then current stream, which must follow the one that evaluated; they do not synchronise and do not change
    with later ticks.
    """

    def __init__(self, tick: int, num_rules: int, num_rows: int, parts: Sequence[RulePart], hold_mask: Tensor) -> None:
        self.tick = tick
        self._shape = (num_rules, num_rows)
        self._parts = {part.rule: part for part in parts}
        self._device = hold_mask.device
        self._matrices: dict[str, Tensor] = {}
        self.hold, self.any = self._summarize(hold_mask)

    @property
    def fired(self) -> Tensor:
        """Bool [num_rules, R]: rows that show the fault of a series that fires now (it was armed)."""
        return self._matrix("fired", lambda part: part.rows(part.fires), False)

    @property
    def watch(self) -> Tensor:
        """Bool [num_rules, R]: rows whose rule only watches, as an amax excess that is not confirmed."""
        return self._matrix("watch", lambda part: None if part.watches is None else part.rows(part.watches), False)

    @property
    def value(self) -> Tensor:
        """float64 [num_rules, R]: what was judged; NaN or arbitrary where the row was not recorded in this tick."""
        return self._matrix("value", lambda part: part.numbers(part.judgement.value), torch.nan)

    @property
    def threshold(self) -> Tensor:
        """float64 [num_rules, R]: what the value was judged against; NaN where nothing was (no history)."""
        return self._matrix("threshold", self._thresholds, torch.nan)

    def row_firings(self) -> list[RowFiring]:
        """All firings, on the host, by rule and row. Synchronises: only after ``any`` was seen to be true."""
        marks = (self.fired | self.watch).cpu().numpy()
        fired, value, threshold = self.fired.cpu().numpy(), self.value.cpu().numpy(), self.threshold.cpu().numpy()
        return [
            RowFiring(int(rule), int(row), float(value[rule, row]), float(threshold[rule, row]), not fired[rule, row])
            for rule, row in np.argwhere(marks)
        ]

    def pack(self, slots: Tensor, statistics: Tensor) -> tuple[Tensor, VerdictFormat]:
        """All that the host may want of this tick in one piece, and how to read it.

        Args:
            slots: int64 [n], the slot table's state.
            statistics: float64 [R, C].

        Returns:
            uint8 on the device, fresh; a few launches on the current stream, whatever the number of rules.
        """
        head = (self.any.to(torch.float64).reshape(1), slots.to(torch.float64))
        parts, values, marks = [], [], []
        for number, part in self._parts.items():
            judgement = part.judgement
            threshold = judgement.threshold if isinstance(judgement.threshold, Tensor) else None
            flags = part.fires if part.watches is None else part.watches
            marks += [part.fires, flags, judgement.rows.expand(part.tables.shape).reshape(-1)]
            values += [judgement.value.reshape(-1)] + ([] if threshold is None else [threshold])
            constant = None if threshold is not None else float(judgement.threshold)
            parts.append(PartFormat(number, part.tables, judgement.value.shape[1], constant, part.watches is not None))
        words = torch.cat([*head, statistics.reshape(-1), *values]).view(torch.uint8)
        form = VerdictFormat(slots.numel(), (statistics.shape[0], statistics.shape[1]), tuple(parts))
        return (torch.cat([words, *(mark.view(torch.uint8) for mark in marks)]) if marks else words), form

    def _thresholds(self, part: RulePart) -> Tensor:
        threshold = part.judgement.threshold
        if not isinstance(threshold, Tensor):
            threshold = torch.full((part.tables.shape[0],), threshold, dtype=torch.float64, device=self._device)
        return part.numbers(threshold[:, None])

    def _matrix(self, name: str, row: Callable[[RulePart], Tensor | None], blank: float) -> Tensor:
        if name not in self._matrices:
            dtype = torch.bool if blank is False else torch.float64
            matrix = torch.full(self._shape, blank, dtype=dtype, device=self._device)
            for rule, part in self._parts.items():
                values = row(part)
                if values is not None:
                    matrix[rule].copy_(values)
            self._matrices[name] = matrix
        return self._matrices[name]

    def _summarize(self, hold_mask: Tensor) -> tuple[Tensor, Tensor]:
        num_rules = self._shape[0]
        blank = torch.zeros((), dtype=torch.bool, device=self._device)
        if not self._parts:
            return blank, blank
        flags = [self._parts[rule].fires.any() if rule in self._parts else blank for rule in range(num_rules)]
        flags += [part.watches.any() for part in self._parts.values() if part.watches is not None]
        marks = torch.stack(flags)
        return (marks[:num_rules] & hold_mask).any(), marks.any()


@dataclass(frozen=True, slots=True)
class PartFormat:
    """What one rule said, as it stands in the bytes of ``Verdict.pack``; S series, K places each.

    Attributes:
        rule: its number.
        tables: its series.
        width: values of a series, K or 1.
        threshold: of all series; None if each has its own.
        watches: whether series that only watch are told apart.
    """

    rule: int
    tables: SeriesTables
    width: int
    threshold: float | None
    watches: bool


@dataclass(frozen=True, slots=True)
class VerdictFormat:
    """How the bytes of ``Verdict.pack`` are read: float64 words, then bools.

    Attributes:
        num_slot_words: of the slot table, after the first word, which says whether anything fired.
        shape: of the statistics, which follow.
        parts: one a rule that judged: values [S, width] and thresholds [S] among the words; of the bools: fires [S],
            watches [S], rows [S, K].
    """

    num_slot_words: int
    shape: tuple[int, int]
    parts: tuple[PartFormat, ...]

    @property
    def num_words(self) -> int:
        """Words before the rules' own."""
        return 1 + self.num_slot_words + self.shape[0] * self.shape[1]

    def firings(self, data: NDArray[np.uint8]) -> tuple[RowFiring, ...]:
        """All firings by rule and row; cheap while nothing fired.

        Args:
            data: the bytes, on the host.
        """
        words = data[: self.num_words * 8].view(np.float64)
        if not words[0]:
            return ()
        num_values = sum(_num_values(part) for part in self.parts)
        values = data[self.num_words * 8 : (self.num_words + num_values) * 8].view(np.float64)
        marks = data[(self.num_words + num_values) * 8 :].view(bool)
        found: list[RowFiring] = []
        for part in self.parts:
            num_series, width = part.tables.shape
            num_marks = num_series * (2 + width)
            found += _firings(part, values[: _num_values(part)], marks[:num_marks])
            values, marks = values[_num_values(part) :], marks[num_marks:]
        return tuple(sorted(found, key=lambda firing: (firing.rule, firing.row)))


def _num_values(part: PartFormat) -> int:
    return part.tables.shape[0] * (part.width + (part.threshold is None))


def _firings(part: PartFormat, values: NDArray[np.float64], marks: NDArray[np.bool_]) -> list[RowFiring]:
    num_series, width = part.tables.shape
    fires, watches = marks[:num_series], marks[num_series : 2 * num_series]
    rows = marks[2 * num_series :].reshape(num_series, width)
    flagged = fires | watches if part.watches else fires
    if not flagged.any():
        return []
    value = np.broadcast_to(values[: num_series * part.width].reshape(num_series, part.width), (num_series, width))
    thresholds = values[num_series * part.width :]
    row_of = part.tables.row_of_place.reshape(num_series, width)
    return [
        RowFiring(
            part.rule,
            int(row_of[series, place]),
            float(value[series, place]),
            float(thresholds[series]) if part.threshold is None else part.threshold,
            not fires[series],
        )
        for series, place in np.argwhere(rows & flagged[:, None] & (row_of >= 0))
    ]
