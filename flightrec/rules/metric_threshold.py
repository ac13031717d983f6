"""The rule ``metric_threshold``: a metric is beyond a limit that the user gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from flightrec.config.training_rules import MetricThresholdRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number
from flightrec.rules.scalars import furthest, is_metric, iteration_value, one_series, row_values
from flightrec.rules.state import SeriesState


class MetricThreshold(DeviceRule):
    """Fires when a metric given to ``step`` is above ``above`` or below ``below`` in ``consecutive`` samples in a row.

    A non-finite value is no sample.
    """

    kind: ClassVar[str] = "metric_threshold"

    def __init__(self, config: MetricThresholdRule, state: SeriesState) -> None:
        super().__init__(config, state)
        above = torch.inf if config.above is None else config.above
        below = -torch.inf if config.below is None else config.below
        self._above = torch.full((), above, dtype=torch.float64, device=state.device)
        self._below = torch.full((), below, dtype=torch.float64, device=state.device)
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        state.declare("run", dtype=torch.int64)  # samples in a row beyond a limit
        state.declare("samples", dtype=torch.int64)

    @staticmethod
    def grouping(key: Key) -> Key:
        """Values of one name are one series."""
        return one_series(key)

    def accepts(self, key: Key) -> bool:
        """Metrics of the names that the rule looks at."""
        return is_metric(key, self.config.metrics)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        per_row, used = row_values(samples)
        value = iteration_value(per_row, used, self._zero)
        sampled = value.abs() < torch.inf
        high, low = (value > self._above) & sampled, (value < self._below) & sampled
        beyond = high | low
        run, count = self.state["run"], self.state["samples"]
        run.add_(beyond).masked_fill_(sampled ^ beyond, 0)
        faulty = beyond & (run >= self._consecutive) & (count >= self._min_samples)
        count.add_(sampled)
        threshold = torch.where(low, self._below, self._above)
        rows = furthest(per_row, used, torch.where(low, -1.0, 1.0))
        return Judgement(sampled, faulty, rows, value[:, None], threshold)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the value and the limit."""
        del statistics
        word = "above" if value > threshold else "below"
        times = f", in {self._consecutive} samples in a row" if self._consecutive > 1 else ""
        return f"metric {key.part} is {number(value)}, {word} {number(threshold)}{times}"
