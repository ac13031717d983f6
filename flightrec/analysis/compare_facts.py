"""What differs between two pieces of plain data (configurations, versions, environments, an iteration's facts).

Pure functions, no state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from flightrec.storage import files, text
from flightrec.storage.rank import Iteration, Rank

_ABSENT = None
_NOISE = ("pid", "stack", "exception", "gpu.temperature_celsius")
"""What differs between any two runs, or any two moments of one."""
_CLOCKS = ("step_time_s", "data_time_s", "tick", "tier", "landmark", "attempt", "iteration")


class FactDifference(NamedTuple):
    """One entry that is not the same: where it stands, its value in A and in B; None where one has none."""

    path: str
    a: Any
    b: Any


def differences(a: Any, b: Any, path: str = "") -> list[FactDifference]:
    """Walk two trees of mappings and lists; leaves are compared as they are, NaN equals NaN."""
    return list(_walk(a, b, path))


def _walk(a: Any, b: Any, path: str) -> Iterator[FactDifference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _walk(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{path}.{key}" if path else str(key))
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _walk(one, other, f"{path}[{index}]")
    elif not _same(a, b):
        yield FactDifference(path, a, b)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return (type(a) is type(b) and bool(a == b)) or (_is_number(a) and _is_number(b) and bool(a == b))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def configurations(a: Rank, b: Rank) -> list[FactDifference]:
    """What differs in the configurations of two runs; as text where one is no YAML."""
    if a.config_text == b.config_text:
        return []
    try:
        trees = [yaml.safe_load(rank.config_text) for rank in (a, b)]
    except (yaml.YAMLError, RecursionError):
        return differences(a.config_text.splitlines(), b.config_text.splitlines())
    return differences(*trees)


def surroundings(a: Rank, b: Rank) -> list[FactDifference]:
    """What differs in machine and program: host, versions, environment; process numbers and the like left out."""
    one, other = ({"host": str(rank.attribute("host", "")), **rank.environment} for rank in (a, b))
    return [found for found in differences(one, other) if not found.path.startswith(_NOISE)]


def iterations(a: Iteration, b: Iteration) -> list[FactDifference]:
    """What differs in loss, metrics, optimizer and data of two iterations; times and numbers left out."""
    one, other = ({name: it for name, it in vars(entry).items() if name not in _CLOCKS} for entry in (a, b))
    return differences(one, other)


def random_states(a: Rank, b: Rank, time_a: tuple[int, int], time_b: tuple[int, int]) -> list[FactDifference]:
    """Which random number generators were in other states when the iteration began."""
    states = a.random_states(*time_a), b.random_states(*time_b)
    found = []
    for name in sorted({*states[0], *states[1]}):
        one, other = (state.get(name) for state in states)
        if one is None or other is None or one.tobytes() != other.tobytes():
            words = [None if state is None else f"crc32 {zlib.crc32(state.tobytes()):08x}" for state in (one, other)]
            found.append(FactDifference(f"rng.{name}", *words))
    return found


def versions(a: Rank, b: Rank) -> list[FactDifference]:
    """What differs in the versions of flightrec, torch and the others."""
    told = []
    for rank in (a, b):
        with files.reading(rank.facts_path, "attribute versions"):
            told.append(text.from_json_text(str(rank.attribute("versions", ""))) or {})
    return differences(told[0], told[1])
