"""MXFP8: FP8 codes with a power of two (E8M0) for each 32 of them: x = code * 2^(scale_inv - 127).

Row-wise blocks run along the last axis, column-wise ones along the rows; both sides hold their codes in logical order.
Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightrec.codecs import scaled, sides
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError

SCHEME = "mxfp8"
SCALE_FORMAT = "float8_e8m0fnu"


def decode(side: Side) -> npt.NDArray[np.float32]:
    """The numbers of one side, float32.

    Needs ``data`` (FP8 codes) and ``scale_inv`` (uint8 E8M0 in rows and columns, padded or not) or
    ``swizzled_scale_inv`` (the same in the tensor cores' order, padded to tiles), and ``block_shape``.

    Raises:
        FormatError: something is missing, or the scales do not fit the blocks.
    """
    side.codes()
    if not side.block_shape:
        raise FormatError("MXFP8: block_shape is missing")
    for name in ("scale_inv", scaled.SWIZZLED):
        side = side.with_format(name, SCALE_FORMAT)
    values = sides.read_codes(side, None)
    if not values.size:
        return sides.in_shape(values, side)
    return sides.in_shape(scaled.scale_codes(values, side), side)
