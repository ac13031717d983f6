"""Two sides of a comparison: two incidents, two ranks, or a good and a bad iteration. Where do they part first?

Records are paired by key and walked in blame order. Tables are read whole; tensors only where checksums differ, and
piece by piece. Owns no state; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.analysis import compare_bytes, compare_facts, compare_tables
from flightrec.analysis.compare_bytes import Comparison, Tolerance
from flightrec.analysis.compare_facts import FactDifference
from flightrec.analysis.compare_tables import Matched, Moment, Pair
from flightrec.records import Key
from flightrec.storage.rank import Rank
from flightrec.storage.record import Record

BYTES, STATISTICS = "bytes", "statistics"


@dataclass(frozen=True)
class Options:
    """How two sides are compared.

    Attributes:
        by: ``bytes``: what was stored, bit by bit or within the tolerance, and statistics where there are no bytes;
            ``statistics``: whether the tensors are in another state, which is all that two iterations with different
            data can be asked.
        tolerance: of ``bytes``.
        factor: of ``statistics``: magnitudes differ beyond this factor.
        share: of ``statistics``: shares of elements differ from this on.
        num_details: how many differing records are read for how many elements differ and by how much.
    """

    by: str = BYTES
    tolerance: Tolerance = field(default_factory=Tolerance)
    factor: float = 4.0
    share: float = 0.1
    num_details: int = 10


@dataclass
class Difference:
    """A pair of records that are not the same.

    Attributes:
        pair: the records.
        reasons: ``shape``, ``dtype``, ``components``, ``quantizer``, ``bytes``, ``scales``, ``statistics``.
        statistics: name to (A, B), those that differ.
        components: those that were compared and are not equal.
        quantizer: what their quantizers' metadata say otherwise.
    """

    pair: Pair
    reasons: list[str]
    statistics: dict[str, tuple[float, float]]
    components: list[Comparison]
    quantizer: list[FactDifference]


@dataclass
class Outcome:
    """What a comparison found.

    Attributes:
        differences: in blame order; the first is where the sides part.
        num_equal: pairs that are the same.
        num_within: pairs that are not the same bytes, but within the tolerance.
        num_not_compared: pairs of which only one side has bytes and whose statistics agree.
    """

    differences: list[Difference] = field(default_factory=list)
    num_equal: int = 0
    num_within: int = 0
    num_not_compared: int = 0


def compare(matched: Matched, options: Options) -> Outcome:
    """Compare paired records.

    Args:
        matched: what ``compare_tables.match`` gave.
        options: how.

    Raises:
        IncidentError: a table is damaged. Damaged tensors are differences.
    """
    outcome = Outcome()
    statistics = _statistics(matched, options)
    quantizers = _Quantizers()
    for pair, (differing, values) in zip(matched.pairs, statistics, strict=True):
        reasons, components, metadata = [], [], quantizers.differences(pair)
        if metadata:
            reasons.append("quantizer")
        compared = within = False
        if options.by == BYTES:
            a, b = Record(pair.a.source, pair.row_a), Record(pair.b.source, pair.row_b)
            reasons += _forms(a, b)
            details = len(outcome.differences) < options.num_details
            components = list(_components(a, b, options.tolerance, details=details))
            reasons += _reasons(components)
            compared = any(it.status != compare_bytes.UNREAD for it in components)
            within = any(it.status == compare_bytes.WITHIN for it in components)
        if options.by == BYTES and compared:  # the same bytes with other counts: one of the two counted wrongly
            differing = [] if reasons or within else [name for name in differing if _is_of_bytes(name, values[name])]
        if differing:
            reasons.append("statistics")
        if reasons:
            told = [it for it in components if it.status != compare_bytes.EQUAL]
            shown = {name: values[name] for name in differing}
            outcome.differences.append(Difference(pair, reasons, shown, told, metadata))
        elif within:
            outcome.num_within += 1
        elif any(it.status == compare_bytes.UNREAD for it in components):
            outcome.num_not_compared += 1
        else:
            outcome.num_equal += 1
    return outcome


class _Quantizers:
    """What differs between two rows of ``/quantizers``, worked out once a pair of rows."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], list[FactDifference]] = {}

    def differences(self, pair: Pair) -> list[FactDifference]:
        one, other = (
            int(moment.source.records["quantizer"][row]) for moment, row in ((pair.a, pair.row_a), (pair.b, pair.row_b))
        )
        if one < 0 or other < 0 or (one == other and pair.a.source is pair.b.source):
            return []
        known = (id(pair.a.source), one, id(pair.b.source), other)
        if known not in self._known:
            rows = pair.a.source.quantizers[one], pair.b.source.quantizers[other]
            self._known[known] = compare_facts.differences(*rows)
        return self._known[known]


