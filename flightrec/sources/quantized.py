"""``Quantized``: the plain way for users to hand in a quantized tensor of any library.

Owns nothing; holds the caller's tensors only as long as the caller keeps the object.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Quantized:
    """Codes with their scale, for ``recorder.record(..., quantized=Quantized(...))``.

    The tensors stay the caller's; they are copied when recorded. Nothing here synchronises.

    Attributes:
        data: the codes, in logical order: an FP8 dtype, or uint8 holding FP8 codes or two FP4 codes a byte (first in
            the low nibble).
        format: element format of the codes, a torch dtype name: ``float8_e4m3fn``, ``float8_e5m2``,
            ``float8_e4m3fnuz``, ``float8_e5m2fnuz``, ``float8_e8m0fnu`` or ``float4_e2m1fn_x2``.
        scale: float32; codes = value * scale (multiplies to encode). One element, broadcastable to the data, or one
            for each block (its shape divides the data's shape).
        scale_inv: value = codes * scale_inv (multiplies to decode); shaped like ``scale``; may be E8M0 or E4M3 codes
            in their dtype. If both are given, ``scale_inv`` is the one that decodes and ``scale`` is kept beside it.
        amax_history: any shape, kept as it is.
        columnwise: the same values quantized for the other direction of the product: a ``Quantized`` or any quantized
            tensor that flightrec knows.
    """

    data: torch.Tensor
    format: str
    scale: torch.Tensor | None = None
    scale_inv: torch.Tensor | None = None
    amax_history: torch.Tensor | None = None
    columnwise: object | None = None
