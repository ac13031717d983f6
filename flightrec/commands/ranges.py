"""Ranges of numbers as a user gives them: ``7``, ``10:20``, ``10:``, ``:20``, and several after commas. No state."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

FORM = "expected numbers and ranges, first and last included: 7, 10:20, 10:, :20, or several after commas"

_RANGE = re.compile(r"(-?\d+)|(-?\d+)?:(-?\d+)?", re.ASCII)

Ranges = list[list[int | None]]


def parse_ranges(texts: Sequence[str] | None, option: str) -> Ranges | None:
    """Give [first, last] of each range, both included, None for an open end.

    Args:
        texts: values of the option, each one range or several after commas; None or nothing for an option not given.
        option: its name, for the message.

    Raises:
        typer.BadParameter: something is no range, or ends before it begins.
    """
    found: Ranges = []
    for word in [word for text in texts or () for word in text.split(",")]:
        match = _RANGE.fullmatch(word.strip())
        if match is None or word.strip() == ":":
            raise typer.BadParameter(f"{FORM}; got {word!r}", param_hint=option)
        single, *ends = match.groups()
        first, last = [None if end is None else int(end) for end in ((single, single) if single else ends)]
        if first is not None and last is not None and first > last:
            raise typer.BadParameter(f"{word!r} ends before it begins; {FORM}", param_hint=option)
        found.append([first, last])
    return found or None
