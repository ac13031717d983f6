"""The statistics matrix: one row a key, one plane a slot, with the tick that wrote each row.

Device memory in blocks that never move; blocks are added under the ring's lock. ``gather`` runs on its caller's stream
and does not synchronise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flightrec.kernels.driver import allocate
from flightrec.records import NUM_STATISTICS

FIRST_BLOCK_ROWS = 256
LARGEST_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class _Block:
    first_row: int
    values: torch.Tensor  # float64 [planes, rows, C]
    stamps: torch.Tensor  # int64 [planes, rows], -1 never written
    is_fixed: bool = False  # captured graphs point into it

    @property
    def num_rows(self) -> int:
        return self.stamps.shape[1]


class StatisticsMatrix:
    """Rows for ever more keys; as many planes as slots, scrap included.

    A new block is as large as all before it, from 256 to 4096 rows: a model of few tensors evaluates few rows.
    """

    def __init__(self, device: torch.device, num_planes: int) -> None:
        self._device, self._num_planes = device, num_planes
        self._blocks: list[_Block] = []
        self.num_rows = 0
        self._next_row = self._end_row = 0  # what is left of the newest block that is not fixed
        self.generation = 0  # changes whenever ``rows`` would give other memory

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return sum(block.values.nbytes + block.stamps.nbytes for block in self._blocks)

    @property
    def num_allocated_rows(self) -> int:
        """``num_rows`` rounded up to whole blocks."""
        return self._blocks[-1].first_row + self._blocks[-1].num_rows if self._blocks else 0

    def add_row(self) -> int:
        """Number of a new row; never written yet."""
        if self._next_row == self._end_row:
            self._open(min(max(self.num_allocated_rows, FIRST_BLOCK_ROWS), LARGEST_BLOCK_ROWS))
        self.num_rows += 1
        self._next_row += 1
        return self._next_row - 1

    def add_rows(self, num_rows: int) -> int:
        """First of ``num_rows`` new rows in one block; what is left of a block that is too short is never written."""
        left = self._end_row - self._next_row
        if left < num_rows:
            self._open(max(num_rows, min(max(self.num_allocated_rows, FIRST_BLOCK_ROWS), LARGEST_BLOCK_ROWS)))
            self.num_rows += left
        self.num_rows += num_rows
        self._next_row += num_rows
        return self._next_row - num_rows

    def add_fixed_block(self, values: torch.Tensor, stamps: torch.Tensor) -> int:
        """Number of the first row of memory that stays where it is, whatever ``resize`` does to the rest.

        Args:
            values: float64 ``[planes, rows, C]``, with as many planes as there will ever be, or more.
            stamps: int64 ``[planes, rows]``, -1 never written.
        """
        first_row = self.num_allocated_rows
        self._blocks.append(_Block(first_row, values, stamps, is_fixed=True))
        self.num_rows += stamps.shape[1]
        return first_row

    def rows(self, first_row: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``row`` for what ``add_rows`` gave: values float64 ``[planes, n, C]``, stamps int64 ``[planes, n]``."""
        block = next(block for block in reversed(self._blocks) if block.first_row <= first_row)
        at = slice(first_row - block.first_row, first_row - block.first_row + num_rows)
        return block.values[:, at], block.stamps[:, at]

    def row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one row in all planes: values float64 ``[planes, C]``, stamps int64 ``[planes]``."""
        block = next(block for block in reversed(self._blocks) if block.first_row <= row)
        at = row - block.first_row
        return block.values[:, at], block.stamps[:, at]

    def gather(self, slot: torch.Tensor, tick: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One tick's statistics.

        Args:
            slot: int64 ``[1]`` on the device, its plane.
            tick: int64 ``[1]`` on the device; rows with another stamp are not valid.

        Returns:
            values float64 ``[R, C]``, valid bool ``[R]``, fresh tensors; ``R`` is ``num_allocated_rows``.
        """
        if not self._blocks:
            return self._empty()
        values = [block.values.index_select(0, slot)[0] for block in self._blocks]
        stamps = [block.stamps.index_select(0, slot)[0] for block in self._blocks]
        if len(self._blocks) == 1:
            return values[0], stamps[0] == tick
        return torch.cat(values), torch.cat(stamps) == tick

    def resize(self, num_planes: int) -> None:
        """Have ``num_planes`` planes; plane 0 keeps its rows, all others are never written."""
        self._num_planes = num_planes
        self.generation += 1
        old, self._blocks = self._blocks, []
        for block in old:
            if block.is_fixed:
                self._blocks.append(block)
                continue
            new = self._allocate(block.first_row, block.num_rows)
            new.values[0].copy_(block.values[0])
            new.stamps[0].copy_(block.stamps[0])
            self._blocks.append(new)

    def _open(self, num_rows: int) -> None:
        first_row = self.num_allocated_rows
        self._blocks.append(self._allocate(first_row, num_rows))  # which may fail, and be tried again
        self._next_row, self._end_row = first_row, first_row + num_rows

    def _allocate(self, first_row: int, num_rows: int) -> _Block:
        return _Block(
            first_row, *allocate(self._device, lambda: never_written(self._device, self._num_planes, num_rows))
        )

    def _empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros((0, NUM_STATISTICS), dtype=torch.float64, device=self._device)
        return values, torch.zeros((0,), dtype=torch.bool, device=self._device)


def never_written(device: torch.device, num_planes: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that no tick has written: values float64 ``[planes, rows, C]``, stamps int64 ``[planes, rows]``."""
    with torch.inference_mode(False):
        return (
            torch.zeros((num_planes, num_rows, NUM_STATISTICS), dtype=torch.float64, device=device),
            torch.full((num_planes, num_rows), -1, dtype=torch.int64, device=device),
        )
