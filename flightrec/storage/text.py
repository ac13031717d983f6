r"""Text and metadata that HDF5 would refuse or cut: NUL, lone surrogates, None, huge integers, more than 64 KiB.

Text goes to variable-length UTF-8 strings. A text that HDF5 cannot hold is escaped (``\uXXXX`` for NUL, lone
surrogates and the backslash) and its dataset carries ``escaped = 1``; attributes are named in the attribute
``escaped`` beside them. Structured values become JSON text. Owns no state but ``TextTable``'s own list.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from flightrec.storage import guard

_ESCAPED = "escaped"
_UNSAFE = re.compile("[\x00\ud800-\udfff]")
_TO_ESCAPE = re.compile("[\x00\ud800-\udfff\\\\]")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")
_MAX_DEPTH = 32
_MAX_AXES = 64
_MAX_READ_DEPTH = 3 * _MAX_DEPTH
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)
_NUMBERS = re.compile("bool|u?int(8|16|32|64)|b?float(16|32|64|128)")
_MAX_FOREIGN_CHARACTERS = 10_000
_STRING = h5py.string_dtype("utf-8")


def needs_escape(text: str) -> bool:
    """Say whether HDF5 could not give this text back as it is."""
    return _UNSAFE.search(text) is not None


def escape_text(text: str) -> str:
    r"""Replace NUL, lone surrogates and backslashes by ``\uXXXX``."""
    return _TO_ESCAPE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def unescape_text(text: str) -> str:
    """Reverse ``escape_text``."""
    return _ESCAPE.sub(lambda found: chr(int(found.group(1), 16)), text)


class TextTable:
    """Collects the texts of one file for its ``/names``; equal texts share a row, row 0 is the empty text."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """Give the row of a text."""
        return self._ids.setdefault(text, len(self._ids))

    def add_json(self, value: Any) -> int:
        """Give the row of a value's JSON text."""
        return self.add(to_json_text(value))

    def write(self, parent: h5py.Group, name: str = "names") -> None:
        """Write the table as a one-dimensional dataset of strings."""
        write_texts(parent, name, list(self._ids))


def write_texts(parent: h5py.Group, name: str, texts: Sequence[str]) -> h5py.Dataset:
    """Write texts of any content as a one-dimensional dataset of strings, and give it."""
    escaped = any(map(needs_escape, texts))
    if escaped:
        texts = [escape_text(text) for text in texts]
    dataset = parent.create_dataset(name, data=np.array(texts, dtype=object), dtype=_STRING)
    if escaped:
        dataset.attrs[_ESCAPED] = np.uint8(1)
    return dataset


def read_text_table(parent: h5py.Group, name: str = "names") -> list[str]:
    """Read what ``TextTable.write`` or ``write_texts`` wrote."""
    dataset = guard.need(parent, name)
    texts = guard.read_texts(dataset)
    if dataset.attrs.get(_ESCAPED, 0):
        return [unescape_text(text) for text in texts]
    return texts


def write_text(parent: h5py.Group, name: str, text: str) -> None:
    """Write a text of any length and content as a scalar string dataset."""
    escaped = needs_escape(text)
    dataset = parent.create_dataset(name, data=escape_text(text) if escaped else text, dtype=_STRING)
    if escaped:
        dataset.attrs[_ESCAPED] = np.uint8(1)


def read_text(parent: h5py.Group, name: str) -> str:
    """Read what ``write_text`` wrote."""
    dataset = guard.need(parent, name)
    (text,) = guard.read_texts(dataset)
    return unescape_text(text) if dataset.attrs.get(_ESCAPED, 0) else text


def write_attributes(target: h5py.Group, values: Mapping[str, Any]) -> None:
    """Set attributes: numbers as numpy scalars, text as strings of any content."""
    escaped = []
    for name, value in values.items():
        if isinstance(value, str):
            if needs_escape(value):
                escaped.append(name)
                value = escape_text(value)
            target.attrs.create(name, value, dtype=_STRING)
        else:
            target.attrs[name] = value
    if escaped:
        target.attrs.create(_ESCAPED, ",".join(escaped), dtype=_STRING)


