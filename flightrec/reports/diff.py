"""What ``flightrec diff --json`` prints: where two sides part first, and all else that differs, as plain JSON data.

The form is a contract (``docs/diff.md``): fields are only added while ``version`` stays. Conventions as in
``reports/summary.py``. Owns no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flightrec.analysis import compare
from flightrec.analysis.compare import Difference, Options
from flightrec.analysis.compare_bytes import Comparison, Tolerance
from flightrec.analysis.compare_facts import FactDifference
from flightrec.analysis.compare_tables import Moment, Single, match, moments
from flightrec.reports.summary import key_of, plain
from flightrec.storage.read import Incident, open_incident
from flightrec.storage.select import matching

DOCUMENT = "flightrec-diff"
VERSION = 1

Document = dict[str, Any]


def diff_paths(
    path: Path,
    *,
    other: str | None = None,
    iterations: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    layer: str | None = None,
    tensor: str | None = None,
    by: str | None = None,
    tolerance: Sequence[str] = (),
    factor: float = Options.factor,
    share: float = Options.share,
    num_details: int = Options.num_details,
    limit: int = 200,
) -> Document:
    """Open one incident or two and compare; see ``diff``.

    Args:
        path: of A.
        other: path of B; None: A itself.
        iterations: one of each, see ``compare_tables.moments``.
        ranks: one of each.
        layer: only these layers: a name, a glob, or ``re:...``.
        tensor: only these tensors, likewise.
        by: ``bytes`` or ``statistics``; None: statistics if two iterations of one incident are compared.
        tolerance: see ``Tolerance.parse``.
        factor: see ``Options``.
        share: see ``Options``.
        num_details: see ``Options``.
        limit: how many entries each list of the document has at most.

    Raises:
        IncidentError: one cannot be read, or nothing can be paired.
        ConfigError: a pattern or a tolerance is none.
    """
    by = by or (compare.STATISTICS if iterations and other is None else compare.BYTES)
    options = Options(by, Tolerance.parse(tolerance), factor, share, num_details)
    with ExitStack() as stack:
        a = stack.enter_context(open_incident(path))
        b = a if other is None else stack.enter_context(open_incident(Path(other)))
        return diff(
            a,
            b,
            options,
            iterations=None if iterations is None else (iterations[0], iterations[1]),
            ranks=None if ranks is None else (ranks[0], ranks[1]),
            layer=layer,
            tensor=tensor,
            limit=limit,
        )


def diff(
    a: Incident,
    b: Incident,
    options: Options,
    *,
    iterations: tuple[str, str] | None = None,
    ranks: tuple[int, int] | None = None,
    layer: str | None = None,
    tensor: str | None = None,
    limit: int = 200,
) -> Document:
    """Compare two sides; arguments as ``diff_paths`` takes them.

    Returns:
        JSON data, see ``docs/diff.md``. ``differ``: whether any pair of records differs or, comparing bytes, any record
        is on one side only.
    """
    pairs = moments(a, b, iterations=iterations, ranks=ranks)
    tests = [None if pattern is None else matching(pattern) for pattern in (layer, tensor)]
    matched = match(pairs, compare.wanted(*tests))
    outcome = compare.compare(matched, options)
    facts = compare.facts(pairs)
    one_sided = options.by == compare.BYTES and bool(matched.only_a or matched.only_b)
    told = [_difference(found) for found in outcome.differences[: max(limit, 1)]]
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "differ": bool(outcome.differences) or one_sided,
        "a": _side(a),
        "b": _side(b),
        "by": options.by,
        "tolerance": None if options.tolerance.is_exact else options.tolerance.to_json(),
        "factor": options.factor,
        "share": options.share,
        "compared": [{"a": one.to_json(), "b": other.to_json()} for one, other in pairs],
        "num_pairs": len(matched.pairs),
        "num_equal": outcome.num_equal,
        "num_within": outcome.num_within,
        "num_not_compared": outcome.num_not_compared,
        "num_different": len(outcome.differences),
        "first": _first(outcome.differences, told),
        "differences": told,
        "num_only_a": len(matched.only_a),
        "num_only_b": len(matched.only_b),
        "only_a": [_single(single) for single in matched.only_a[:limit]],
        "only_b": [_single(single) for single in matched.only_b[:limit]],
        **{name: _facts(facts[name], limit) for name in ("configuration", "versions", "environment")},
        "iterations": [_iteration(one, other, found, limit) for one, other, found in facts["iterations"]],
    }


def _side(incident: Incident) -> Document:
    return {
        "id": incident.incident_id,
        "path": str(incident.path),
        "run_id": incident.run_id,
        "ranks": [rank.rank for rank in incident.ranks],
        "trigger": {"rule": incident.trigger.rule, "iteration": incident.trigger.iteration},
    }


def _difference(found: Difference) -> Document:
    pair = found.pair
    sequence = [
        int(moment.source.records["sequence"][row]) for moment, row in ((pair.a, pair.row_a), (pair.b, pair.row_b))
    ]
    return {
        "key": key_of(pair.key),
        "a": {**pair.a.to_json(), "sequence": sequence[0]},
        "b": {**pair.b.to_json(), "sequence": sequence[1]},
        "reasons": found.reasons,
        "sentence": _sentence(found),
        "statistics": {name: _numbers(values) for name, values in found.statistics.items()},
        "components": [plain(component.to_json()) for component in found.components],
        "quantizer": _facts(found.quantizer, len(found.quantizer)),
    }


def _first(found: Sequence[Difference], told: Sequence[Document]) -> Document | None:
    if not found:
        return None
    both = compare.side_by_side(found[0].pair)
    return {**told[0], "side_by_side": {name: _numbers(values) for name, values in both.items()}}


def _sentence(found: Difference) -> str:
    """What differs first, with the numbers."""
    read = next((it for it in found.components if it.num_different), None)
    if read is not None:
        return _elements(read)
    noted = next((it for it in found.components if it.status == "different"), None)
    if noted is not None:
        return f"{noted.component}: {noted.note}."
    if found.quantizer:
        fact = found.quantizer[0]
        return f"its quantizer: {fact.path} is {fact.a!r} in A, {fact.b!r} in B."
    if found.statistics:
        name, (a, b) = next(iter(found.statistics.items()))
        return f"{name} is {a:.6g} in A, {b:.6g} in B."
    return f"another {found.reasons[0]}."


def _elements(read: Comparison) -> str:
    share = f"{read.num_different} of {read.num_elements} elements of {read.component} differ"
    nan = [f"{count} are NaN only in {side}" for side, count in (("A", read.num_nan_a), ("B", read.num_nan_b)) if count]
    apart = (
        [f"at most {read.max_difference:.6g} apart ({read.max_relative:.3g} relative)"] if read.max_difference else []
    )
    first = f"the first at {list(read.first[0])}: {read.first[1]:.6g} and {read.first[2]:.6g}" if read.first else ""
    return ", ".join(filter(None, [share, *nan, *apart, first])) + "."


def _single(single: Single) -> Document:
    return {"key": key_of(single.key), **single.at.to_json()}


def _facts(found: Sequence[FactDifference], limit: int) -> list[Document]:
    return [{"path": fact.path, "a": plain(fact.a), "b": plain(fact.b)} for fact in found[:limit]]


def _iteration(a: Moment, b: Moment, found: Sequence[FactDifference], limit: int) -> Document:
    return {"a": a.to_json(), "b": b.to_json(), "facts": _facts(found, limit)}


def _numbers(values: tuple[float, float]) -> Mapping[str, Any]:
    return {side: None if value != value else plain(value) for side, value in zip("ab", values, strict=True)}
