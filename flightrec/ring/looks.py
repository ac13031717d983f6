"""What the last record of a key looked like: tells in a few comparisons that the next one has the same layout.

Host bookkeeping under the ring's lock; holds no tensor. What it says must be what ``Registry.find`` would say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts

if TYPE_CHECKING:
    from flightrec.ring.registry import Placed

Looks = tuple[torch.Size, torch.dtype, torch.device, torch.layout, bool, int]


def looks_of(tensor: torch.Tensor) -> Looks:
    """What of a tensor decides about its layout; strides do not."""
    index = tensor.get_device() if tensor.is_cuda else -1
    return (tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.is_cuda, index)


def looks_like(tensor: torch.Tensor, looks: Looks) -> bool:
    """Whether ``looks_of`` would give the same."""
    if tensor.shape != looks[0] or tensor.dtype is not looks[1] or tensor.layout is not looks[3]:
        return False
    if looks[4]:  # comparing two device objects takes longer than all the rest
        return tensor.is_cuda and tensor.get_device() == looks[5]
    return tensor.device == looks[2]


class Latest:
    """The arguments of a key's latest record as far as its layout depends on them, and what was found for them.

    Attributes:
        placed: what was found.
    """

    __slots__ = ("_formats", "_info", "_keep", "_left_out", "_pair", "_parts", "_template", "_tensor", "placed")

    def __init__(
        self,
        placed: Placed,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        left_out: str,
    ) -> None:
        self.placed = placed
        self._keep, self._left_out = keep, left_out
        self._tensor = None if high_precision is None else looks_of(high_precision)
        self._info: QuantizerInfo | None = None
        if quantized is not None:
            self._info, self._pair, self._template = quantized.info, quantized.pair_codes, quantized.template
            self._formats = dict(quantized.formats)
            self._parts = [(name, looks_of(tensor)) for name, tensor in quantized.components.items()]

    def fits(
        self,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        left_out: str,
    ) -> bool:
        """Whether a record with these arguments has the same layout; a no only means that it must be looked for."""
        if keep is not self._keep or left_out != self._left_out:
            return False
        if high_precision is None:
            if self._tensor is not None:
                return False
        elif self._tensor is None or not looks_like(high_precision, self._tensor):
            return False
        if quantized is None:
            return self._info is None
        if quantized.info is not self._info:
            return False
        if quantized.template is not None and quantized.template is self._template:
            return True
        return self._fits_parts(quantized)

    def _fits_parts(self, quantized: QuantizedParts) -> bool:
        if quantized.pair_codes != self._pair or quantized.formats != self._formats:
            return False
        if len(quantized.components) != len(self._parts):
            return False
        for (name, tensor), (known, looks) in zip(quantized.components.items(), self._parts, strict=True):
            if name != known or not looks_like(tensor, looks):
                return False
        self._template = quantized.template
        return True
