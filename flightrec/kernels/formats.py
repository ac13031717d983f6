"""Code formats as integers: what makes a code NaN, infinite, zero or saturated, and what it stands for.

Constants and pure functions: no state, no thread or stream of its own; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """One 4-, 6- or 8-bit element format, described by integer compares on its codes.

    Attributes:
        name: as in ``records.Component.format``.
        magnitude_mask: selects the bits without the sign.
        largest: magnitude bits of the largest finite value.
        infinity: magnitude bits of an infinity, or None.
        nan_mask: bits that tell a NaN.
        nan_first, nan_last: a code is NaN when its masked bits lie in this range; ``nan_first`` is None without NaN.
        zero_mask: a code is zero when its masked bits are 0; None where the format has no zero.
        dtype: torch dtype that converts to float32 exactly, or None (decoded by way of float16).
        largest_value: what ``largest`` decodes to.
        packed: two codes a byte, the first in the low nibble (bits 0 to 3).
        mantissa_bits: without a ``dtype``: bits below the exponent.
        exponent_bias: likewise.
    """

    name: str
    magnitude_mask: int
    largest: int
    infinity: int | None
    nan_mask: int
    nan_first: int | None
    nan_last: int
    zero_mask: int | None
    dtype: torch.dtype | None
    largest_value: float
    packed: bool = False
    mantissa_bits: int = 0
    exponent_bias: int = 0


_FORMATS = (
    CodeFormat("float8_e4m3fn", 0x7F, 0x7E, None, 0x7F, 0x7F, 0x7F, 0x7F, torch.float8_e4m3fn, 448.0),
    CodeFormat("float8_e5m2", 0x7F, 0x7B, 0x7C, 0x7F, 0x7D, 0x7F, 0x7F, torch.float8_e5m2, 57344.0),
    CodeFormat("float8_e4m3fnuz", 0x7F, 0x7F, None, 0xFF, 0x80, 0x80, 0xFF, torch.float8_e4m3fnuz, 240.0),
    CodeFormat("float8_e5m2fnuz", 0x7F, 0x7F, None, 0xFF, 0x80, 0x80, 0xFF, torch.float8_e5m2fnuz, 57344.0),
    CodeFormat("float8_e8m0fnu", 0xFF, 0xFE, None, 0xFF, 0xFF, 0xFF, None, torch.float8_e8m0fnu, 2.0**127),
    CodeFormat("float6_e2m3fn", 0x1F, 0x1F, None, 0x3F, None, 0, 0x1F, None, 7.5, mantissa_bits=3, exponent_bias=1),
    CodeFormat("float6_e3m2fn", 0x1F, 0x1F, None, 0x3F, None, 0, 0x1F, None, 28.0, mantissa_bits=2, exponent_bias=3),
    CodeFormat(
        "float4_e2m1fn_x2",
        0x07,
        0x07,
        None,
        0x0F,
        None,
        0,
        0x07,
        None,
        6.0,
        packed=True,
        mantissa_bits=1,
        exponent_bias=1,
    ),
)

CODE_FORMATS: dict[str, CodeFormat] = {code_format.name: code_format for code_format in _FORMATS}
"""The formats whose codes are judged by integer compares."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED_AS_IS = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex128,
    }
)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def copy_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of equal width that every copy kernel moves bit for bit."""
    return dtype if dtype in _COPIED_AS_IS else _BITS[dtype.itemsize]


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """``x`` viewed as ``copy_dtype(x.dtype)``, same shape and strides; lazy conjugates and negatives are resolved."""
    if x.is_conj():
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    wanted = copy_dtype(x.dtype)
    return x if x.dtype == wanted else x.view(wanted)


def decode(codes: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    """Codes as float32, exactly, without their scale; packed codes double the last dimension."""
    if code_format.dtype is not None:
        return codes.view(code_format.dtype).to(torch.float32)
    words = (unpack(codes) if code_format.packed else codes).to(torch.int16)
    magnitude, sign = code_format.magnitude_mask, code_format.magnitude_mask + 1
    bits = ((words & sign) << (16 - sign.bit_length())) | ((words & magnitude) << (10 - code_format.mantissa_bits))
    return bits.view(torch.float16).to(torch.float32) * 2.0 ** (15 - code_format.exponent_bias)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Two FP4 codes a byte as one a byte, the low nibble first; doubles the last dimension."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2) if packed.dim() else packed & 0xF


def is_nan(bits: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    """Which codes (uint8) are NaN, of a format that has one."""
    assert code_format.nan_first is not None
    masked = bits & code_format.nan_mask
    if code_format.nan_first == code_format.nan_last:
        return masked.eq(code_format.nan_last)
    return masked.ge(code_format.nan_first)  # a range ends at the largest masked code


def is_zero(bits: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    """Which codes (uint8) are zero."""
    if code_format.zero_mask is None:
        return torch.zeros_like(bits, dtype=torch.bool)
    return (bits & code_format.zero_mask).eq(0)
