"""All that the page shows, as JSON data of bounded size: built in the child process that reads the incident.

Tables first; of the tensors only those of a few suspect records are read, in parts. Offline, any thread, no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flightrec.analysis.blame import blame
from flightrec.analysis.incident import Incident, open_incident
from flightrec.reports import summary
from flightrec.reports.page import curves, grids, story, suspects, table, tensors
from flightrec.reports.progress import tell
from flightrec.storage.rank import Rank

DOCUMENT = "flightrec-report"
VERSION = 1

MAX_TEXT = 200_000
"""Characters of the configuration that are shown."""

LIMITS = {"firings": 200, "blame": 40, "way": 200, "around": 40, "iterations": 400, "blind": 200, "ranks": 64}
"""Entries of each part of the summary."""

MAX_WORDS = 2_000
"""Characters of any other text of the incident."""

MAX_NAME = 200
"""Characters of names where there are many of them."""

MAX_ENTRIES = 200
"""Of the environment."""

Document = dict[str, Any]

_STEPS = 6


def document_of_path(path: Path) -> Document:
    """Open an incident and gather what the page shows; see ``document_of``.

    Raises:
        IncidentError: it cannot be read.
    """
    with open_incident(path) as incident:
        return document_of(incident)


def document_of(incident: Incident) -> Document:
    """Gather what the page shows.

    Args:
        incident: an open one; of its tensors those of at most ``suspects.MAX_SUSPECTS`` records are read.

    Returns:
        JSON data. Texts are as the incident has them: whoever shows them escapes them.

    Raises:
        IncidentError: a table is damaged.
    """
    tell("tables", 0, _STEPS)
    told = summary.summarize(incident)
    tell("the verdict", 1, _STEPS)
    findings = blame(incident)
    verdict = story.verdict_of(incident, findings)
    chosen = suspects.choose(incident, verdict, findings)
    rank = _rank_of(incident, chosen[0][0].rank if chosen else findings[0].rank if findings else None)
    tell("heat maps", 2, _STEPS)
    maps = grids.heat_maps(rank)
    tell("curves", 3, _STEPS)
    scalars = curves.scalars(incident)
    at = (findings[0].attempt, findings[0].iteration) if findings else _trigger_time(incident)
    seen = table.tensors_at(rank, *at)
    looked = []
    for place, (record, reasons) in enumerate(chosen):
        tell(f"tensors of record {place + 1} of {len(chosen)}", _STEPS * 4 + place, _STEPS * 4 + len(chosen) + 1)
        looked.append(_look(incident, record, reasons))
    tell("the page", _STEPS, _STEPS)
    return {
        "document": DOCUMENT,
        "version": VERSION,
        **_bounded(told),
        "verdict": _short(verdict),
        "maps": _short(maps, MAX_NAME),
        "scalars": scalars,
        "tensors": _short(seen, MAX_NAME),
        "suspects": _short(looked),
        "config": incident.config_text[:MAX_TEXT],
        "config_is_cut": len(incident.config_text) > MAX_TEXT,
        "environment": _few(summary.plain(dict(incident.environment))),
    }


def _look(incident: Incident, record: Any, reasons: tuple[str, ...]) -> Document:
    rank = _rank_of(incident, record.rank)
    looked = tensors.look(rank, record, reasons)
    before = suspects.reference(rank, record)
    looked["before"] = None
    if before is not None:
        looked["before"] = {"iteration": before.iteration, "values": tensors.values_of(rank, before)}
    looked["history"] = curves.scale_history(rank, record.key, suspects.same_series(rank, record))
    return looked


def _rank_of(incident: Incident, number: int | None) -> Rank:
    return next((rank for rank in incident.ranks if rank.rank == number), incident.ranks[0])


def _trigger_time(incident: Incident) -> tuple[int, int]:
    return incident.trigger.attempt, incident.trigger.iteration


def _bounded(told: Mapping[str, Any]) -> Document:
    """The summary with at most ``LIMITS`` entries a part; ``left_out`` counts the others. Histories stand elsewhere."""
    found: Document = {"left_out": {}}
    for name, value in told.items():
        if name in ("document", "version", "history"):
            continue
        limit = LIMITS.get(name)
        if limit is not None and len(value) > limit:
            found["left_out"][name] = len(value) - limit
            # The last iterations are those of the fault; of all else the first entries come first.
            value = value[-limit:] if name == "iterations" else value[:limit]
        found[name] = _short(value, MAX_NAME if limit is not None and name != "blame" else MAX_WORDS)
    return found


def _short(value: Any, limit: int = MAX_WORDS) -> Any:
    """Cut every text that is too long for anybody to read."""
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}... ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {_short(name, limit): _short(entry, limit) for name, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry, limit) for entry in value] if not _is_numbers(value) else value
    return value


def _few(environment: Mapping[str, Any]) -> Document:
    """The environment with at most ``MAX_ENTRIES``, a value that is too long as the beginning of its JSON."""
    found = {}
    for name, value in list(environment.items())[:MAX_ENTRIES]:
        told = json.dumps(value)
        found[_short(name, MAX_NAME)] = value if len(told) <= MAX_WORDS else _short(told)
    return found


def _is_numbers(values: list[Any]) -> bool:
    return bool(values) and not isinstance(values[0], (str, list, dict)) and len(values) > 32
