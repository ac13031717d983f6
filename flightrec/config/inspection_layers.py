"""The key ``layers`` of an nvdlfw_inspect section: what that package would stumble over, or match otherwise than meant.

Offline. Pure functions; no state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flightrec.config.problems import Path, Problem, describe, nearest

_KEYS = ("layer_name_regex_pattern", "layer_types", "layer_numbers", "exact_layer_names")
_EXAMPLE = "such as {layer_name_regex_pattern: .*fc1.*}"


def check_layers(path: Path, layers: Mapping[Any, Any], problems: list[Problem]) -> None:
    """Add what is wrong with the layers of a section that records.

    Args:
        path: of the mapping in the file.
        layers: that mapping.
        problems: where to add to.
    """
    for key in layers:
        if key not in _KEYS:
            close = nearest(str(key), _KEYS)
            hint = f", did you mean {close}?" if close else "."
            message = f"unknown key, which nvdlfw_inspect ignores{hint} Known keys: {', '.join(_KEYS)}"
            problems.append(Problem((*path, key), message, at_key=True))
    given = [key for key in _KEYS if layers.get(key) is not None]
    if not given and all(key in _KEYS for key in layers):
        problems.append(Problem(path, f"expected one of {', '.join(_KEYS)}, {_EXAMPLE}"))
    problems += [Problem((*path, key), wrong) for key in given if (wrong := _wrong(key, layers[key]))]


def _wrong(key: str, value: Any) -> str:
    """What nvdlfw_inspect could not use, or the empty text."""
    if key == "layer_name_regex_pattern":
        if not isinstance(value, str):
            return f"expected a regular expression as text, got {describe(value)}"
        try:
            re.compile(value)
        except re.error as error:
            return f"no regular expression: {error}; it is Python's, in which any layer is .*"
        return ""
    if key == "layer_numbers":
        if value == "all" or (isinstance(value, list) and all(_is_number(entry) for entry in value)):
            return ""
        return f"expected a list of numbers and spans such as [0, 4-7], or all, got {describe(value)}"
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ""
    if key == "layer_types" and value == "all":
        return ""
    return f"expected a list of texts, got {describe(value)}"


def _is_number(entry: object) -> bool:
    """Whether it is a layer's number, or a span of them."""
    if isinstance(entry, str):
        return entry == "all" or re.fullmatch(r"\s*\d+\s*-\s*\d+\s*", entry) is not None
    return isinstance(entry, int)
