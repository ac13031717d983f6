"""The messages between trainer and writer, each built and taken apart here and nowhere else.

A builder returns ``(kind, header, blobs)`` for ``WriterClient.send(*...)``. Runs in both processes; owns no state.

Trainer to writer, in the order of an incident's life: ``start`` (the client sends it), ``config``, ``layouts``,
``quantizers``; ``open``, ``iteration`` (one or several a tick), ``facts_end``, ``payload`` (one or several a tick),
``firing``, ``end``; ``discard`` instead of any of them; ``stop`` (the client sends it).

Writer to trainer (headers): ``ready`` {pid}; ``salvaged`` {paths}; ``facts_committed`` {incident, incident_id, path};
``free`` {incident, tick, offsets}; ``incident_done`` {incident, incident_id, path, bytes, seconds, num_records,
num_written, error}; ``discarded`` {incident}; ``error`` {incident (-1: none in particular), stage, message}.

After ``error`` the writer is done with that incident: what it had staged is freed and its later messages are ignored.
With ``stage`` ``tensors`` facts and index stand and an ``incident_done`` follows; else nothing has a final name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.records import NUM_STATISTICS, Firing, Key, Phase, QuantizerInfo, RecordLayout, Severity, Stage

Outgoing = tuple[str, dict[str, Any], tuple[Any, ...]]
"""Arguments of ``WriterClient.send``: kind, header, blobs."""

Blind = tuple[int, int, str, str, str]
"""What was not recorded: attempt, iteration (-1: all), layer, tensor, reason. ``storage.facts.Blind`` is one."""


def key_to_json(key: Key) -> list[Any]:
    """Plain JSON data of a key."""
    return [key.layer, key.tensor, key.part, key.microbatch, key.phase.value, key.call, key.stage.value]


def key_from_json(data: Sequence[Any]) -> Key:
    """Reverse ``key_to_json``."""
    layer, tensor, part, microbatch, phase, call, stage = data
    return Key(layer, tensor, part, microbatch, Phase(phase), call, Stage(stage))


def firing_to_json(firing: Firing) -> dict[str, Any]:
    """Plain JSON data of a firing. ``record`` is not sent: the writer finds the row."""
    return {
        "rule": firing.rule,
        "kind": firing.kind,
        "severity": firing.severity.value,
        "attempt": firing.attempt,
        "iteration": firing.iteration,
        "key": None if firing.key is None else key_to_json(firing.key),
        "sequence": firing.sequence,
        "value": firing.value,
        "threshold": firing.threshold,
        "message": firing.message,
    }


def firing_from_json(data: Mapping[str, Any], record: int = -1) -> Firing:
    """Reverse ``firing_to_json``, with the row in ``/records``."""
    return Firing(
        rule=data["rule"],
        kind=data["kind"],
        severity=Severity(data["severity"]),
        attempt=data["attempt"],
        iteration=data["iteration"],
        key=None if data["key"] is None else key_from_json(data["key"]),
        sequence=data["sequence"],
        value=data["value"],
        threshold=data["threshold"],
        message=data["message"],
        record=record,
    )


def config(text: str, environment: Mapping[str, Any]) -> Outgoing:
    """The configuration's text and the environment; once at the start, a later one replaces it."""
    return "config", {"text": text, "environment": dict(environment)}, ()


def layouts(new: Iterable[RecordLayout]) -> Outgoing:
    """Layouts that later ``iteration`` messages refer to by id. A few thousand a message at most."""
    return "layouts", {"layouts": [layout.to_json() for layout in new]}, ()


def quantizers(start_id: int, new: Iterable[QuantizerInfo]) -> Outgoing:
    """Quantizers ``start_id``, ``start_id + 1``, ..."""
    return "quantizers", {"start_id": start_id, "quantizers": [info.to_json() for info in new]}, ()


