"""FP8 with a float32 scale for each block of 128 elements or 128 x 128: x = code * scale_inv.

Row-wise blocks run along the last axis, column-wise ones along the rows, which are all leading axes taken together.
Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightrec.codecs import scaled, sides
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError

SCHEME = "float8_block"


def decode(side: Side) -> npt.NDArray[np.float32]:
    """The numbers of one side, float32.

    Needs ``data`` (FP8 codes) and ``scale_inv`` (float32, one a block, padded or not), both in logical order, and
    ``block_shape`` in the codes' own dimensions. Codes may have their leading axes flattened.

    Raises:
        FormatError: something is missing, or the scales do not fit the blocks.
    """
    side.codes()
    if not side.block_shape:
        raise FormatError("FP8 in blocks: block_shape is missing")
    stored = side.need("scale_inv", "FP8 in blocks has no scales")
    if stored.dtype.kind != "f":
        raise FormatError(f"FP8 in blocks: {side.full_name('scale_inv')!r} is {stored.dtype}, expected float32")
    values = sides.read_codes(side, None)
    if not values.size:
        return sides.in_shape(values, side)
    return sides.in_shape(scaled.scale_codes(values, side), side)
