"""Which rows count in an iteration whose optimizer step was skipped by a gradient scaler.

A scaler skips a step because its gradients overflowed: that is how it finds its scale, and no fault. The metric
``skipped_step`` tells it. Then gradients are no samples for any rule, nor are metrics that are not finite (a gradient
norm). Loss, forward tensors and parameters are judged as always. ``step()``'s thread and stream; nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flightrec.records import NO_MICROBATCH, SKIPPED_STEP, Key, Statistic
from flightrec.rules.series import upload

GRADIENTS = frozenset({"gradient", "dgrad", "wgrad"})


@dataclass(frozen=True, slots=True)
class Skip:
    """What a skipped step means in one tick; all on the device.

    Attributes:
        skipped: bool scalar, a step was skipped.
        excused: bool [R], rows that are no samples therefore.
    """

    skipped: Tensor
    excused: Tensor


class SkippedSteps:
    """Knows which rows tell of a skipped step, and which it excuses.

    Args:
        device: of the statistics.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._telling: set[int] = set()
        self._gradients: set[int] = set()
        self._metrics: set[int] = set()
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, key: Key, row: int) -> None:
        """Take a row that was registered."""
        if key.tensor in GRADIENTS:
            self._gradients.add(row)
        elif key.tensor == "metric":
            own = key.part == SKIPPED_STEP and not key.layer and key.microbatch == NO_MICROBATCH
            (self._telling if own else self._metrics).add(row)
        else:
            return
        self._tables = None

    def look(self, statistics: Tensor, valid: Tensor) -> Skip | None:
        """What the tick's statistics say; None, at no cost, while nothing tells of skipped steps.

        Args:
            statistics: float64 [R, NUM_STATISTICS] on the device.
            valid: bool [R] on the device.
        """
        if not self._telling:
            return None
        if self._tables is None or self._tables[1].shape[0] != statistics.shape[0]:
            self._tables = (
                upload(np.array(sorted(self._telling), np.int64), self._device),
                self._marks(self._gradients, statistics.shape[0]),
                self._marks(self._metrics, statistics.shape[0]),
            )
        rows, gradients, metrics = self._tables
        told = statistics.index_select(0, rows)[:, int(Statistic.SUM)] > 0
        skipped = (told & valid.index_select(0, rows)).any()
        first, last = int(Statistic.NAN_COUNT), int(Statistic.NEGATIVE_INF_COUNT)
        not_finite = statistics[:, first : last + 1].sum(1) > 0
        return Skip(skipped, skipped & (gradients | (metrics & not_finite)))

    def _marks(self, rows: set[int], num_rows: int) -> Tensor:
        marks = np.zeros(num_rows, bool)
        marks[[row for row in rows if row < num_rows]] = True
        return upload(marks, self._device)
