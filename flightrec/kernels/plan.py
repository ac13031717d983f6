"""What a capture is to do and where its results go: the arguments that all implementations share.

Built once a layout by the ring, used at every record; plain data, no launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Which of a record's quantized parts mean what. Positions index ``parts``; -1 is none.

    Attributes:
        codes: the codes that the ``QUANTIZED_`` statistics describe.
        format: their element format.
        pairs: they are the high-precision tensor quantized element by element.
        scale: the scale that decodes them; without one there is no squared error, unless ``unscaled``.
        unscaled: the codes' own values are the dequantized ones.
        multiply_to_decode: the scale's direction; False divides.
        block_shape: elements that share a scale, one entry a dimension; empty for the ratio of the shapes.
        scales: (position, element format) of every scale component.
        inverse: the words that should be one over ``scale``'s, of the same shape.
        history: past amaxes of the tensor.
        tensor_scale: a second, float32 scale over all blocks or a row of them; it multiplies to decode, always.
        amax: the amax that the quantizer itself saw.
        scale_shape: (rows, columns) of ``scale`` when its words lie in the tensor cores' order; empty: as they are.
        scale_transposed: those are the rows and columns of its transpose.
    """

    codes: int = -1
    format: str = ""
    pairs: bool = False
    scale: int = -1
    unscaled: bool = False
    multiply_to_decode: bool = True
    block_shape: tuple[int, ...] = ()
    scales: tuple[tuple[int, str], ...] = ()
    inverse: int = -1
    history: int = -1
    tensor_scale: int = -1
    amax: int = -1
    scale_shape: tuple[int, ...] = ()
    scale_transposed: bool = False


@dataclass(slots=True)
class Destination:
    """Where one layout's records go; every tensor is a view of the ring's memory with one entry a slot, scrap last.

    Attributes:
        high_precision: ``[S + 1, *shape]`` of ``copy_dtype``, or None when its bytes are not kept.
        parts: the same for each quantized part.
        statistics: float64 ``[S + 1, C]``.
        stamp: int64 ``[S + 1]``, the tick that wrote the statistics.
        cache: an implementation's own views of the same memory, by slot.
    """

    high_precision: torch.Tensor | None
    parts: Sequence[torch.Tensor | None]
    statistics: torch.Tensor
    stamp: torch.Tensor
    cache: dict[int, Any] = field(default_factory=dict)
