"""The verdict on an incident: where it began, why, how sure that is, and what would have shown more. Data, no state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flightrec.analysis.changes import Change
from flightrec.analysis.elements import Elements
from flightrec.analysis.plain import firing_of, key_of, plain
from flightrec.records import Firing, Key

KINDS = (
    "numbers",
    "quantization",
    "scale",
    "optimizer",
    "communication",
    "padding",
    "loss",
    "host",
    "unknown",
)
CERTAIN, LIKELY, WEAK = "certain", "likely", "weak"


@dataclass(frozen=True)
class Place:
    """One record, or one moment of a run.

    Attributes:
        rank: whose.
        attempt: when.
        iteration: when.
        key: of the record; None for the run as a whole.
        sequence: of the record in its iteration, -1 without one.
        record: row of the rank's ``/records``, -1 for none.
    """

    rank: int
    attempt: int
    iteration: int
    key: Key | None
    sequence: int
    record: int

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Layer, tensor and part in words."""
        return name_of(self.key)


@dataclass(frozen=True)
class Interval:
    """Where something began.

    Attributes:
        after: the last clean record before it, in blame order; for what arose in quantization the record itself, whose
            high-precision side is clean. None if the window holds none.
        before: the first faulty record; None if none is faulty.
        between: the operations between them that nobody records, in words.
    """

    after: Place | None
    before: Place | None
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What happened.

    Attributes:
        kind: one of ``KINDS``: ``numbers`` (from the high-precision side), ``quantization`` (clean before, bad after),
            ``scale`` (stale or broken), ``optimizer``, ``communication``, ``padding`` (rows that nobody should read),
            ``loss`` (labels or logits), ``host`` (exception, hang, manual), ``unknown`` (older than the ring, or not
            selected).
        confidence: ``certain``, ``likely`` or ``weak``.
        began: where it began.
        noticed: the firing that made the incident.
        cause: one sentence.
        evidence: sentences that the cause rests on.
        precursors: changes before the origin.
        changes: all changes, labelled, in causal order.
        elements: which elements of the origin are at fault, if asked for and its bytes are there.
        missing: what the window does not hold.
        advice: YAML lines that would have shown the origin; empty if it is in the window.
        story: one paragraph.
    """

    kind: str
    confidence: str
    began: Interval
    noticed: Firing
    cause: str
    evidence: tuple[str, ...] = ()
    precursors: tuple[Change, ...] = ()
    changes: tuple[Change, ...] = ()
    elements: Elements | None = None
    missing: tuple[str, ...] = ()
    advice: str = ""
    story: str = ""


def name_of(key: Key | None) -> str:
    """A key in words: layer, tensor, part."""
    if key is None:
        return "the run"
    if not key.layer and key.tensor in ("loss", "metric"):
        return f"the {key.tensor}" + (f" {key.part}" if key.part else "")
    return f"{key.layer or 'the model'} {key.tensor}" + (f" ({key.part})" if key.part else "")


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON data, in the conventions of ``docs/inspect.md``."""
    return {
        "kind": verdict.kind,
        "confidence": verdict.confidence,
        "began": {
            "after": _place(verdict.began.after),
            "before": _place(verdict.began.before),
            "between": list(verdict.began.between),
        },
        "noticed": firing_of(verdict.noticed),
        "cause": verdict.cause,
        "evidence": list(verdict.evidence),
        "precursors": [_flat(change) for change in verdict.precursors],
        "changes": [_flat(change) for change in verdict.changes],
        "elements": None if verdict.elements is None else _flat(verdict.elements),
        "missing": list(verdict.missing),
        "advice": verdict.advice,
        "story": verdict.story,
    }


def _place(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {**_flat(place), "key": None if place.key is None else key_of(place.key)}


def _flat(value: Change | Elements | Place) -> dict[str, Any]:
    return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
