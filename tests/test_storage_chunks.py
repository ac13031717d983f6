"""Pieces cover an array in order and are never larger than asked for."""

from __future__ import annotations

import numpy as np
import pytest

from flightrec.storage.chunks import pieces


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (5, 1, 2), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("limit", [1, 2, 4, 6, 100])
def test_pieces_in_order_are_the_array(shape: tuple[int, ...], limit: int) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = [np.asarray(array[place]).reshape(-1) for place in pieces(shape, limit)]
    assert all(1 <= piece.size <= limit for piece in found)
    assert [number for piece in found for number in piece.tolist()] == array.reshape(-1).tolist()