def open_incident(
    incident: int,
    trigger: Firing,
    firings: Sequence[Firing] = (),
    *,
    history: Mapping[str, tuple[npt.ArrayLike, ...]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Outgoing:
    """Begin an incident.

    Args:
        incident: the trainer's number for it, not used before.
        trigger: the primary firing; names the incident.
        firings: all firings known so far, the primary one among them or not.
        history: name to (iterations int64 [n], values float64 [n] or [n, m]) and, if known, attempts int64 [n].
        extra: JSON-able facts of this incident, stored with the environment (``stack``, ``exception``, ...).
    """
    header: dict[str, Any] = {
        "incident": incident,
        "created_ns": time.time_ns(),
        "trigger": firing_to_json(trigger),
        "firings": [firing_to_json(firing) for firing in firings],
        "extra": dict(extra or {}),
        "history": [],
    }
    blobs: list[Any] = []
    for name, (iterations, values, *attempts) in (history or {}).items():
        array = np.ascontiguousarray(values, dtype=np.float64)
        header["history"].append([name, list(array.shape), bool(attempts)])
        blobs += [np.ascontiguousarray(iterations, dtype=np.int64), array]
        blobs += [np.ascontiguousarray(known, dtype=np.int64) for known in attempts]
    return "open", header, tuple(blobs)


def iteration(
    incident: int,
    tick: int,
    *,
    attempt: int,
    iteration: int,
    num_microbatches: int,
    layout_ids: npt.ArrayLike,
    statistics: npt.ArrayLike,
    loss: float | None = None,
    partial: bool = False,
    blind: str = "",
    metrics: Mapping[str, float] | None = None,
    facts: Mapping[str, Any] | None = None,
    random_states: Mapping[str, npt.NDArray[np.uint8]] | None = None,
    tier: str = "ring",
    landmark: int = 0,
) -> Outgoing:
    """One recorded iteration: which records it has, in sequence order, and their statistics.

    A second message for the same tick appends its records (so a large iteration can be sent in pieces).

    Args:
        incident: whose.
        tick: the iteration's tick; ``payload`` refers to it.
        attempt: attempt number.
        iteration: iteration number.
        num_microbatches: how many there were.
        layout_ids: int [n], known from ``layouts``.
        statistics: float64 [n, NUM_STATISTICS].
        loss: the loss, if known.
        partial: records are missing that a complete iteration has.
        blind: why the iteration's records are missing or have no bytes, or empty.
        metrics: further numbers of this iteration.
        facts: as ``storage.facts.IterationFacts`` has them.
        random_states: likewise, uint8 [n] each.
        tier: likewise.
        landmark: likewise.
    """
    states = dict(random_states or {})
    ids = np.ascontiguousarray(layout_ids, dtype=np.int32)
    rows = np.ascontiguousarray(statistics, dtype=np.float64).reshape(-1, NUM_STATISTICS)
    assert ids.ndim == 1
    assert len(ids) == len(rows)
    header = {
        "incident": incident,
        "tick": tick,
        "attempt": attempt,
        "iteration": iteration,
        "num_microbatches": num_microbatches,
        "loss": None if loss is None else float(loss),
        "partial": partial,
        "blind": blind,
        "metrics": dict(metrics or {}),
        "facts": dict(facts or {}),
        "random_states": list(states),
        "tier": tier,
        "landmark": landmark,
    }
    return "iteration", header, (ids, rows, *(np.ascontiguousarray(state, dtype=np.uint8) for state in states.values()))


def facts_end(
    incident: int,
    firings: Sequence[Firing] = (),
    blind: Sequence[Blind] = (),
    *,
    trigger: Firing | None = None,
) -> Outgoing:
    """All iterations of the incident were sent: the facts file is written and committed now.

    Args:
        incident: whose.
        firings: further ones.
        blind: what was not recorded.
        trigger: the primary firing, where a graver one joined after ``open``.
    """
    header = {
        "incident": incident,
        "trigger": None if trigger is None else firing_to_json(trigger),
        "firings": [firing_to_json(firing) for firing in firings],
        "blind": [list(row) for row in blind],
    }
    return "facts_end", header, ()


def payload(incident: int, tick: int, pieces: Sequence[tuple[int, int, int, int]], *, last: bool) -> Outgoing:
    """Bytes of one tick lie in the staging arena, complete (the copies have finished).

    Args:
        incident: whose.
        tick: which iteration.
        pieces: (segment index, offset in the segment, staging offset, bytes); the bytes are a part of the segment's
            area of the tick's slot, in which a record lies at ``layout.offset_bytes``. Pieces of one area may come in
            any order and in several messages, and a record may span pieces.
        last: no more payload follows for this tick: what is missing now was not staged, whatever happens later.
    """
    rows = [list(piece) for piece in pieces]
    return "payload", {"incident": incident, "tick": tick, "pieces": rows, "last": last}, ()


def firing(incident: int, firings: Sequence[Firing]) -> Outgoing:
    """Firings after ``facts_end``; they go to the tensors file. Before ``facts_end`` they join the facts."""
    return "firing", {"incident": incident, "firings": [firing_to_json(f) for f in firings]}, ()


def end(incident: int, blind: Sequence[Blind] = ()) -> Outgoing:
    """No more payload: commit the tensors file and the index."""
    return "end", {"incident": incident, "blind": [list(row) for row in blind]}, ()


def discard(incident: int) -> Outgoing:
    """Forget an incident. What is committed stays."""
    return "discard", {"incident": incident}, ()
