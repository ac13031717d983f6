"""Pairs the records of two sides by key and compares their statistics; reads tables only. Pure functions, no state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.errors import IncidentError
from flightrec.records import Key
from flightrec.storage import schema
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident

Time = tuple[int, int]
Columns = dict[str, npt.NDArray[np.float64]]

_LAST = 1 << 40
_WORDS = ("amax", "quantizer_amax", "scale_min", "scale_max", "range_ratio")


@dataclass(frozen=True)
class Moment:
    """One iteration of one rank."""

    source: Rank
    attempt: int
    iteration: int

    @property
    def time(self) -> Time:
        """(attempt, iteration)."""
        return (self.attempt, self.iteration)

    def to_json(self) -> dict[str, int]:
        """Plain JSON data."""
        return {"rank": self.source.rank, "attempt": self.attempt, "iteration": self.iteration}


@dataclass(frozen=True)
class Pair:
    """A record of A and the record of B that has its key.

    Attributes:
        key: of both.
        a: where A's stands.
        b: where B's stands.
        row_a: row of the rank's ``/records``.
        row_b: likewise.
    """

    key: Key
    a: Moment
    b: Moment
    row_a: int
    row_b: int


@dataclass(frozen=True)
class Single:
    """A record that only one side has."""

    key: Key
    at: Moment
    row: int


@dataclass(frozen=True)
class Matched:
    """All records of both sides, each list in blame order."""

    pairs: list[Pair]
    only_a: list[Single]
    only_b: list[Single]


def moments(
    a: Incident,
    b: Incident,
    *,
    iterations: tuple[str, str] | None = None,
    ranks: tuple[int, int] | None = None,
) -> list[tuple[Moment, Moment]]:
    """Choose which iterations of which ranks are compared with each other.

    Args:
        a: one side.
        b: the other; may be the same incident.
        iterations: one of A and one of B, ``212`` or, with the attempt, ``1.212``. Without them the iterations that
            both have; if they share none, those that lie equally far from their triggers.
        ranks: one of A and one of B. Without them those that both have, or the only ones.

    Raises:
        IncidentError: an iteration or a rank is not there, or nothing can be paired.
    """
    found: list[tuple[Moment, Moment]] = []
    for one, other in _ranks(a, b, ranks):
        if iterations is not None:
            times = [(_time(one, iterations[0]), _time(other, iterations[1]))]
        else:
            times = _times(one, other)
        found.extend((Moment(one, *first), Moment(other, *second)) for first, second in times)
    if not found:
        told = " and ".join(f"{it.path} has iterations {_some(_all_times(it.ranks[0]))}" for it in (a, b))
        raise IncidentError(f"nothing to compare: {told}; name one of each with --iterations")
    return found


def _ranks(a: Incident, b: Incident, ranks: tuple[int, int] | None) -> list[tuple[Rank, Rank]]:
    mine, theirs = ({rank.rank: rank for rank in side.ranks} for side in (a, b))
    if ranks is not None:
        for incident, known, wanted in ((a, mine, ranks[0]), (b, theirs, ranks[1])):
            if wanted not in known:
                raise IncidentError(f"{incident.path}: has no rank {wanted}; it has {_some(sorted(known))}")
        return [(mine[ranks[0]], theirs[ranks[1]])]
    shared = sorted(mine.keys() & theirs.keys())
    if not shared and len(mine) == len(theirs) == 1:
        return [(a.ranks[0], b.ranks[0])]
    if not shared:
        told = " and ".join(f"{it.path} has {_some(sorted(known))}" for it, known in ((a, mine), (b, theirs)))
        raise IncidentError(f"no rank is in both: {told}; name one of each with --ranks")
    return [(mine[rank], theirs[rank]) for rank in shared]


def _all_times(rank: Rank) -> list[Time]:
    return sorted({(entry.attempt, entry.iteration) for entry in rank.iterations if entry.num_records})


def _time(rank: Rank, text: str) -> Time:
    attempt, dot, iteration = text.rpartition(".")
    known = _all_times(rank)
    try:
        wanted = int(iteration), int(attempt) if dot else None
    except ValueError:
        raise IncidentError(f"iteration {text!r}: expected a number, or ATTEMPT.ITERATION") from None
    found = [time for time in known if time[1] == wanted[0] and wanted[1] in (None, time[0])]
    if not found:
        raise IncidentError(f"{rank.facts_path}: has no records of iteration {text}; it has {_some(known)}")
    return found[-1]


def _times(a: Rank, b: Rank) -> list[tuple[Time, Time]]:
    mine, theirs = ({iteration: (attempt, iteration) for attempt, iteration in _all_times(it)} for it in (a, b))
    shared = sorted(mine.keys() & theirs.keys())
    if shared:
        return [(mine[iteration], theirs[iteration]) for iteration in shared]
    shift = b.trigger.iteration - a.trigger.iteration
    return [(mine[iteration], theirs[iteration + shift]) for iteration in sorted(mine) if iteration + shift in theirs]


def _some(values: Sequence[Any]) -> str:
    words = [".".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "") or "none"


def match(pairs: Iterable[tuple[Moment, Moment]], wanted: Callable[[Key], bool]) -> Matched:
    """Pair the records of each two moments by key.

    Args:
        pairs: what ``moments`` gave.
        wanted: which keys take part.

    Returns:
        In blame order of A (of B for what only B has), ties between ranks by their number.

    Raises:
        IncidentError: a table is damaged.
    """
    found: list[tuple[tuple[Any, ...], Pair]] = []
    only: tuple[list[tuple[tuple[Any, ...], Single]], list[tuple[tuple[Any, ...], Single]]] = ([], [])
    for a, b in pairs:
        mine, theirs = (_keyed(moment, wanted) for moment in (a, b))
        order = _order(a, mine)
        for key, row in mine.items():
            if key in theirs:
                found.append((order(key), Pair(key, a, b, row, theirs[key])))
            else:
                only[0].append((order(key), Single(key, a, row)))
        order = _order(b, theirs)
        only[1].extend((order(key), Single(key, b, row)) for key, row in theirs.items() if key not in mine)
    first, second = ([single for _, single in sorted(it, key=lambda entry: entry[0])] for it in only)
    return Matched([pair for _, pair in sorted(found, key=lambda entry: entry[0])], first, second)


def _keyed(moment: Moment, wanted: Callable[[Key], bool]) -> dict[Key, int]:
    table = moment.source.records
    rows = np.flatnonzero((table["attempt"] == moment.attempt) & (table["iteration"] == moment.iteration))
    found: dict[Key, int] = {}
    for row, key in zip(rows.tolist(), moment.source.keys(rows), strict=True):
        if wanted(key):
            found.setdefault(key, row)
    return found


def _order(moment: Moment, rows: Mapping[Key, int]) -> Callable[[Key], tuple[Any, ...]]:
    """Place of a key in blame order; a ``wgrad`` right behind the gradient that it was made from."""
    sequence = moment.source.records["sequence"]
    num_microbatches = moment.source.num_microbatches.get(moment.time, _LAST)
    read: dict[tuple[str, int], int] = {}
    for key, row in rows.items():
        if key.tensor == "gradient":
            product = (key.layer, key.microbatch)
            read[product] = max(read.get(product, -1), int(sequence[row]))

    def place(key: Key) -> tuple[Any, ...]:
        number = 2 * int(sequence[rows[key]])
        if key.tensor == "wgrad":
            number = max(number, 2 * read.get((key.layer, key.microbatch), -1) + 1)
        return (*moment.time, *key.blame_order(number, num_microbatches), moment.source.rank)

    return place


def statistics(source: Rank, rows: npt.NDArray[np.intp]) -> Columns:
    """Statistics of records as they are stored, float64 [rows] by name; NaN where absent."""
    table = source.records[rows]
    there = table.dtype.names or ()
    return {name: table[name].astype(np.float64) for name in schema.STATISTIC_COLUMNS if name in there}


def derived(columns: Columns) -> Columns:
    """What tells a tensor's state whatever its size: magnitudes, shares, counts of what is not finite."""
    size = len(columns["numel"])

    def get(name: str) -> npt.NDArray[np.float64]:
        return columns.get(name, np.full(size, np.nan))

    infinite = get("positive_inf_count") + get("negative_inf_count")
    finite = get("numel") - get("nan_count") - infinite
    with np.errstate(all="ignore"):
        found = {
            "rms": np.sqrt(get("sum_of_squares") / finite),
            "quantization_error": np.sqrt(get("squared_error") / get("sum_of_squares")),
            "zero_share": get("zero_count") / get("numel"),
            "quantized_zero_share": get("quantized_zero_count") / get("quantized_numel"),
            "saturated_share": get("quantized_saturated_count") / get("quantized_numel"),
            "clipped_share": get("clipped_count") / finite,
            "underflow_share": get("underflow_count") / (finite - get("zero_count")),
        }
    names = ("quantized_nan_count", "quantized_inf_count", "scale_nonfinite_count", "zero_scale_count")
    counts = {"nan_count": get("nan_count"), "inf_count": infinite, **{name: get(name) for name in names}}
    return {**counts, **{name: get(name) for name in _WORDS}, **found}


