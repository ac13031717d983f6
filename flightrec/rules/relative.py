"""What rules share that judge a share of a quantized tensor against the tensor's own history."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from flightrec.records import Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, twinned
from flightrec.rules.state import SeriesState

E4M3, E5M2, E4M3_FNUZ, E2M1 = 448.0, 57344.0, 240.0, 6.0
"""Largest finite values of the code formats: how a row of statistics tells its format."""


class RelativeRule(DeviceRule):
    """Fires when a share is large against the series' own history.

    A sample is the largest share over the microbatches; a record for which ``measure`` gives NaN is none. Fires at
    ``new_row`` whatever the history says; with ``min_samples`` samples, also above ``factor`` x the maximum of the
    window, if that is above ``minimum``, or without one above what ``minimums`` says of the row's format.

    In the very first sample of a series, records whose scales are exactly 1 count for nothing: delayed scaling starts
    there, before it has seen a tensor, and what it makes of that one says nothing of what follows.
    """

    minimums: ClassVar[dict[float, float]] = {}

    def __init__(self, config: Any, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor = config.factor
        self._minimum: float | None = config.minimum
        self._new_row = config.new_row
        self._below_new_row = math.nextafter(config.new_row, 0.0)  # so that ``new_row`` itself is beyond it
        self._min_samples = config.min_samples
        self._none = torch.full((), -1.0, dtype=torch.float64, device=state.device)
        self._window = state.declare_window("share", config.window)
        state.declare("met", dtype=torch.bool)  # had a sample, counted or not

    @abstractmethod
    def measure(self, samples: Samples) -> Tensor:
        """The share of each row, float64 [S, K]; NaN where there is nothing to judge."""

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        share = self.measure(samples)
        value = torch.where((share >= 0) & samples.present, share, self._none)
        value.masked_fill_(self._not_calibrated(samples, value), -1.0)
        sample = value.amax(1)
        sampled = sample >= 0
        threshold = self._threshold(samples)
        rows = value > threshold[:, None]
        self._window.push(sample.clamp(max=self._new_row), samples.tables.feeding(sampled))
        return Judgement(sampled, rows.any(1), rows, value, threshold)

    def _not_calibrated(self, samples: Samples, value: Tensor) -> Tensor:
        """Bool [S, K]: of a series' first sample, made with scales that are all 1 still."""
        low, high = samples.column(Statistic.SCALE_MIN), samples.column(Statistic.SCALE_MAX)
        met = self.state["met"]
        excused = (low == 1) & (high == 1) & ~met[:, None]
        met.logical_or_((value >= 0).any(1))
        return excused

    def _threshold(self, samples: Samples) -> Tensor:
        own = self._window.maximum().mul_(self._factor)
        own = twinned(own.masked_fill_(self._window.count < self._min_samples, torch.inf), samples.tables)
        if self._minimum is not None:
            return own.clamp(self._minimum, self._below_new_row)
        return torch.maximum(own, self._floor(samples)).clamp_(max=self._below_new_row)

    def _floor(self, samples: Samples) -> Tensor:
        """What the formats of a series' rows are given, float64 [S]."""
        largest = samples.column(Statistic.QUANTIZED_LARGEST)
        floor = torch.full_like(largest, max(self.minimums.values()))
        for format_largest, minimum in self.minimums.items():
            floor = floor.masked_fill_(largest == format_largest, minimum)
        return floor.masked_fill_(~samples.present, 0.0).amax(1)