def read_attribute(target: h5py.Group, name: str) -> Any:
    """Read one attribute that ``write_attributes`` set: text as str, numbers as Python numbers."""
    if target.attrs.get_id(name).get_storage_size() > guard.MAX_ATTRIBUTE_BYTES:
        raise ValueError(f"attribute {name} is longer than {guard.MAX_ATTRIBUTE_BYTES} bytes")
    value = target.attrs[name]
    if isinstance(value, bytes):
        value = guard.decoded(value)
    if isinstance(value, str):
        return unescape_text(value) if name in str(target.attrs.get(_ESCAPED, "")).split(",") else value
    return value.item() if isinstance(value, np.generic) else value


def to_json_text(value: Any) -> str:
    """Give any value as strict ASCII JSON; never fails.

    What JSON lacks is an object with one ``$`` key: ``{"$float": "nan"}``, ``{"$bytes": "00ff"}``,
    ``{"$array": [...], "dtype": "float32"}``; keys that begin with ``$`` get one more. Tuples and sets become lists,
    keys become text, objects of unknown types become their ``str``.
    """
    return json.dumps(_plain(value, 0), ensure_ascii=True, allow_nan=False, separators=(", ", ": "))


def from_json_text(text: str) -> Any:
    """Reverse ``to_json_text`` (tuples come back as lists); empty text gives None.

    Raises:
        ValueError: no JSON, deeper than ``to_json_text`` writes it, or a ``$`` object that it does not write.
    """
    if not text:
        return None
    if text.count("[") + text.count("{") > _MAX_READ_DEPTH and _depth(text) > _MAX_READ_DEPTH:
        raise ValueError(f"is nested deeper than {_MAX_READ_DEPTH}")
    return json.loads(text, object_hook=_revive)


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if depth > _MAX_DEPTH:
        return _foreign(value)
    if isinstance(value, np.generic):
        item = value.item()
        return _foreign(value) if isinstance(item, np.generic) else _plain(item, depth + 1)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _plain(value.tolist(), 0), "dtype": str(value.dtype)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Mapping):
        return {_key_text(key): _plain(item, depth + 1) for key, item in _items(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return _foreign(value)


def _items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    try:
        return list(value.items())
    except Exception as error:  # a mapping of a foreign class may do anything
        return [("unreadable", f"{type(value).__name__}: {error}")]


def _key_text(key: Any) -> str:
    text = key if isinstance(key, str) else _foreign(key)
    return "$" + text if text.startswith("$") else text


def _foreign(value: Any) -> str:
    try:
        return str(value)[:_MAX_FOREIGN_CHARACTERS]
    except Exception:  # the value is the user's; one that cannot be shown must not lose the others
        return f"<{type(value).__module__}.{type(value).__qualname__} without text>"


def _depth(text: str) -> int:
    """How deep brackets are nested, those in strings left out."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "[{" else -1 if bracket in "]}" else 0
        deepest = max(deepest, depth)
    return deepest


def _revive(found: dict[str, Any]) -> Any:
    if "$float" in found:
        return float(found["$float"])
    if "$bytes" in found:
        return bytes.fromhex(found["$bytes"])
    if "$array" in found:
        if _NUMBERS.fullmatch(str(found.get("dtype"))) is None:  # a text's dtype may claim any length
            raise ValueError(f"an array of {found.get('dtype')!r}")
        return np.array(found["$array"], dtype=found["dtype"])
    return {key[1:] if key.startswith("$$") else key: item for key, item in found.items()}


def sizes(value: Any) -> tuple[int, ...]:
    """A shape that was read from JSON: whole numbers, none negative (``ValueError`` for anything else)."""
    found = tuple(value)
    if len(found) > _MAX_AXES or not all(type(size) is int and 0 <= size < 1 << 62 for size in found):
        raise ValueError(f"a shape is {str(found)[:200]}")
    return found


def as_texts(values: Sequence[bytes]) -> list[str]:
    """Decode fixed-width ASCII columns."""
    return [value.decode("ascii") for value in values]
