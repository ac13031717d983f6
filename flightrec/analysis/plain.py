"""Turns what analysis found into JSON data: numbers that JSON lacks become texts. Pure functions, no state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from flightrec.records import Firing, Key

Document = dict[str, Any]


def key_of(key: Key) -> Document:
    """A key as JSON data."""
    return {
        "layer": key.layer,
        "tensor": key.tensor,
        "part": key.part,
        "microbatch": key.microbatch,
        "phase": key.phase.value,
        "call": key.call,
        "stage": key.stage.value,
    }


def firing_of(firing: Firing) -> Document:
    """A firing as JSON data."""
    return {
        "rule": firing.rule,
        "kind": firing.kind,
        "severity": firing.severity.value,
        "attempt": firing.attempt,
        "iteration": firing.iteration,
        "key": None if firing.key is None else key_of(firing.key),
        "value": plain(firing.value),
        "threshold": plain(firing.threshold),
        "message": firing.message,
    }


def plain(value: Any) -> Any:
    """Replace the numbers that JSON lacks and everything that is not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Key):
        return key_of(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Iterable):
        return [plain(entry) for entry in value]
    return str(value)
