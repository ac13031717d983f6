"""Turns what analysis found into JSON data: numbers that JSON lacks become texts. Pure functions, no state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from flightrec.records import Firing, Key

Document = dict[str, Any]

_PLAIN = frozenset({str, int, bool, type(None)})
_NO_NUMBER = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


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
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NO_NUMBER[str(value)]
    if isinstance(value, Key):
        return key_of(value)
    if kind is dict or isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (int, str)):
        return value
    if isinstance(value, Iterable):
        return [plain(entry) for entry in value]
    return str(value)
