"""What ``verify`` found, as frozen types: places, mismatches, what could not be compared. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flightrec.records import Key
from flightrec.storage.record import Record

NUM_SHOWN = 8
"""Elements of a mismatch that are told one by one."""


@dataclass(frozen=True)
class Where:
    """A record: ``record`` is its row of the rank's ``/records``."""

    rank: int
    attempt: int
    iteration: int
    key: Key
    record: int

    @classmethod
    def of(cls, record: Record) -> Where:
        """The place of a record."""
        return cls(record.rank, record.attempt, record.iteration, record.key, record.index)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        key = self.key
        return {
            "rank": self.rank,
            "attempt": self.attempt,
            "iteration": self.iteration,
            "layer": key.layer,
            "tensor": key.tensor,
            "part": key.part,
            "microbatch": key.microbatch,
            "phase": key.phase.value,
            "call": key.call,
            "stage": key.stage.value,
            "record": self.record,
        }


@dataclass(frozen=True)
class Element:
    """One element that is not as it should be: its index, and both values as text."""

    index: tuple[int, ...]
    expected: str
    found: str


@dataclass(frozen=True)
class Mismatch:
    """Numbers that do not agree.

    Attributes:
        kind: ``codes``, ``scales``, ``amax`` or ``product``.
        where: the record that holds the wrong numbers.
        side: ``rowwise`` or ``columnwise``; of a product its direction.
        num_wrong: elements (or scales) that differ.
        num_compared: of so many.
        num_rows: rows that hold wrong elements; -1 where there are no rows.
        rows: the first of them.
        elements: the first wrong elements.
        meaning: one sentence.
    """

    kind: str
    where: Where
    side: str
    num_wrong: int
    num_compared: int
    num_rows: int
    rows: tuple[int, ...]
    elements: tuple[Element, ...]
    meaning: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "kind": self.kind,
            **self.where.to_json(),
            "side": self.side,
            "num_wrong": self.num_wrong,
            "num_compared": self.num_compared,
            "num_rows": self.num_rows,
            "rows": list(self.rows),
            "elements": [
                {"index": list(one.index), "expected": one.expected, "found": one.found} for one in self.elements
            ],
            "meaning": self.meaning,
        }


@dataclass(frozen=True)
class Outcome:
    """One comparison.

    Attributes:
        what: ``codes`` or ``product``.
        where: the record.
        side: as in ``Mismatch``.
        num_compared: elements.
        num_free: elements of which nothing could be said (NaN in FP4).
        why_not: why it could not be compared; empty if it was.
        notes: what was not compared, or assumed, although the rest was.
        mismatches: what differs.
    """

    what: str
    where: Where
    side: str
    num_compared: int = 0
    num_free: int = 0
    why_not: str = ""
    notes: tuple[str, ...] = ()
    mismatches: tuple[Mismatch, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; ``mismatches`` are left to the whole document."""
        return {
            "what": self.what,
            **self.where.to_json(),
            "side": self.side,
            "num_compared": self.num_compared,
            "num_free": self.num_free,
            "why_not": self.why_not,
            "notes": list(self.notes),
            "agrees": not self.why_not and not self.mismatches,
        }


def counted(reasons: Mapping[str, int]) -> list[dict[str, Any]]:
    """Reasons with how often each was given, the most frequent first."""
    return [{"reason": reason, "count": count} for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]
