"""NVFP4: FP4 codes, two a byte, with an E4M3 scale for each 16 and a float32 one over a tensor or a row.

x = code * (scale_inv * amax * 1 / (6 * 448)), in float32 and in this order, as Transformer Engine's kernel rounds;
with ``e4m3_max`` 256 (4over6) it stands in place of 448. The column-wise codes are packed along the rows, so they are
held transposed, and may be those of Hadamard-transformed values. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightrec.codecs import scaled, sides
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError

SCHEME = "nvfp4"
SCALE_FORMAT = "float8_e4m3fn"
HADAMARD_SIZE = 16
_FP4_MAX = 6.0


def decode(side: Side) -> npt.NDArray[np.float32]:
    """The numbers of one side, float32.

    Needs ``data`` (packed FP4), ``scale_inv`` (uint8 E4M3 in rows and columns, padded or not) or ``swizzled_scale_inv``
    (in the tensor cores' order), and ``amax`` (float32, one, or one for each row that is read along its last axis), or
    else ``tensor_scale_inv`` (float32, likewise). Metadata: ``transposed``, ``e4m3_max`` (448 if it is absent).

    Returns:
        The quantized values. With metadata ``rht`` those are Hadamard-transformed: see ``undo_hadamard``.

    Raises:
        FormatError: something is missing, or shapes do not fit.
    """
    side.codes()
    if not side.block_shape:
        raise FormatError("NVFP4: block_shape is missing")
    for name in ("scale_inv", scaled.SWIZZLED):
        side = side.with_format(name, SCALE_FORMAT)
    values = sides.read_codes(side, None)
    if values.size:
        with np.errstate(all="ignore"):
            values = values * _scales(side, values.shape)
    if side.metadata.get("transposed"):
        values = np.moveaxis(values, 0, -1)
    return sides.in_shape(values, side)


def _scales(side: Side, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Both scales as one, in the shape of the codes."""
    blocks = scaled.expand_scale(scaled.block_scales(side, shape), shape, side.block_shape)
    if "amax" not in side.components:
        second = side.need("tensor_scale_inv", "NVFP4 has no amax and no scale over its blocks")
        return np.asarray(blocks * scaled.over_rows(second.astype(np.float32), shape))
    amax = scaled.over_rows(side.components["amax"].astype(np.float32), shape)
    e4m3_max = float(side.metadata.get("e4m3_max") or 448)
    return np.asarray(blocks * amax * np.float32(1.0 / (_FP4_MAX * e4m3_max)))


def undo_hadamard(values: npt.NDArray[np.float32], sign_mask: int) -> npt.NDArray[np.float32]:
    """Values before the random Hadamard transform, from what ``decode`` gives of a side with metadata ``rht``.

    The transform multiplied each 16 rows (along the first axis of the flattened ``[rows, columns]``) by a
    Hadamard matrix whose rows carry signs; it is orthogonal, so its transpose undoes it.

    Args:
        values: float32 [..., rows, columns]; all leading axes together a multiple of 16.
        sign_mask: metadata ``rht_sign_mask``: bit i set where row i of the matrix is negative.

    Returns:
        float32, in the same shape, up to float32 rounding.

    Raises:
        FormatError: the rows are no multiple of 16.
    """
    rows = int(np.prod(values.shape[:-1], dtype=np.int64))
    if values.ndim < 2 or rows % HADAMARD_SIZE:
        raise FormatError(f"a Hadamard transform of {HADAMARD_SIZE} rows does not fit values of shape {values.shape}")
    blocks = values.reshape(rows // HADAMARD_SIZE, HADAMARD_SIZE, values.shape[-1])
    undone = np.einsum("ij,bjc->bic", hadamard(sign_mask), blocks)
    return np.asarray(undone, dtype=np.float32).reshape(values.shape)


def hadamard(sign_mask: int) -> npt.NDArray[np.float32]:
    """The transform's matrix R, float32 [16, 16]: each 16 values x of a column become x @ R."""
    index = np.arange(HADAMARD_SIZE)
    parity = np.array([bin(number).count("1") & 1 for number in (index[:, None] & index).ravel()])
    matrix = np.where(parity.reshape(HADAMARD_SIZE, HADAMARD_SIZE), -0.25, 0.25)
    signs = np.where(sign_mask >> index & 1, -1.0, 1.0)
    return (signs[:, None] * matrix).astype(np.float32)
