from __future__ import annotations

import numpy as np
import pytest
from format_contract import swizzled

from flightrec.codecs import swizzle
from flightrec.errors import FormatError


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 5), (256, 12), (384, 3)])
def test_scales_come_back_from_where_they_are_documented_to_lie(rows: int, columns: int) -> None:
    padded = np.arange(-(-rows // 128) * 128 * (-(-columns // 4) * 4)).reshape(-1, -(-columns // 4) * 4)
    found = swizzle.unswizzle(swizzled(padded), rows, columns)
    assert found.tolist() == padded[:rows, :columns].tolist()


def test_the_first_tile() -> None:
    flat = np.zeros(512, np.uint8)
    flat[(33 % 32) * 16 + (33 // 32) * 4 + 2] = 7
    found = swizzle.unswizzle(flat, 128, 4)
    assert found[33, 2] == 7
    assert found.sum() == 7


def test_a_number_that_is_not_that_of_whole_tiles() -> None:
    with pytest.raises(FormatError, match="2 x 1 tiles, 1024 scales"):
        swizzle.unswizzle(np.zeros(512), 129, 4)


def test_nothing() -> None:
    assert swizzle.unswizzle(np.zeros(0), 0, 3).shape == (0, 3)
