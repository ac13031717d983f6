"""The rule ``loss_drift``: the loss climbs so slowly that no single value stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from flightrec.config.training_rules import LossDriftRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.scalars import furthest, iteration_value, one_series, row_values
from flightrec.rules.state import SeriesState

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median of n normal values, in units of their standard deviation / sqrt(n)."""


class LossDrift(DeviceRule):
    """Fires when the median of the last ``window`` losses is above ``factor`` x the smallest such median.

    The loss of an iteration is as for ``loss_jump``; a non-finite one is no sample. The smallest median is that of the
    last ``history`` samples before this one, of which there must be ``min_samples``. For a negative loss the same
    distance counts, ``factor`` - 1 of the smallest median's magnitude. The distance must also be more than ``sigma``
    standard errors of the median, so that a loss that is noisy by itself does not drift.
    """

    kind: ClassVar[str] = "loss_drift"

    def __init__(self, config: LossDriftRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._excess = config.factor - 1
        self._errors = config.sigma * MEDIAN_ERROR / math.sqrt(config.window)
        self._min_samples = config.min_samples
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        self._window = state.declare_window("value", config.window)
        self._medians = state.declare_window("median", config.history)

    @staticmethod
    def grouping(key: Key) -> Key:
        """Losses of one name are one series."""
        return one_series(key)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        per_row, used = row_values(samples)
        loss = iteration_value(per_row, used, self._zero)
        sampled = loss.abs() < torch.inf
        feeding = samples.tables.feeding(sampled)
        self._window.push(loss, feeding)
        median = self._window.median()
        smallest = self._medians.minimum()
        _, deviation = self._window.mean_and_std()
        threshold = smallest + torch.maximum(self._excess * smallest.abs(), self._errors * deviation)
        known = feeding & (self._window.count >= self._window.size)
        faulty = known & (self._medians.count >= self._min_samples) & (median > threshold)
        self._medians.push(median, known)
        rows = furthest(per_row, used, torch.ones_like(median))
        return Judgement(sampled, faulty, rows, median[:, None], threshold)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the median, the limit, over how many samples."""
        del statistics
        return (
            f"{subject(key)} has drifted up: the median of its last {self.config.window} samples is {number(value)}, "
            f"above {number(threshold)}: beyond {number(1 + self._excess)} times the smallest such median of the "
            f"{self.config.history} samples before, and beyond its noise"
        )
