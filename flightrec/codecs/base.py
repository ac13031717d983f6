"""Element formats: how each is stored in a file and how its codes become numbers.

Arrays are stored as native little-endian numbers where HDF5 and numpy have the type, else as their bit patterns:
bfloat16 as uint16, FP8, FP4 and scale codes as uint8. Decoding is ``ml_dtypes``'; no tables of our own. Pure
functions on numpy arrays, no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError


@dataclass(frozen=True)
class ElementFormat:
    """One element format.

    Attributes:
        name: as in ``Component.format`` and in the attribute ``format`` of a dataset.
        storage: dtype of the stored array, little-endian.
        bits: of one element.
        codes: dtype that decodes the stored bit patterns, None where the stored array holds the numbers themselves.
        elements_per_item: elements in one stored item, 2 for packed FP4 (the first in the low nibble).
    """

    name: str
    storage: np.dtype[Any]
    bits: int
    codes: np.dtype[Any] | None = None
    elements_per_item: int = 1

    @property
    def is_native(self) -> bool:
        """Whether the stored array holds the numbers themselves."""
        return self.codes is None


def _native(name: str, storage: str) -> ElementFormat:
    dtype = np.dtype(storage)
    return ElementFormat(name, dtype, dtype.itemsize * 8)


def _codes(name: str, storage: str, decoder: Any, bits: int, elements_per_item: int = 1) -> ElementFormat:
    return ElementFormat(name, np.dtype(storage), bits, np.dtype(decoder), elements_per_item)


FORMATS: dict[str, ElementFormat] = {
    element.name: element
    for element in (
        _native("float64", "<f8"),
        _native("float32", "<f4"),
        _native("float16", "<f2"),
        _native("int64", "<i8"),
        _native("int32", "<i4"),
        _native("int16", "<i2"),
        _native("int8", "i1"),
        _native("uint64", "<u8"),
        _native("uint32", "<u4"),
        _native("uint16", "<u2"),
        _native("uint8", "u1"),
        _native("bool", "u1"),
        _native("complex32", "<u4"),
        _native("complex64", "<c8"),
        _native("complex128", "<c16"),
        _codes("bfloat16", "<u2", ml_dtypes.bfloat16, 16),
        _codes("float8_e4m3fn", "u1", ml_dtypes.float8_e4m3fn, 8),
        _codes("float8_e5m2", "u1", ml_dtypes.float8_e5m2, 8),
        _codes("float8_e4m3fnuz", "u1", ml_dtypes.float8_e4m3fnuz, 8),
        _codes("float8_e5m2fnuz", "u1", ml_dtypes.float8_e5m2fnuz, 8),
        _codes("float8_e8m0fnu", "u1", ml_dtypes.float8_e8m0fnu, 8),
        _codes("float6_e2m3fn", "u1", ml_dtypes.float6_e2m3fn, 6),
        _codes("float6_e3m2fn", "u1", ml_dtypes.float6_e3m2fn, 6),
        _codes("float4_e2m1fn_x2", "u1", ml_dtypes.float4_e2m1fn, 4, elements_per_item=2),
    )
}
"""Every format that this version decodes, by name."""


def element_format(name: str) -> ElementFormat:
    """Look a format up.

    Raises:
        FormatError: it is not known.
    """
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join(sorted(FORMATS))
        raise FormatError(f"element format {name!r} is not known; expected one of {known}") from None


def storage_dtype(name: str) -> np.dtype[Any]:
    """Give the numpy dtype of a stored array of this format (``FormatError`` when it is not known)."""
    return element_format(name).storage


def unpack_fp4(packed: npt.NDArray[np.uint8], num_columns: int | None = None) -> npt.NDArray[np.uint8]:
    """Unpack two FP4 codes a byte along the last axis, the low nibble first.

    Args:
        packed: uint8 [..., n].
        num_columns: logical length of the last axis, 2n or 2n - 1; 2n when None.

    Returns:
        uint8 [..., num_columns], codes 0 to 15.

    Raises:
        FormatError: no last axis, another dtype, or a length that the bytes cannot hold.
    """
    if packed.ndim == 0 or packed.dtype != np.uint8:
        raise FormatError(f"packed FP4 must be uint8 with one axis at least, got {packed.dtype} {packed.shape}")
    full = 2 * packed.shape[-1]
    num_columns = full if num_columns is None else num_columns
    if not max(full - 1, 0) <= num_columns <= full:
        raise FormatError(f"{packed.shape[-1]} bytes a row hold {full} FP4 codes, {num_columns} were asked for")
    codes = np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(*packed.shape[:-1], full)
    return codes[..., :num_columns]


def decode(codes: npt.NDArray[Any], name: str, *, num_columns: int | None = None) -> npt.NDArray[Any]:
    """Turn a stored array into numbers, exactly.

    Args:
        codes: the stored array, dtype ``storage_dtype(name)``, any shape.
        name: element format.
        num_columns: for packed FP4 the logical length of the last axis, when it is odd.

    Returns:
        float32 for bfloat16, float16, FP8, FP4 and scale codes; complex64 for complex32; float64, integers, booleans
        (as bool) and other complex numbers as they are. NaN payloads of bfloat16 are kept.

    Raises:
        FormatError: unknown format, or an array of another dtype.
    """
    element = element_format(name)
    codes = np.asarray(codes)
    if codes.dtype != element.storage:
        raise FormatError(f"format {name} is stored as {element.storage}, got an array of {codes.dtype}")
    if element.codes is None:
        if name == "bool":
            return np.asarray(codes != 0)
        if name == "complex32":  # two float16: the real part in the low half
            halves = np.ascontiguousarray(codes).view("<f2").astype(np.float32)
            return np.asarray(halves.view(np.complex64).reshape(codes.shape))
        return codes.astype(np.float32) if name == "float16" else codes
    if name == "bfloat16":  # a shift keeps NaN payloads, which a conversion need not
        return np.asarray((codes.astype(np.uint32) << 16).view(np.float32))
    if element.elements_per_item == 2:
        codes = unpack_fp4(codes, num_columns)
    values = np.ascontiguousarray(codes).view(element.codes)
    return np.asarray(values, dtype=np.float32).reshape(codes.shape)
