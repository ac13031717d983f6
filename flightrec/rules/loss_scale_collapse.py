"""The rule ``loss_scale_collapse``: a gradient scaler has given up all of its scale and still skips steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from flightrec.config.training_rules import LossScaleCollapseRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number
from flightrec.rules.scalars import furthest, is_metric, iteration_value, one_series, row_values
from flightrec.rules.state import SeriesState


class LossScaleCollapse(DeviceRule):
    """Fires when the loss scale fell in ``consecutive`` samples in a row and is below ``minimum``.

    A dynamic scaler lowers its scale in exactly the steps that it skips, so the scale itself, given to ``step`` as a
    metric of the name ``metrics``, tells both. Many skips in a row are healthy while the scale is still high: that is
    how a scaler finds it.
    """

    kind: ClassVar[str] = "loss_scale_collapse"

    def __init__(self, config: LossScaleCollapseRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._minimum = config.minimum
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        state.declare("previous", dtype=torch.float64, initial=float("nan"))
        state.declare("run", dtype=torch.int64)  # samples in a row in which it fell
        state.declare("samples", dtype=torch.int64)

    @staticmethod
    def grouping(key: Key) -> Key:
        """Values of one name are one series."""
        return one_series(key)

    def accepts(self, key: Key) -> bool:
        """The metric that is the loss scale."""
        return is_metric(key, self.config.metrics)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        per_row, used = row_values(samples)
        value = iteration_value(per_row, used, self._zero)
        sampled = value.abs() < torch.inf
        previous, run, count = self.state["previous"], self.state["run"], self.state["samples"]
        fell = sampled & (value < previous)
        run.add_(fell).masked_fill_(sampled ^ fell, 0)
        faulty = fell & (run >= self._consecutive) & (value < self._minimum) & (count >= self._min_samples)
        count.add_(sampled)
        previous.copy_(torch.where(sampled, value, previous))
        rows = furthest(per_row, used, torch.full_like(value, -1.0))
        return Judgement(sampled, faulty, rows, value[:, None], self._minimum)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the scale, and how long it has been falling."""
        del statistics
        return (
            f"the loss scale ({key.part}) fell to {number(value)}, below {number(threshold)}, in at least "
            f"{self._consecutive} skipped steps in a row"
        )
