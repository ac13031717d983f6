"""The order in which tensor cores read block scales: tiles of 128 rows by 4 columns, as cuBLAS documents it.

Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError

TILE_ROWS, TILE_COLUMNS = 128, 4


def unswizzle(stored: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
    """Bring scales from the tiles' order to rows and columns.

    Within a tile the scale of (row, column) lies at ``(row % 32) * 16 + (row // 32) * 4 + column``; the tiles follow
    each other along the columns, then along the rows.

    Args:
        stored: the scales, any shape; padded to whole tiles.
        rows: that are wanted: one for each row of the data that is read along its last axis.
        columns: that are wanted: one for each block of a row.

    Returns:
        [rows, columns], the padding left out.

    Raises:
        FormatError: the number of scales is not that of whole tiles.
    """
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    needed = down * across * TILE_ROWS * TILE_COLUMNS
    if stored.size != needed:
        raise FormatError(
            f"{stored.size} scales in the tensor cores' order, {rows} rows of {columns} need {down} x {across} tiles, "
            f"{needed} scales"
        )
    tiles = stored.reshape(down, across, 32, 4, TILE_COLUMNS)
    whole = np.transpose(tiles, (0, 3, 2, 1, 4)).reshape(down * TILE_ROWS, across * TILE_COLUMNS)
    return whole[:rows, :columns]
