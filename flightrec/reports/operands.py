"""Finds one record that a user names, or the records of one product. Reads tables only; owns no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flightrec.analysis.incident import Incident
from flightrec.errors import IncidentError
from flightrec.records import Phase, Stage
from flightrec.storage.record import HIGH_PRECISION, Record

FORMULAS = {
    "forward": "activation @ weight.T",
    "dgrad": "gradient @ weight",
    "wgrad": "gradient.T @ activation",
}
"""The three products of a linear layer; all leading axes of activation and gradient count as rows."""

SIDES = {
    "forward": {"activation": "rowwise", "weight": "rowwise"},
    "dgrad": {"gradient": "rowwise", "weight": "columnwise"},
    "wgrad": {"gradient": "columnwise", "activation": "columnwise"},
}
"""Which operand a product reads, and which side of it, where the two sides are not the same codes."""

_RESULTS = {"forward": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
_RUNNING_SUM = "main_grad"


@dataclass(frozen=True)
class Chosen:
    """A record, and how many others the same words name."""

    record: Record
    num_others: int


def choose(incident: Incident, **filters: Any) -> Chosen:
    """Choose one record with bytes: of the trigger's iteration if there is one, else the latest; the first in it.

    Args:
        incident: an open incident.
        filters: those of ``Incident.records``, and ``call``.

    Raises:
        IncidentError: there is none, or none has bytes (says why).
    """
    call = filters.pop("call", None)
    found = [r for r in incident.records(**filters) if call is None or r.key.call == call]
    if not found:
        words = ", ".join(f"{name} {value}" for name, value in filters.items() if value is not None)
        layers = sorted({record.key.layer for record in incident.records()})
        raise IncidentError(f"{incident.path}: has no record of {words}; layers are {_some(layers)}")
    kept = [record for record in found if any(record.has_bytes(part.name) for part in record.components)]
    if not kept:
        raise IncidentError(
            f"{found[0]!r}: has no bytes to export: {found[0].why_absent or 'only its statistics were kept'}"
        )
    trigger = (incident.trigger.attempt, incident.trigger.iteration)
    times = {(record.attempt, record.iteration) for record in kept}
    time = trigger if trigger in times else max(times)
    first = min((record for record in kept if (record.attempt, record.iteration) == time), key=_order)
    return Chosen(first, len(kept) - 1)


def _order(record: Record) -> tuple[Any, ...]:
    key = record.key
    return (key.phase is not Phase.TRAIN, record.rank, key.microbatch, key.stage.order, record.sequence)


def product(incident: Incident, which: str, **filters: Any) -> tuple[dict[str, Record], int]:
    """The records of one product of a layer.

    Args:
        incident: an open incident.
        which: ``forward``, ``dgrad`` or ``wgrad``.
        filters: those of ``choose``; ``tensor`` is told by the product.

    Returns:
        Records by role: the operands; where they were recorded ``output`` (what the product made), ``bias``, and
        ``before`` (what a running sum held). And how many other products the same words name.

    Raises:
        IncidentError: an operand was not recorded.
    """
    lead = next(iter(SIDES[which]))
    chosen = choose(incident, **{**filters, "tensor": lead})
    anchor = chosen.record
    beside = [
        record
        for record in incident.records(
            layer=anchor.key.layer, attempt=anchor.attempt, iteration=anchor.iteration, rank=anchor.rank
        )
        if any(record.has_bytes(part.name) for part in record.components)
    ]
    found: dict[str, Record] = {}
    for role, side in SIDES[which].items():
        candidates = [record for record in beside if record.key.tensor == role]
        if not candidates:
            there = sorted({record.key.tensor for record in beside})
            raise IncidentError(
                f"{anchor!r}: the {which} product needs its {role}, which has no bytes; there are {there}"
            )
        fitness = [_fitness(record, anchor, side) for record in candidates]
        found[role] = candidates[fitness.index(max(fitness))]
    results = [
        record
        for record in beside
        if record.key.tensor == _RESULTS[which]
        and record.key.part in ("", _RUNNING_SUM)
        and record.has_bytes(HIGH_PRECISION)
        and _same_pass(record, anchor)
        and record.key.stage in (Stage.FORWARD, Stage.BACKWARD)
    ]
    if results:
        found["output"] = results[0]
        if which == "wgrad":
            found |= _before(beside, results[0])
    bias = _bias(incident, anchor) if which == "forward" else None
    return found | ({} if bias is None else {"bias": bias}), chosen.num_others


def _before(beside: Sequence[Record], result: Record) -> dict[str, Record]:
    """What a gradient that is a running sum was added to: the same after the microbatch before."""
    wanted = replace(result.key, microbatch=result.key.microbatch - 1)
    found = next((record for record in beside if record.key == wanted and record.has_bytes(HIGH_PRECISION)), None)
    return {} if found is None else {"before": found}


def _bias(incident: Incident, anchor: Record) -> Record | None:
    """The bias that the forward added: the parameter as the step before left it."""
    found = incident.records(
        layer=anchor.key.layer,
        tensor="parameter",
        part="bias",
        attempt=anchor.attempt,
        iteration=anchor.iteration - 1,
        rank=anchor.rank,
        stage=Stage.AFTER_STEP,
    )
    return next((record for record in found if record.has_bytes(HIGH_PRECISION)), None)


def _same_pass(record: Record, anchor: Record) -> bool:
    key, other = record.key, anchor.key
    return (key.microbatch, key.call, key.phase) == (other.microbatch, other.call, other.phase)


def _fitness(record: Record, anchor: Record, side: str) -> tuple[Any, ...]:
    """Best first: the anchor's pass, the side that the product reads, any codes."""
    names = {part.name for part in record.components if record.has_bytes(part.name)}
    codes = "data" if side == "rowwise" else "columnwise_data"
    key = record.key
    return (
        key.microbatch in (anchor.key.microbatch, -1) and key.call == anchor.key.call,
        codes in names,
        bool(names - {HIGH_PRECISION}),
        key.phase is anchor.key.phase,
        -record.sequence,
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def rounding_steps() -> Mapping[str, float]:
    """How far a result of a dtype may lie from the sum that it was rounded from, relative: a step of its last bit."""
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
