"""What is wrong with a configuration, in words: problems, the error that carries them, pydantic's errors translated.

Pure functions, no state.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from flightrec.config.rules import LATER_KINDS, RULE_CLASSES
from flightrec.errors import ConfigError

Path = tuple["str | int", ...]

NOT_AVAILABLE: dict[Path, str] = {}
"""Keys of later versions, with what to do instead."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: keys and list positions down to the value, ``("triggers", 0, "factor")``; empty for the document.
        message: what was expected, what was found, what to do.
        at_key: whether the key itself is wrong, not its value.
        line: 1 for the first line, 0 when the configuration was not read from text.
        column: 1 for the first column, 0 when unknown.
    """

    path: Path
    message: str
    at_key: bool = False
    line: int = 0
    column: int = 0

    @property
    def dotted(self) -> str:
        """The path as people write it: ``triggers[0].factor``."""
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text

    def located(self, line: int, column: int) -> Problem:
        """The same problem at a position of the text."""
        return replace(self, line=line, column=column)

    def render(self, origin: str) -> str:
        """One line: ``file:line:column: key: message``."""
        place = f"{origin}:{self.line}:{self.column}" if self.line else origin
        return ": ".join(part for part in (place, self.dotted, self.message) if part)


class InvalidConfigError(ConfigError):
    """A configuration was refused.

    Attributes:
        problems: all that was found, in the order of the text where there is one.
        origin: file name, or ``configuration`` for one that did not come from a file.
    """

    def __init__(self, problems: Iterable[Problem], origin: str = "configuration") -> None:
        self.problems = tuple(problems)
        self.origin = origin
        lines = [problem.render(origin) for problem in self.problems]
        if len(lines) > 1:
            lines.insert(0, f"{origin} has {len(lines)} errors:")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.origin)


def problems_of(error: ValidationError, data: Any, models: Mapping[str, type[BaseModel]]) -> tuple[Problem, ...]:
    """Pydantic's errors as problems.

    Args:
        error: what validating ``data`` raised.
        data: the mapping that was validated.
        models: the model of each section, and of the whole under the empty name, to know their keys.
    """
    problems = (_problem(details, data, models) for details in error.errors(include_url=False))
    return tuple(dict.fromkeys(problems))


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that ``word`` was probably meant to be, or None."""
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def describe(value: Any) -> str:
    """A short text for a value that was found: its kind, and what it is."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, list(value)[:3]))}{', ...' * (len(value) > 3)}" if value else "{}"
    if isinstance(value, BaseModel):
        return f"a {type(value).__name__}"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    return _short(value)


def _short(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlist = short.maxtuple = 4
    return short.repr(value)


def _problem(details: Any, data: Any, models: Mapping[str, type[BaseModel]]) -> Problem:
    kind: str = details["type"]
    context: dict[str, Any] = details.get("ctx") or {}
    location: tuple[str | int, ...] = details["loc"]
    path = _clean_path(location, data)
    if kind == "combination":
        return Problem((*path, context["key"]), context["message"])
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(location, path, models), at_key=True)
    if kind == "union_tag_not_found":
        return Problem(path, f"missing key kind; known kinds: {', '.join(RULE_CLASSES)}")
    if kind == "union_tag_invalid":
        return Problem((*path, "kind"), _unknown_kind(str(context["tag"])))
    expected, semicolon, remedy = _expected(kind, context, details["msg"]).partition("; ")
    return Problem(path, f"{expected}, got {describe(details['input'])}{semicolon}{remedy}{_hint(details)}")


def _clean_path(location: Sequence[str | int], data: Any) -> Path:
    """Drop what pydantic adds (a rule's kind) and what the data have no place for (an entry of a one-text list)."""
    parts = list(location)
    if len(parts) > 2 and parts[0] == "triggers":
        del parts[2]
    path: list[str | int] = []
    for part in parts:
        if isinstance(part, int) and isinstance(data, str):
            break
        path.append(part)
        if isinstance(data, Mapping):
            data = data.get(part)
        else:
            is_entry = isinstance(part, int) and isinstance(data, Sequence) and part < len(data)
            data = data[part] if is_entry else None
    return tuple(path)


def _unknown_key(location: Path, path: Path, models: Mapping[str, type[BaseModel]]) -> str:
    key = str(path[-1])
    if (remedy := NOT_AVAILABLE.get(path)) is not None:
        return remedy
    section = str(location[0]) if len(location) > 1 else ""
    model = RULE_CLASSES[str(location[2])] if section == "triggers" else models[section]
    known = keys_of(model)
    elsewhere = [name for name, other in models.items() if name not in ("", section) and key in keys_of(other)]
    if not elsewhere and (close := nearest(key, known)) is not None:
        return f"unknown key, did you mean {close}? Known keys: {', '.join(known)}"
    place = f"unknown key, it belongs into {' or '.join(elsewhere)}. " if elsewhere else "unknown key. "
    return f"{place}Known keys: {', '.join(known)}"


def keys_of(model: type[BaseModel]) -> list[str]:
    """Keys of a model as a configuration file writes them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _unknown_kind(kind: str) -> str:
    known = ", ".join(RULE_CLASSES)
    if kind in LATER_KINDS:
        return f"the kind {kind} is not available in this version; available: {known}"
    close = nearest(kind, [*RULE_CLASSES, *LATER_KINDS])
    hint = ""
    if close is not None:
        hint = f", did you mean {close}{' (not available in this version)' if close in LATER_KINDS else ''}?"
    return f"expected one of {known}, got {_short(kind)}{hint}"


_EXPECTED = {
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "string_type": "expected a text",
    "bool_type": "expected true or false",
    "tuple_type": "expected a list",
    "frozen_set_type": "expected a list",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "unknown_word": "expected {expected}",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le}",
    "less_than": "expected less than {lt}",
    "too_short": "expected at least {min_length} entry",
    "too_long": "expected at most {max_length} entries",
    "missing": "missing key",
    "string_pattern_mismatch": "expected 1 to 64 letters, digits, - or _",
    "invalid_key": "expected a text as key",
}


def _expected(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "value_error":
        return str(context["error"])
    template = _EXPECTED.get(kind)
    if template is None:
        return message
    plain = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
    return template.format_map(plain).replace("'", "")


def _hint(details: Any) -> str:
    """What was probably meant, for a word that is not one of those known."""
    context = details.get("ctx") or {}
    value = details["input"]
    if not isinstance(value, str):
        return ""
    words = context.get("words") or re.findall(r"'([^']*)'", str(context.get("expected", "")))
    close = nearest(value, words) if words else None
    return f"; did you mean {close}?" if close else ""
