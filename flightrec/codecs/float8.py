"""FP8 with one scale a tensor (delayed and current scaling): x = code * scale_inv, or code / scale.

Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightrec.codecs import scaled, sides
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError

SCHEME = "float8"


def decode(side: Side) -> npt.NDArray[np.float32]:
    """The numbers of one side, float32.

    Needs ``data`` (FP8 codes in logical order) and ``scale_inv`` (one float32), or ``scale`` where that is the
    direction.

    Raises:
        FormatError: one is missing, the codes are no FP8, or there are several scales.
    """
    side.codes()
    if not side.format.startswith("float8_"):
        raise FormatError(f"FP8 with one scale a tensor: the codes' format is {side.format!r}, expected FP8")
    values = sides.read_codes(side, None)
    scale = scaled.block_scales(side, values.shape)
    if scale.size != 1:
        raise FormatError(f"FP8 with one scale a tensor: {side.full_name('scale_inv')!r} holds {scale.size} scales")
    return sides.in_shape(scaled.scale_codes(values, side), side)
