"""Finds a model's blocks: the repeated parts whose borders are worth seeing in every iteration.

Pure functions over a model's structure; no tensor is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
BOUNDARY_TENSORS = ("output", "gradient")
"""What is recorded of a block in every iteration: what it hands on, and the gradient of that."""


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Qualified names of a model's blocks, in the order of ``named_modules``.

    Blocks are the children of an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` in which a class comes at
    least twice; only the outermost such containers count, so that the experts inside a block are none. Children without
    parameters (activation functions) are no blocks and do not count: their output stands beside their neighbour's.
    Without such a container the direct children of the model are its blocks, wrappers around a single child looked
    through; a model without children is its own block.

    Args:
        model: any module.
    """
    found = [name for name, _ in _outermost(model, "", set())]
    if found:
        return tuple(found)
    prefix, inner = _unwrapped(model)
    children = [_join(prefix, name) for name, child in inner.named_children() if _has_parameters(child)]
    return tuple(children) or (prefix,)


def _outermost(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    children = [(_join(name, child_name), child) for child_name, child in module.named_children()]
    if isinstance(module, CONTAINERS):
        blocks = [(child_name, child) for child_name, child in children if _has_parameters(child)]
        if any(count > 1 for count in Counter(type(child) for _, child in blocks).values()):
            yield from blocks
            return
    for child_name, child in children:
        yield from _outermost(child, child_name, seen)


def _unwrapped(model: nn.Module) -> tuple[str, nn.Module]:
    name = ""
    while True:
        children = list(model.named_children())
        if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
            return name, model
        name, model = _join(name, children[0][0]), children[0][1]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
