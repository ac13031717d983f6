"""Whether a tensor's memory may be read: looks at sizes and strides only, never at the data.

Sharded training frees the memory of parameters while their tensor objects live on; reading one would end the process.
Pure functions; no synchronisation, no allocation.
"""

from __future__ import annotations

import torch

FREED = "its memory is freed (a sharded parameter or gradient between uses)"
"""Reason for a tensor that has no memory at the moment; it may have some the next time."""

LARGE_BYTES = 64 << 20
MAX_OVERLAP = 4
"""A view beyond ``LARGE_BYTES`` may be this many times as large as its memory (dimensions of stride 0 apart)."""


def why_unreadable(tensor: torch.Tensor) -> str:
    """Reason why a strided tensor's elements cannot or should not be read, or the empty text.

    Dimensions of stride 0 are no reason: their statistics need one element only. Costs about a microsecond.
    """
    numel = tensor.numel()
    if numel == 0:
        return ""
    available = tensor.untyped_storage().nbytes()
    itemsize = tensor.element_size()
    if tensor.is_contiguous():
        needed = tensor.storage_offset() + numel
    else:
        needed = tensor.storage_offset() + 1
        needed += sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if needed * itemsize > available:
        return FREED if available == 0 else f"its memory holds {available} bytes of the {needed * itemsize} it needs"
    if numel * itemsize > LARGE_BYTES:
        distinct = distinct_elements(tensor) * itemsize
        if distinct > LARGE_BYTES and distinct > MAX_OVERLAP * available:
            return f"an overlapping view of {distinct} bytes over {available} bytes of memory"
    return ""


def distinct_elements(tensor: torch.Tensor) -> int:
    """Elements that a tensor has when each dimension of stride 0 counts once."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride or not size else 1
    return distinct


def is_expanded_element(tensor: torch.Tensor) -> bool:
    """Say whether a tensor of several elements is one element of memory, expanded."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return tensor.numel() > 1 and distinct_elements(tensor) == 1
