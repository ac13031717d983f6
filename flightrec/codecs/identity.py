"""High-precision values where a quantized tensor could have been: ``data`` holds the numbers themselves.

Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightrec.codecs import sides
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError

SCHEME = "identity"


def decode(side: Side) -> npt.NDArray[np.float32]:
    """The numbers of one side, float32 (float64 is rounded).

    Raises:
        FormatError: ``data`` is missing, or is not floating point.
    """
    stored = side.codes()
    if stored.dtype.kind != "f" and not side.format.startswith(("bfloat16", "float")):
        raise FormatError(f"high-precision values: {side.full_name('data')!r} is {stored.dtype} {side.format!r}")
    return sides.in_shape(sides.read_codes(side, None), side)
