"""Which records the page shows closely: a bounded number, the most suspect first. Tables only, no state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flightrec.analysis.blame import Finding
from flightrec.records import NO_MICROBATCH
from flightrec.reports.summary import key_of
from flightrec.storage import files
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident
from flightrec.storage.record import Record

MAX_SUSPECTS = 6
MAX_WITH_BYTES = 4
"""Of them, whose tensors are read."""

NUM_FINDINGS = 20
"""Findings among which suspects are looked for."""

_KEY_COLUMNS = ["layer", "tensor", "part", "microbatch", "phase", "call", "stage"]

Place = tuple[int, int]
"""(rank, row of its ``/records``)."""


def choose(
    incident: Incident, verdict: Mapping[str, Any], findings: Sequence[Finding]
) -> list[tuple[Record, tuple[str, ...]]]:
    """The records to look at, each with the reasons in words: origin, trigger, the first findings.

    Args:
        incident: an open one.
        verdict: as JSON data.
        findings: what ``blame`` gave.
    """
    ranks = {rank.rank: rank for rank in incident.ranks}
    reasons: dict[Place, list[str]] = {}
    for place, why in _places(incident, verdict, findings):
        rank, row = place
        if rank in ranks and 0 <= row < len(ranks[rank].records):
            mine = reasons.setdefault(place, [])
            if why not in mine:
                mine.append(why)
    has_bytes = {place: bool(ranks[place[0]].records[place[1]]["bytes"] > 0) for place in reasons}
    read = [place for place in reasons if has_bytes[place]][:MAX_WITH_BYTES]
    others = [place for place in reasons if not has_bytes[place]][: MAX_SUSPECTS - len(read)]
    chosen = [place for place in reasons if place in {*read, *others}]
    return [(Record(ranks[rank], row), tuple(reasons[rank, row])) for rank, row in chosen]


def reference(rank: Rank, record: Record) -> Record | None:
    """The same tensor in the latest earlier iteration that has its bytes and nothing non-finite; None without one."""
    table = rank.records
    with files.reading(rank.facts_path, "/records"):
        row = table[record.index]
        same = (table["bytes"] > 0) & (table["attempt"] == row["attempt"]) & (table["iteration"] < row["iteration"])
        for column in _KEY_COLUMNS:
            same &= table[column] == row[column]
        for name in ("nan_count", "positive_inf_count", "negative_inf_count", "quantized_nan_count"):
            same &= ~(table[name] > 0)
        rows = np.flatnonzero(same)
        if not len(rows):
            return None
        latest = rows[np.argmax(table["iteration"][rows])]
    return Record(rank, int(latest))


def same_series(rank: Rank, record: Record) -> list[Record]:
    """All records of the same tensor in the incident, whatever their microbatch."""
    table = rank.records
    with files.reading(rank.facts_path, "/records"):
        same = np.ones(len(table), bool)
        for column in _KEY_COLUMNS:
            if column != "microbatch":
                same &= table[column] == table[record.index][column]
        rows = np.flatnonzero(same)
    return [Record(rank, int(row)) for row in rows]


def _places(incident: Incident, verdict: Mapping[str, Any], findings: Sequence[Finding]) -> Iterator[tuple[Place, str]]:
    began = verdict.get("began") or {}
    before = began.get("before")
    if before:
        yield (before["rank"], before["record"]), "the first faulty record"
    for change in [change for change in verdict.get("changes") or () if change["label"] == "origin"][:2]:
        row = _row_of(incident, change)
        if row >= 0:
            yield (change["rank"], row), "where a statistic changed first"
    yield from _findings(findings[:1])
    trigger = incident.trigger
    for rank in incident.ranks:
        if trigger == rank.trigger:
            yield (rank.rank, trigger.record), "what the trigger fired on"
    after = began.get("after")
    if after:
        yield (after["rank"], after["record"]), "the last clean record"
    yield from _findings(findings[1:NUM_FINDINGS])


def _row_of(incident: Incident, change: Mapping[str, Any]) -> int:
    """The record in which a statistic changed; -1 if that iteration is not in the incident."""
    rank = next((rank for rank in incident.ranks if rank.rank == change["rank"]), None)
    if rank is None or change["key"] is None:
        return -1
    with files.reading(rank.facts_path, "/records"):
        table = rank.records
        rows = np.flatnonzero((table["attempt"] == change["attempt"]) & (table["iteration"] == change["iteration"]))
        wanted = {**change["key"], "microbatch": NO_MICROBATCH}
        keys = zip(rows.tolist(), rank.keys(rows), strict=True)
        return next((row for row, key in keys if key_of(key.series) == wanted), -1)


def _findings(findings: Sequence[Finding]) -> Iterator[tuple[Place, str]]:
    for finding in findings:
        why = "blamed first" if finding.position == 1 else f"finding {finding.position}"
        yield (finding.rank, finding.record), why