def unequal(a: Columns, b: Columns, relative: float) -> dict[str, npt.NDArray[np.bool_]]:
    """Which statistics differ: not equal, or with ``relative`` above 0 further apart than that; NaN equals NaN."""
    found = {}
    for name in a.keys() & b.keys():
        one, other = a[name], b[name]
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        if relative:
            with np.errstate(all="ignore"):
                same |= np.abs(one - other) <= relative * np.maximum(np.abs(one), np.abs(other))
        found[name] = ~same
    return found


def diverged(a: Columns, b: Columns, factor: float, share: float) -> dict[str, npt.NDArray[np.bool_]]:
    """Which derived statistics tell another state.

    Args:
        a: what ``derived`` gave.
        b: likewise, of the paired records.
        factor: magnitudes (``amax``, ``rms``, scales, ...) differ beyond this factor, or if one alone is 0.
        share: shares differ by at least this.

    Returns:
        bool [records] by name. Counts of non-finite values differ if one alone is 0.
    """
    found = {}
    for name in a:
        one, other = a[name], b[name]
        with np.errstate(all="ignore"):
            if name.endswith("_share"):
                found[name] = np.abs(one - other) >= share
            elif name.endswith("_count"):
                found[name] = (np.nan_to_num(one) > 0) != (np.nan_to_num(other) > 0)
            else:
                low, high = np.minimum(np.abs(one), np.abs(other)), np.maximum(np.abs(one), np.abs(other))
                found[name] = high > factor * low
    return found
