"""Cuts an array into pieces of a bounded size, for readers that never hold it whole. Pure functions, no state."""

from __future__ import annotations

import math
from collections.abc import Iterator

Place = tuple["int | slice", ...]


def pieces(shape: tuple[int, ...], max_elements: int) -> Iterator[Place]:
    """Give indices that cover an array in C order, each of ``max_elements`` at most.

    Args:
        shape: of the array; an empty one is a scalar.
        max_elements: at least 1.

    Yields:
        Indices for ``array[index]``; none for an array without elements.
    """
    if not math.prod(shape):
        return
    axis = next((axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= max_elements), len(shape))
    if axis == len(shape):
        yield ()
        return
    step = max(1, max_elements // math.prod(shape[axis + 1 :]))
    yield from _under((), shape, axis, step)


def _under(place: Place, shape: tuple[int, ...], axis: int, step: int) -> Iterator[Place]:
    if len(place) == axis:
        for start in range(0, shape[axis], step):
            yield (*place, slice(start, min(start + step, shape[axis])))
        return
    for index in range(shape[len(place)]):
        yield from _under((*place, index), shape, axis, step)
