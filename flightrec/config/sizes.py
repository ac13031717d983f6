"""Sizes (``8 GiB``) and shares (``5%``) as a configuration writes them. Pure functions, no state."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

BYTES_OF_UNIT = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}
"""Units that a size may carry, binary and decimal. Upper and lower case matter."""

MIN_SIZE_BYTES = 4096
"""Smallest size that a configuration may ask for: ``memory: 8`` is a forgotten unit, not eight bytes."""

MAX_SIZE_BYTES = 2**62

_NUMBER = r"(?:\d+(?:\.\d+)?)"
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]+)")
_SHARE = re.compile(rf"({_NUMBER})\s*%")
_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": MIN_SIZE_BYTES, "description": "bytes"},
        {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*({'|'.join(BYTES_OF_UNIT)})\s*$", "examples": ["8 GiB"]},
    ]
}
_SHARE_SCHEMA = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*%\s*$", "examples": ["5%"]}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of something that is known only later, such as free device memory.

    Attributes:
        fraction: above 0, at most 1.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"expected a share above 0% and at most 100%, got {self.fraction * 100:g}%")

    def of(self, total_bytes: int) -> int:
        """Bytes that the share amounts to, rounded down."""
        return int(total_bytes * self.fraction)

    def __str__(self) -> str:
        return f"{self.fraction * 100:.12g}%"


def parse_size(value: Any) -> int:
    """Bytes of a size: an int, or a number with a unit (``8 GiB``, ``1.5TiB``, ``500 MB``).

    Raises:
        ValueError: no size, an unknown unit, or below ``MIN_SIZE_BYTES``.
    """
    expected = "expected a size such as 8 GiB, or a number of bytes"
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(expected)
        number, unit = match.groups()
        if unit not in BYTES_OF_UNIT:
            raise ValueError(f"{expected}; {_unit_hint(number, unit)}")
        num_bytes = int(Decimal(number) * BYTES_OF_UNIT[unit])
    else:
        raise ValueError(expected)
    if not MIN_SIZE_BYTES <= num_bytes <= MAX_SIZE_BYTES:
        hint = ""
        if isinstance(value, int) and 0 < value < MIN_SIZE_BYTES:
            hint = f"; a number without a unit is bytes, did you mean {value} GiB?"
        raise ValueError(f"expected a size from {format_size(MIN_SIZE_BYTES)} to {format_size(MAX_SIZE_BYTES)}{hint}")
    return num_bytes


def parse_share(value: Any) -> Share:
    """Share of a text such as ``5%``.

    Raises:
        ValueError: not a share, or not within 0% (excluded) and 100%.
    """
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a share such as 5%")
    return Share(float(Decimal(match[1]) / 100))


def parse_memory(value: Any) -> int | Share | None:
    """A size in bytes, a share, or None for what the recorder chooses.

    Raises:
        ValueError: none of the three.
    """
    if value is None or isinstance(value, Share):
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        return parse_share(value)
    try:
        return parse_size(value)
    except ValueError as error:
        message = str(error).replace("or a number of bytes", "a number of bytes, or a share such as 5%", 1)
        raise ValueError(message) from None


def parse_budget(value: Any) -> Share | Literal["none"]:
    """A share of a step such as ``1%``, or ``none``.

    Raises:
        ValueError: neither, or a share that is not within 0% (excluded) and 100%.
    """
    if isinstance(value, Share):
        return value
    if isinstance(value, str) and value.strip() == "none":
        return "none"
    if isinstance(value, str) and _SHARE.fullmatch(value.strip()):
        try:
            return parse_share(value)
        except ValueError:
            raise ValueError("expected a share of a step above 0% and at most 100%; none records everything") from None
    raise ValueError("expected none or a share of a step such as 1%")


def parse_optional_size(value: Any) -> int | None:
    """A size in bytes, or None.

    Raises:
        ValueError: neither.
    """
    return None if value is None else parse_size(value)


def format_size(num_bytes: int) -> str:
    """Size for people, three significant digits at most: ``8 GiB``, ``1.46 MiB``, ``12 B``."""
    unit = "B"
    for candidate in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(num_bytes) < BYTES_OF_UNIT[candidate]:
            break
        unit = candidate
    value = num_bytes / BYTES_OF_UNIT[unit]
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def exact_size(num_bytes: int) -> str | int:
    """Size that ``parse_size`` reads back exactly: the largest binary unit that divides it, else the bytes."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= BYTES_OF_UNIT[unit] and num_bytes % BYTES_OF_UNIT[unit] == 0:
            return f"{num_bytes // BYTES_OF_UNIT[unit]} {unit}"
    return num_bytes


def _unit_hint(number: str, unit: str) -> str:
    folded = unit.lower().removesuffix("b").removesuffix("i")
    for known in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if folded == known[0].lower():
            return f"unknown unit {unit!r}, did you mean {number} {known}?"
    return f"unknown unit {unit!r}, known are {', '.join(BYTES_OF_UNIT)}"


def _dump(value: int | Share | str | None) -> str | int | None:
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, Share) else exact_size(value)


def parse_some_memory(value: Any) -> int | Share:
    """A size in bytes, or a share.

    Raises:
        ValueError: neither.
    """
    memory = parse_memory(value)
    if memory is None:
        raise ValueError("expected a size such as 256 MiB, or a share such as 5%")
    return memory


_NULL_SCHEMA = {"type": "null"}

OptionalSize = Annotated[
    int | None,
    PlainValidator(parse_optional_size),
    PlainSerializer(_dump),
    WithJsonSchema({"anyOf": [*_SIZE_SCHEMA["anyOf"], _NULL_SCHEMA]}),
]
"""Field type: bytes, or None."""

Memory = Annotated[
    int | Share,
    PlainValidator(parse_some_memory),
    PlainSerializer(_dump),
    WithJsonSchema({"anyOf": [*_SIZE_SCHEMA["anyOf"], _SHARE_SCHEMA]}),
]
"""Field type: bytes, or a ``Share`` of what is free."""

MemoryLimit = Annotated[
    int | Share | None,
    PlainValidator(parse_memory),
    PlainSerializer(_dump),
    WithJsonSchema({"anyOf": [*_SIZE_SCHEMA["anyOf"], _SHARE_SCHEMA, _NULL_SCHEMA]}),
]
"""Field type: bytes, a ``Share`` of what is free, or None for what the recorder chooses."""

Budget = Annotated[
    Share | Literal["none"],
    PlainValidator(parse_budget),
    PlainSerializer(_dump),
    WithJsonSchema({"anyOf": [{"const": "none"}, _SHARE_SCHEMA]}),
]
"""Field type: a ``Share`` of a step, or ``none``."""
