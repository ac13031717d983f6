"""The rule ``loss_jump``: the loss leaves its recent range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.rules import LossJumpRule
from flightrec.config.training_rules import MetricJumpRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject, twinned
from flightrec.rules.scalars import furthest, iteration_value, one_series, row_values
from flightrec.rules.state import SeriesState

MINIMUM_DEVIATION = 1e-3
"""The standard deviation counts as at least this share of the mean: a loss that stood still is not infinitely tight."""


class LossJump(DeviceRule):
    """Fires when the loss is more than ``sigma`` deviations, or ``factor`` times, from the mean of its window.

    The loss of an iteration is the record without a microbatch (given to ``step``) if there is one, else the mean over
    the microbatches' records; a non-finite one is no sample. It takes ``consecutive`` samples in a row beyond the same
    side. A sample beyond the range enters the window as the range's end: one spike does not widen the range so far
    that the next is missed, while a new level is learnt after some dozens of samples. With fewer than ``min_samples``
    samples the rule is silent and everything enters as it is.

    The row that fires is the one of ``step``, else the microbatch furthest out.
    """

    kind: ClassVar[str] = "loss_jump"

    def __init__(self, config: LossJumpRule | MetricJumpRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._sigma = config.sigma
        self._factor = config.factor
        self._direction = config.direction
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        self._window = state.declare_window("value", config.window)
        state.declare("run", dtype=torch.int32)  # samples in a row beyond the range, negative below it

    @staticmethod
    def grouping(key: Key) -> Key:
        """Losses of one name are one series, wherever in the iteration they were given."""
        return one_series(key)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        per_row, used = row_values(samples)
        loss = iteration_value(per_row, used, self._zero)  # NaN: none, or not finite
        sampled = loss.abs() < torch.inf
        mean, above, below = self._range(samples)
        low, high = mean - below, mean + above
        beyond = self._beyond(loss, low, high)
        faulty = beyond != 0 if self._consecutive == 1 else self._run(sampled, beyond).abs() >= self._consecutive
        entering = torch.fmin(torch.fmax(loss, low), high)  # without a range, NaN, as it is
        self._window.push(entering, samples.tables.feeding(sampled))
        threshold = self._threshold(loss, mean, low, high)
        rows = furthest(per_row - mean[:, None], used, beyond)
        return Judgement(sampled, faulty, rows, loss[:, None], threshold)

    def _range(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of the window and the distances still normal above and below it; NaN distances without a history."""
        mean, std = self._window.mean_and_std()
        size = mean.abs()
        above = torch.maximum(std, size * MINIMUM_DEVIATION).mul_(self._sigma)
        above.masked_fill_(self._window.count < self._min_samples, torch.nan)
        below = above
        if self._factor is not None:
            above = torch.minimum(above, size * (self._factor - 1))
            below = torch.minimum(below, size * (1 - 1 / self._factor))
        return twinned(mean, samples.tables), twinned(above, samples.tables), twinned(below, samples.tables)

    def _beyond(self, loss: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """+1 above the range, -1 below, 0 inside or where that direction does not count: int32 [S]."""
        if self._direction == "up":
            return (loss > high).to(torch.int32)
        down = (loss < low).to(torch.int32)
        return -down if self._direction == "down" else (loss > high).to(torch.int32) - down

    def _run(self, sampled: Tensor, beyond: Tensor) -> Tensor:
        """Samples in a row beyond one side, with its sign; a series that was not sampled now answers 0."""
        run = self.state["run"]
        longer = torch.where(run * beyond > 0, run + beyond, beyond).clamp(-self._consecutive, self._consecutive)
        run.copy_(torch.where(sampled, longer, run))
        return torch.where(sampled, longer, 0)

    def _threshold(self, loss: Tensor, mean: Tensor, low: Tensor, high: Tensor) -> Tensor:
        if self._direction == "up":
            return high
        return low if self._direction == "down" else torch.where(loss < mean, low, high)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the loss, the range that was normal, over how many samples."""
        own = statistics.get(Statistic.SUM, value) / statistics.get(Statistic.NUMEL, 1.0)
        mean_of = f" as the mean of its microbatches ({number(own)} in this one)" if _differ(own, value) else ""
        word = "above" if value > threshold else "below"
        limits = f"{number(self._sigma)} standard deviations"
        if self._factor is not None:
            limits += f" or a factor of {number(self._factor)}"
        return (
            f"{subject(key)} is {number(value)}{mean_of}, {word} the limit of {number(threshold)} "
            f"({limits} from the mean of the last {self.config.window} samples)"
        )


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > 1e-9 * max(abs(a), abs(b))
