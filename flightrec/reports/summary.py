"""What ``flightrec inspect --json`` prints: the incident's story as plain JSON data. Owns no state.

The form is a contract (``docs/inspect.md``): fields are only added while ``version`` stays. Numbers that JSON does not
have are the texts ``NaN``, ``Infinity`` and ``-Infinity``; what is unknown or absent is null. Tables are read, and
the payload of the blamed record if it is small.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flightrec.analysis.blame import Finding, blame
from flightrec.analysis.judge import SMALL_BYTES, judge
from flightrec.analysis.plain import firing_of, key_of, plain
from flightrec.analysis.verdict import verdict_to_json
from flightrec.reports.way import around, steps
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident, open_incident

__all__ = ["DOCUMENT", "VERSION", "Document", "key_of", "plain", "summarize", "summarize_path"]

DOCUMENT = "flightrec-inspect"
VERSION = 1

Document = dict[str, Any]


def summarize_path(path: Path) -> Document:
    """Open an incident and summarize it; see ``summarize``.

    Raises:
        IncidentError: it cannot be read.
    """
    with open_incident(path) as incident:
        return summarize(incident)


def summarize(incident: Incident) -> Document:
    """Tell an incident: what fired, where it began, the fault's way, the statistics around it.

    Args:
        incident: an open incident; its tables are read, and the blamed tensor if it is small.

    Returns:
        JSON data, see ``docs/inspect.md``.

    Raises:
        IncidentError: a table is damaged.
    """
    findings = blame(incident)
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "incident": _identity(incident),
        "trigger": firing_of(incident.trigger),
        "firings": [firing_of(firing) for firing in incident.firings],
        "ranks": [_rank(rank) for rank in incident.ranks],
        "iterations": [plain(asdict(entry)) for entry in incident.iterations],
        "verdict": verdict_to_json(judge(incident, elements=True, max_bytes=SMALL_BYTES, findings=findings)),
        "blame": [_finding(finding) for finding in findings],
        "way": [plain(step) for step in steps(incident, findings)],
        "around": [plain(row) for row in around(incident, findings)],
        "history": {
            name: {"iterations": plain(its.tolist()), "values": plain(values.tolist())}
            for name, (its, values) in ((name, incident.history[name]) for name in incident.history.scalars)
        },
        "blind": [plain(entry._asdict()) for entry in incident.blind],
    }


def _identity(incident: Incident) -> Document:
    created = datetime.datetime.fromtimestamp(incident.created_ns / 1e9, tz=datetime.timezone.utc)
    return {
        "id": incident.incident_id,
        "path": str(incident.path),
        "run_id": incident.run_id,
        "attempt": incident.attempt,
        "world_size": incident.world_size,
        "host": incident.host,
        "created": created.isoformat(timespec="seconds"),
        "ended": incident.ended,
        "versions": dict(incident.versions),
    }


def _rank(rank: Rank) -> Document:
    return {
        "rank": rank.rank,
        "facts": rank.facts_path.name,
        "tensors": rank.tensors_path.name if rank.tensors_path else None,
        "tensors_problem": rank.tensors_problem,
        "num_records": len(rank.records),
        "bytes": int(rank.records["bytes"].sum()) if len(rank.records) else 0,
        "problems": rank.problems,
    }


def _finding(finding: Finding) -> Document:
    return {
        "position": finding.position,
        "tied_with": [{"rank": rank, "microbatch": microbatch} for rank, microbatch in finding.tied_with],
        "kind": finding.kind,
        "rule": finding.rule or None,
        "severity": None if finding.severity is None else finding.severity.value,
        "side": finding.side or None,
        "rank": finding.rank,
        "attempt": finding.attempt,
        "iteration": finding.iteration,
        "key": None if finding.key is None else key_of(finding.key),
        "sequence": finding.sequence,
        "evidence": finding.evidence,
        "numbers": plain(finding.numbers),
    }
