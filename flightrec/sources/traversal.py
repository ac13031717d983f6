"""Finds the tensors inside a module's arguments and results.

Owns no state. Looks only at plain containers (dict, list, tuple, NamedTuple, dataclass) and never calls code of
theirs, so that looking has no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

MAX_DEPTH = 8
"""Containers nested deeper are not looked into."""

MAX_ITEMS = 1024
"""Entries of one container that are looked at: a list of a million numbers must cost nothing."""


def walk(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor in ``value``, in order; a bare tensor has the path given.

    Paths join dict keys, field names and positions with dots: ``aux.0``.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth >= MAX_DEPTH:
        return
    for name, item in _items(value):
        if item is not None and not isinstance(item, _LEAVES):
            yield from walk(item, f"{path}.{name}" if path else name, depth + 1)


def walk_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of a call's arguments.

    The only positional argument that holds tensors has the empty path, several have their positions, keyword
    arguments their names.
    """
    if len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs:
        yield "", args[0]
        return
    found = [(index, list(walk(value))) for index, value in enumerate(args)]
    found = [(index, tensors) for index, tensors in found if tensors]
    for index, tensors in found:
        base = "" if len(found) == 1 else str(index)
        for path, tensor in tensors:
            yield (f"{base}.{path}" if base and path else base or path), tensor
    for name, value in kwargs.items():
        yield from walk(value, name)


_LEAVES = (str, bytes, int, float, complex, bool)


def _items(value: object) -> Iterator[tuple[str, Any]]:
    """Entries of a plain container, at most ``MAX_ITEMS``; nothing for anything else."""
    if isinstance(value, dict):
        for number, (key, item) in enumerate(dict.items(value)):
            if number >= MAX_ITEMS:
                return
            yield str(key), item
    elif isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        for number, item in enumerate(tuple.__iter__(value)):
            if number >= MAX_ITEMS:
                return
            yield (fields[number] if fields else str(number)), item
    elif isinstance(value, list):
        for number, item in enumerate(list.__iter__(value)):
            if number >= MAX_ITEMS:
                return
            yield str(number), item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        attributes = getattr(value, "__dict__", None)
        for field in dataclasses.fields(value):
            # Without a __dict__ the fields are slots, which run no code either.
            item = getattr(value, field.name, None) if attributes is None else attributes.get(field.name)
            yield field.name, item
