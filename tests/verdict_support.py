"""What the tests of the fault cases hold of a verdict, in one line each."""

from __future__ import annotations

from flightrec.analysis.incident import Incident
from flightrec.analysis.verdict import Place, Verdict, verdict_to_json


def judged(incident: Incident) -> Verdict:
    """The verdict with elements; its JSON form holds the same."""
    verdict = incident.verdict(elements=True)
    document = verdict_to_json(verdict)
    assert (document["kind"], document["confidence"], document["story"]) == (
        verdict.kind,
        verdict.confidence,
        verdict.story,
    )
    assert verdict.noticed == incident.trigger
    assert verdict.precursors == tuple(change for change in verdict.changes if change.label == "precursor")
    return verdict


def kind_of(verdict: Verdict) -> tuple[str, str]:
    return verdict.kind, verdict.confidence


def place(one: Place | None) -> str:
    """Layer, tensor, iteration and microbatch: ``fc output 3.0``."""
    if one is None:
        return "none"
    assert one.key is not None
    return f"{one.name} {one.iteration}.{one.key.microbatch}"


def began(verdict: Verdict) -> tuple[str, str]:
    return place(verdict.began.after), place(verdict.began.before)
