"""The verdict as the page tells it: what ``Incident.verdict`` says, or what the findings of ``blame`` say.

The analysis of the verdict is looked up when it is needed: without it the page has the first finding's evidence as its
story. Pure functions, no state.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from flightrec.analysis.blame import Finding
from flightrec.reports.summary import key_of
from flightrec.storage.read import Incident

Document = dict[str, Any]

EMPTY: Mapping[str, Any] = {
    "kind": "",
    "confidence": "",
    "began": {"after": None, "before": None, "between": []},
    "cause": "",
    "evidence": [],
    "precursors": [],
    "changes": [],
    "elements": None,
    "missing": [],
    "advice": "",
    "story": "",
}
"""Fields that the page shows; what a verdict lacks is not shown."""

_PLACE = {"rank": -1, "attempt": 0, "iteration": 0, "key": None, "sequence": -1, "record": -1}
_CHANGE = {**_PLACE, "label": "", "sentence": ""}
_ELEMENTS = {"num_faulty": 0, "numel": 0, "shape": [], "indices": [], "values": [], "where": ""}


def verdict_of(incident: Incident, findings: Sequence[Finding]) -> Document:
    """The verdict as JSON data, with at least the fields of ``EMPTY``.

    Args:
        incident: an open one.
        findings: what ``blame`` gave.

    Raises:
        IncidentError: a table is damaged.
    """
    ask = getattr(incident, "verdict", None)
    if ask is None:
        return complete(_from_findings(incident, findings))
    module = importlib.import_module("flightrec.analysis.verdict")
    return complete(module.verdict_to_json(ask(elements=True)))


def complete(verdict: Mapping[str, Any]) -> Document:
    """The same with every field that the page asks for, so that a verdict may lack what it does not know."""
    found = {**EMPTY, **{name: value for name, value in verdict.items() if value is not None}}
    began = {**EMPTY["began"], **found["began"]}
    for name in ("after", "before"):
        began[name] = {**_PLACE, **began[name]} if began[name] else None
    found["began"] = began
    for name in ("precursors", "changes"):
        found[name] = [{**_CHANGE, **change} for change in found[name]]
    found["elements"] = {**_ELEMENTS, **found["elements"]} if found["elements"] else None
    return found


def _from_findings(incident: Incident, findings: Sequence[Finding]) -> Document:
    noticed = incident.trigger
    fired = f"It was noticed in iteration {noticed.iteration} by the rule {noticed.rule}: {noticed.message}"
    if not findings:
        return {"story": f"No recorded tensor shows where it began. {fired}"}
    first = findings[0]
    story = f"What went wrong first, in iteration {first.iteration}: {first.evidence} {fired}"
    place = {
        "rank": first.rank,
        "attempt": first.attempt,
        "iteration": first.iteration,
        "key": None if first.key is None else key_of(first.key),
        "sequence": first.sequence,
        "record": first.record,
    }
    began: Document = {"after": None, "before": place, "between": []}
    return {"story": story, "began": began, "evidence": [finding.evidence for finding in findings[:3]]}
