"""Statistics of tensors that are large, or only look so: in pieces of bounded size, an expanded dimension once.

Temporaries of a kernel are as large as a piece, never as the tensor: a run that left little memory must not be taken
what is left. Pure functions on views; nothing waits for the device, and sizes are Python's integers, which do not
overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from flightrec.records import Statistic

Values = dict[int, torch.Tensor]
"""Statistics as 0-dimensional tensors, by column."""

PIECE = 1 << 26
"""Elements that are looked at in one go."""


def is_expanded(x: torch.Tensor) -> bool:
    """Whether a dimension of ``x`` repeats one element: its logical size says nothing about its memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def distinct(
    x: torch.Tensor, valid_rows: int | torch.Tensor | None
) -> tuple[torch.Tensor, int | torch.Tensor | None, int | torch.Tensor]:
    """``x`` with one entry of each expanded dimension, the ``valid_rows`` still to apply, and how often it counts."""
    if not x.dim():
        return x, None, 1
    if isinstance(valid_rows, int):
        x, valid_rows = x.narrow(0, 0, min(max(valid_rows, 0), x.shape[0])), None
    copies: int | torch.Tensor = 1
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            if dim == 0 and valid_rows is not None:
                copies, valid_rows = valid_rows.reshape(()).clamp(0, size), None
            else:
                copies = copies * size
            x = x.narrow(dim, 0, 1)
    return x, valid_rows, copies


def pieces(
    x: torch.Tensor, valid_rows: int | torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, int | torch.Tensor | None]]:
    """Views of at most ``PIECE`` elements that make up ``x``, and the valid rows of each."""
    if x.numel() <= PIECE:
        yield x, valid_rows
        return
    dim = max(range(x.dim()), key=lambda at: x.shape[at])
    step = max(1, x.shape[dim] * PIECE // x.numel())
    for start in range(0, x.shape[dim], step):
        rows = valid_rows - start if dim == 0 and valid_rows is not None else valid_rows
        yield from pieces(x.narrow(dim, start, min(step, x.shape[dim] - start)), rows)


def merged(one: Values, two: Values) -> Values:
    """Statistics of two pieces as one."""
    merged = {statistic: one[statistic] + two[statistic] for statistic in one.keys() - _NOT_SUMMED}
    for statistic in one.keys() & _NOT_SUMMED:
        merged[statistic] = torch.fmax(one[statistic], two[statistic])
    return merged


_NOT_SUMMED = frozenset({Statistic.AMAX, Statistic.QUANTIZED_LARGEST})


def repeated(values: Values, copies: int | torch.Tensor) -> Values:
    """Statistics of a tensor that is there ``copies`` times."""
    repeated = {key: value if key in _NOT_SUMMED else value * copies for key, value in values.items()}
    if isinstance(copies, torch.Tensor) and Statistic.AMAX in repeated:
        repeated[Statistic.AMAX] = torch.where(copies > 0, repeated[Statistic.AMAX], math.nan)
    return repeated


def valid_region(
    x: torch.Tensor, valid_rows: int | torch.Tensor | None, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Rows ``[0, n)`` of ``x``, and how many elements were zeroed instead of cut off (a device-side ``n``).

    ``rows`` is the number of rows that ``n`` counts, where ``x`` spreads each over several rows of its own.
    """
    if valid_rows is None or x.dim() == 0:
        return x, 0
    own = x.shape[0]
    ratio = own // rows if rows else 1
    if isinstance(valid_rows, int):
        return x.narrow(0, 0, min(max(valid_rows * ratio, 0), own)), 0
    count = (valid_rows.reshape(()) * ratio).clamp(0, own)
    inside = torch.arange(own, device=x.device) < count
    region = torch.where(inside.reshape(-1, *([1] * (x.dim() - 1))), x, 0)
    return region, (own - count) * (x.numel() // own if own else 0)
