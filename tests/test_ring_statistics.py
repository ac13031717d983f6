from __future__ import annotations

import pytest
import torch
from kernels_support import DEVICES

from flightrec.records import NUM_STATISTICS
from flightrec.ring.statistics import LARGEST_BLOCK_ROWS, StatisticsMatrix


def write(matrix, row, plane, tick):
    values, stamps = matrix.row(row)
    values[plane] = row
    stamps[plane] = tick


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_gathered_from_all_blocks(device):
    matrix = StatisticsMatrix(torch.device(device), 3)
    where = torch.tensor([1], device=device), torch.tensor([5], device=device)
    assert [tuple(t.shape) for t in matrix.gather(*where)] == [(0, NUM_STATISTICS), (0,)]
    rows = [matrix.add_row() for _ in range(3 * LARGEST_BLOCK_ROWS)]
    assert rows == list(range(len(rows)))
    written = (0, 255, 256, 4095, 4096, 9000, len(rows) - 1)
    for row in written:
        write(matrix, row, 1, 5)
    write(matrix, 7, 1, 4)  # an older tick
    write(matrix, 8, 2, 5)  # another slot
    values, valid = matrix.gather(*where)
    assert values.shape == (matrix.num_allocated_rows, NUM_STATISTICS)
    assert valid.nonzero().flatten().tolist() == list(written)
    assert values[valid][:, 3].tolist() == list(written)


def test_blocks_never_move_and_few_rows_stay_small():
    matrix = StatisticsMatrix(torch.device("cpu"), 2)
    matrix.add_row()
    assert matrix.num_allocated_rows == 256
    values, _ = matrix.row(0)
    address = values.data_ptr()
    sizes = set()
    for _ in range(20_000):
        matrix.add_row()
        sizes.add(matrix.num_allocated_rows)
    assert sorted(sizes) == [256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 20480]
    assert matrix.row(0)[0].data_ptr() == address


def test_resize_keeps_plane_0_and_forgets_the_rest():
    matrix = StatisticsMatrix(torch.device("cpu"), 2)
    for _ in range(300):
        matrix.add_row()
    write(matrix, 299, 0, 0)
    write(matrix, 3, 1, 0)
    matrix.resize(6)
    tick = torch.tensor([0])
    assert matrix.gather(torch.tensor([0]), tick)[1].nonzero().flatten().tolist() == [299]
    for plane in range(1, 6):
        assert not matrix.gather(torch.tensor([plane]), tick)[1].any()
    assert matrix.gather(torch.tensor([0]), tick)[0][299].tolist() == [299.0] * NUM_STATISTICS
