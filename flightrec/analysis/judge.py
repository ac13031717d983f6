"""Gives the verdict on an incident, from its tables; from one record's payload too if asked for. No state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flightrec.analysis import run_level
from flightrec.analysis.blame import NONFINITE, Finding, blame
from flightrec.analysis.causes import HOST_KINDS, QUANTIZER_KINDS, Cause, find_cause
from flightrec.analysis.changes import Change, find_changes
from flightrec.analysis.elements import Elements, find_elements
from flightrec.analysis.interval import find_interval, side_of
from flightrec.analysis.missing import find_missing, older_than_window
from flightrec.analysis.quantizing import unchanged_scale
from flightrec.analysis.speed import find_speeds
from flightrec.analysis.story import tell
from flightrec.analysis.verdict import WEAK, Interval, Verdict, name_of
from flightrec.analysis.window import find_jumps
from flightrec.errors import FlightrecError
from flightrec.storage import files
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident
from flightrec.storage.record import Record

SMALL_BYTES = 32 << 20
"""A record of at most so many bytes may be read on the way, where elements were not asked for outright."""


def judge(
    incident: Incident,
    *,
    elements: bool = False,
    max_bytes: int | None = None,
    findings: Sequence[Finding] | None = None,
) -> Verdict:
    """Judge an incident; see ``verdict.Verdict``.

    Args:
        incident: an open one.
        elements: read the payload of the origin's record and tell which elements are at fault.
        max_bytes: do not read a record with more bytes; None: whatever it has.
        findings: what ``blame`` gave, if it is known already.

    Raises:
        IncidentError: a table is damaged. Damaged payload is told among the evidence.
    """
    findings = blame(incident) if findings is None else findings
    origin = next((finding for finding in findings if finding.kind not in HOST_KINDS), None)
    first = origin or (findings[0] if findings else None)
    if first is None:
        return _of_nothing(incident)
    rank = next(rank for rank in incident.ranks if rank.rank == first.rank)
    faulty = {f.record for f in findings if f.rank == rank.rank and f.record >= 0}
    interval = find_interval(rank, first, faulty)
    found, problem = _elements(rank, first, max_bytes) if elements else (None, "")
    changes = _changes(rank, first) if origin is not None else ()
    with files.reading(rank.facts_path, "/records"):
        cause = find_cause(incident.ranks, first, interval, found)
    precursors = tuple(change for change in changes if change.label == "precursor")
    cause = run_level.refine(rank, first, cause, precursors)
    missing, advice = find_missing(rank, origin, interval)
    if not missing and first.kind in run_level.RULES and precursors:
        missing, advice = older_than_window(rank, precursors[0])
    verdict = Verdict(
        kind=cause.kind,
        confidence=cause.confidence,
        began=interval,
        noticed=incident.trigger,
        cause=cause.sentence,
        evidence=(*cause.evidence, *([problem] if problem else ()), *_tied(first)),
        precursors=precursors,
        changes=changes,
        elements=found,
        missing=missing,
        advice=advice,
    )
    verdict = _lessened(verdict, cause)
    return replace(verdict, story=tell(verdict, first))


def _of_nothing(incident: Incident) -> Verdict:
    missing = "nothing that is recorded is at fault: the fault is older than the ring, or was not selected."
    rank = incident.ranks[0]
    firing = incident.trigger
    _, advice = find_missing(
        rank,
        Finding(firing.kind, firing.rule, firing.severity, rank.rank, firing.attempt, firing.iteration, None, -1, -1,
                "", firing.message),
        Interval(None, None),
    )  # fmt: skip
    verdict = Verdict("unknown", WEAK, Interval(None, None), firing, "nothing that is recorded is at fault")
    verdict = replace(verdict, evidence=(firing.message,), missing=(missing,), advice=advice)
    return replace(verdict, story=tell(verdict, None))


def _lessened(verdict: Verdict, cause: Cause) -> Verdict:
    """A fault that is older than the window is of unknown cause, whatever its first record looks like."""
    older = [sentence for sentence in verdict.missing if "older than the ring" in sentence]
    if not older or verdict.began.after is not None or cause.kind in ("scale", "quantization"):
        return verdict
    return replace(verdict, kind="unknown", confidence=WEAK, cause="the fault began before the window")


def _tied(first: Finding) -> list[str]:
    if not first.tied_with:
        return []
    others = ", ".join(f"rank {rank} microbatch {microbatch}" for rank, microbatch in first.tied_with)
    return [f"no order can be told to what began in {others}."]


def _elements(rank: Rank, first: Finding, max_bytes: int | None) -> tuple[Elements | None, str]:
    if first.record < 0 or first.kind in run_level.RULES:  # of one number nobody needs to be told which
        return None, ""
    record = Record(rank, first.record)
    if max_bytes is not None and record.num_bytes > max_bytes:
        return None, ""
    try:
        return find_elements(record, side_of(first)), ""
    except FlightrecError as error:
        return None, f"the bytes of {name_of(first.key)} cannot be read: {error}."


def _changes(rank: Rank, origin: Finding) -> tuple[Change, ...]:
    """Changes up to the origin's iteration, labelled; from the window where the history is too short."""
    found = find_changes(rank, until=(origin.attempt, origin.iteration))
    if not found:
        found = find_jumps(rank, until=(origin.attempt, origin.iteration))
    if not found and origin.kind in run_level.RULES:
        found = find_speeds(rank, until=(origin.attempt, origin.iteration))
    unchanged = unchanged_scale(rank, origin) if origin.kind in QUANTIZER_KINDS else None
    if unchanged is not None:
        found = sorted([*found, unchanged], key=lambda change: change.iteration)
    return tuple(_labelled(rank, origin, found))


def _labelled(rank: Rank, origin: Finding, changes: Sequence[Change]) -> list[Change]:
    table = rank.records
    rows = np.flatnonzero((table["attempt"] == origin.attempt) & (table["iteration"] == origin.iteration))
    first_seen: dict[object, int] = {}
    if any(change.iteration == origin.iteration for change in changes):
        for key, sequence in zip(rank.keys(rows), table["sequence"][rows].tolist(), strict=True):
            first_seen.setdefault(key.series, sequence)
    return [replace(change, label=_label(origin, change, first_seen)) for change in changes]


def _label(origin: Finding, change: Change, first_seen: dict[object, int]) -> str:
    if (change.attempt, change.iteration) != (origin.attempt, origin.iteration):
        earlier = (change.attempt, change.iteration) < (origin.attempt, origin.iteration)
        return "precursor" if earlier else "symptom"
    if origin.key is None:
        return "symptom"
    if change.key.series == origin.key.series:
        return "precursor" if origin.kind == NONFINITE and change.statistic == "amax" else "origin"
    mine = (origin.key.stage.order, origin.sequence)
    return "precursor" if (change.key.stage.order, first_seen.get(change.key.series, 1 << 40)) < mine else "symptom"
