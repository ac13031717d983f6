"""Finds the tensors inside a module's arguments and results.

Owns what it learned of classes. Looks only at plain containers (dict, list, tuple, NamedTuple, dataclass) and never
calls code of theirs, so that looking has no effect.
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


def walk(value: object, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Find (path, tensor) of every tensor in ``value``, in order; a bare tensor has the path given.

    Paths join dict keys, field names and positions with dots: ``aux.0``.
    """
    found: list[tuple[str, torch.Tensor]] = []
    _collect(value, path, 0, found)
    return found


def _collect(value: object, path: str, depth: int, found: list[tuple[str, torch.Tensor]]) -> None:
    kind = _kinds.get(type(value)) or _kind_of(type(value))
    if kind == _TENSOR:
        found.append((path, value))  # type: ignore[arg-type]
    elif kind == _CONTAINER and depth < MAX_DEPTH:
        for name, item in _items(value):
            if item is not None:
                _collect(item, f"{path}.{name}" if path else name, depth + 1, found)


def walk_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of a call's arguments.

    The only positional argument that holds tensors has the empty path, several have their positions, keyword
    arguments their names.
    """
    if len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs:
        yield "", args[0]
        return
    found = [(index, tensors) for index, value in enumerate(args) if (tensors := walk(value))]
    for index, tensors in found:
        base = "" if len(found) == 1 else str(index)
        for path, tensor in tensors:
            yield (f"{base}.{path}" if base and path else base or path), tensor
    for name, value in kwargs.items():
        if value is not None:
            yield from walk(value, name)


_TENSOR, _CONTAINER, _LEAF = 1, 2, 3
_MAX_KINDS = 4096
_kinds: dict[type, int] = {}
"""What values of a class are: asked of every argument of every module."""


def _kind_of(kind: type) -> int:
    if issubclass(kind, torch.Tensor):
        found = _TENSOR
    elif issubclass(kind, (dict, tuple, list)) or dataclasses.is_dataclass(kind):
        found = _CONTAINER
    else:
        found = _LEAF
    if len(_kinds) >= _MAX_KINDS:  # classes that are made on the way, without end
        _kinds.clear()
    _kinds[kind] = found
    return found


def _items(value: object) -> Iterator[tuple[str, Any]]:
    """Entries of a plain container, at most ``MAX_ITEMS``."""
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
    else:  # a dataclass
        attributes = getattr(value, "__dict__", None)
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            # Without a __dict__ the fields are slots, which run no code either.
            item = getattr(value, field.name, None) if attributes is None else attributes.get(field.name)
            yield field.name, item
