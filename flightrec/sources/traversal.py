"""Finds the tensors inside a module's arguments and results, and says which of them can be copied.

Owns no state. Looks only at plain containers (dict, list, tuple, NamedTuple, dataclass) and never calls code of
theirs, so that looking has no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flightrec.sources.extract import is_quantized

MAX_DEPTH = 8
"""Containers nested deeper are not looked into."""

MAX_ITEMS = 1024
"""Entries of one container that are looked at: a list of a million numbers must cost nothing."""


class Observed(NamedTuple):
    """What ``observe`` found: one of ``plain`` and ``quantized``, or the reason for neither.

    Attributes:
        plain: detached plain tensor sharing the original's memory, or None.
        quantized: the quantized tensor itself (wrapper subclass), or None.
        reason: why the tensor cannot be recorded; empty for a tensor that has no data at all (fake tensors).
    """

    plain: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    reason: str = ""


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


def observe(tensor: torch.Tensor) -> Observed:
    """Decide how ``tensor`` can be recorded: as it is, as a quantized tensor, or not at all.

    Call it inside ``quiet``. The result shares the tensor's memory, has no autograd history, and must not outlive
    the hook. Never synchronises.
    """
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
        reason = unrecordable(tensor)
        return Observed(reason=reason) if reason else Observed(plain=tensor.detach())
    if isinstance(tensor, FakeTensor):
        return Observed()
    if is_lazy(tensor):
        return Observed(reason="lazy parameter without data yet")
    if _is_dtensor(tensor):
        return Observed(reason="DTensor: sharded tensors are not recorded in this version")
    if tensor.is_nested:
        return Observed(reason="nested tensor")
    if is_quantized(tensor):
        return Observed(quantized=tensor)
    if _has_own_memory(kind):
        plain = tensor.detach().as_subclass(torch.Tensor)
        reason = unrecordable(plain)
        return Observed(reason=reason) if reason else Observed(plain=plain)
    return Observed(reason=f"tensor subclass {kind.__module__}.{kind.__qualname__} is not known")


def unrecordable(tensor: torch.Tensor) -> str:
    """Reason why a tensor's memory cannot be copied as an array, or the empty text."""
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')} is not strided"
    if tensor.device.type == "meta":
        return "meta tensor without data"
    if tensor.is_complex():
        return f"complex dtype {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_quantized:
        return "torch.quantized dtype"
    return ""


def is_lazy(tensor: torch.Tensor) -> bool:
    """Say whether this is a parameter or buffer of a lazy module that has no data yet."""
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing torch.distributed for those who do not use it."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


def _has_own_memory(kind: type[torch.Tensor]) -> bool:
    """A subclass that only adds Python behaviour keeps its values in ordinary memory; a wrapper dispatches itself."""
    return kind.__torch_dispatch__ in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