def _statistics(matched: Matched, options: Options) -> Iterator[tuple[list[str], Mapping[str, tuple[float, float]]]]:
    """For each pair, the names of the statistics that differ, and their values."""
    mine = _gather([(pair.a.source, pair.row_a) for pair in matched.pairs], options.by)
    theirs = _gather([(pair.b.source, pair.row_b) for pair in matched.pairs], options.by)
    if options.by == BYTES:
        tolerance = options.tolerance
        relative = max([tolerance.everywhere or 0.0, *tolerance.formats.values(), 2.0**-7 * tolerance.own_step])
        differing = compare_tables.unequal(mine, theirs, relative)
    else:
        differing = compare_tables.diverged(mine, theirs, options.factor, options.share)
    for place in range(len(matched.pairs)):
        names = [name for name in mine if name in differing and differing[name][place]]
        yield names, {name: (float(mine[name][place]), float(theirs[name][place])) for name in names}


def _is_of_bytes(name: str, values: tuple[float, float]) -> bool:
    """Whether a statistic that both have must be equal where the bytes are, however they were added up."""
    return name.endswith(("numel", "_count", "amax")) and not any(math.isnan(value) for value in values)


def side_by_side(pair: Pair) -> dict[str, tuple[float, float]]:
    """What the statistics of both records say of the tensor's state, (A, B) by name; what neither has is left out."""
    one, other = (
        compare_tables.derived(compare_tables.statistics(moment.source, np.array([row], dtype=np.intp)))
        for moment, row in ((pair.a, pair.row_a), (pair.b, pair.row_b))
    )
    found = {name: (float(one[name][0]), float(other[name][0])) for name in one}
    return {name: values for name, values in found.items() if not all(math.isnan(value) for value in values)}


def _gather(places: list[tuple[Rank, int]], by: str) -> compare_tables.Columns:
    """Statistics of records of several ranks, in their order."""
    sources = {id(source): source for source, _ in places}
    found: compare_tables.Columns = {}
    for source in sources.values():
        at = np.array([place for place, (other, _) in enumerate(places) if other is source], dtype=np.intp)
        rows: npt.NDArray[np.intp] = np.array([places[place][1] for place in at], dtype=np.intp)
        columns = compare_tables.statistics(source, rows)
        for name, values in (columns if by == BYTES else compare_tables.derived(columns)).items():
            found.setdefault(name, np.full(len(places), np.nan))[at] = values
    return found


def _forms(a: Record, b: Record) -> list[str]:
    """Whether the tensors are of another form; a component that one side did not keep is none."""
    found = ["shape"] if a.shape != b.shape else []
    if a.dtype and b.dtype and a.dtype != b.dtype:
        found.append("dtype")
    return found


def _components(a: Record, b: Record, tolerance: Tolerance, *, details: bool) -> Iterator[Comparison]:
    theirs = {part.name for part in b.components}
    mine = [part.name for part in a.components]
    for name in mine:
        if name in theirs:
            yield compare_bytes.compare_component(a, b, name, tolerance, details=details)
    for side, names in (("B", [n for n in mine if n not in theirs]), ("A", sorted(theirs - set(mine)))):
        for name in names:
            part = next(part for record in (a, b) for part in record.components if part.name == name)
            yield Comparison(name, part.format, compare_bytes.UNREAD, note=f"{side} has no {name}")


def _reasons(components: list[Comparison]) -> list[str]:
    different = [it.component for it in components if it.status == compare_bytes.DIFFERENT]
    words = ["scales" if "scale" in name or "amax" in name else "bytes" for name in different]
    return [word for word in ("bytes", "scales") if word in words]


def wanted(layer: Callable[[str], bool] | None, tensor: Callable[[str], bool] | None) -> Callable[[Key], bool]:
    """Which keys take part, from tests of their names."""
    return lambda key: (layer is None or layer(key.layer)) and (tensor is None or tensor(key.tensor))


def facts(pairs: list[tuple[Moment, Moment]]) -> dict[str, Any]:
    """What differs beside the records.

    Returns:
        ``configuration``, ``versions`` and ``environment`` of the first pair of ranks, ``iterations``: for each pair of
        moments what differs in loss, metrics, optimizer and random states, if anything.
    """
    a, b = pairs[0][0].source, pairs[0][1].source
    told = []
    for one, other in pairs:
        entries = [
            next(it for it in moment.source.iterations if (it.attempt, it.iteration) == moment.time)
            for moment in (one, other)
        ]
        found = compare_facts.iterations(*entries)
        found += compare_facts.random_states(one.source, other.source, one.time, other.time)
        told.append((one, other, found))
    return {
        "configuration": compare_facts.configurations(a, b),
        "versions": compare_facts.versions(a, b),
        "environment": compare_facts.surroundings(a, b),
        "iterations": told,
    }
