"""The rule ``underflow``: quantization turned too many non-zero values into zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.rules import UnderflowRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject, twinned
from flightrec.rules.state import SeriesState


class Underflow(DeviceRule):
    """Fires when the share of non-zero finite values that became zero is large against the series' own history.

    A sample is the largest share over the microbatches; a record without a pair of high precision and codes, or
    without a non-zero finite value, is none. Fires at ``new_row`` whatever the history says; with ``min_samples``
    samples, also above ``minimum`` and ``factor`` x the maximum of the window.
    """

    kind: ClassVar[str] = "underflow"

    def __init__(self, config: UnderflowRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor = config.factor
        self._minimum = config.minimum
        self._below_new_row = math.nextafter(config.new_row, 0.0)  # so that ``new_row`` itself is beyond it
        self._min_samples = config.min_samples
        self._none = torch.full((), -1.0, dtype=torch.float64, device=state.device)
        self._window = state.declare_window("share", config.window)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        share = _share(samples)
        usable = (share <= 1) & samples.present  # not where it is NaN: no pair, or nothing that could underflow
        value = torch.where(usable, share, self._none)
        sample = value.amax(1)
        sampled = sample >= 0
        threshold = self._threshold(samples)
        rows = value > threshold[:, None]
        self._window.push(sample, samples.tables.feeding(sampled))
        return Judgement(sampled, rows.any(1), rows, value, threshold)

    def _threshold(self, samples: Samples) -> Tensor:
        own = self._window.maximum().mul_(self._factor).clamp_(self._minimum, self._below_new_row)
        own = own.masked_fill_(self._window.count < self._min_samples, self._below_new_row)
        return twinned(own, samples.tables)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the share, the counts and what was allowed."""
        counts = ""
        if Statistic.UNDERFLOW_COUNT in statistics:
            lost = number(statistics[Statistic.UNDERFLOW_COUNT])
            counts = f" ({lost} of {number(_num_nonzero(statistics))})"
        return (
            f"quantization turned {value:.1%} of the non-zero values of {subject(key)} into zero{counts}; "
            f"up to {threshold:.1%} is normal here"
        )


def _share(samples: Samples) -> Tensor:
    """Share of non-zero finite elements that became zero, [S, K]; NaN when absent or 0 of 0."""
    column = samples.column
    infinite = column(Statistic.POSITIVE_INF_COUNT) + column(Statistic.NEGATIVE_INF_COUNT)
    nonzero = column(Statistic.NUMEL) - column(Statistic.ZERO_COUNT) - column(Statistic.NAN_COUNT) - infinite
    return column(Statistic.UNDERFLOW_COUNT) / nonzero


def _num_nonzero(statistics: Mapping[Statistic, float]) -> float:
    absent = (
        Statistic.ZERO_COUNT,
        Statistic.NAN_COUNT,
        Statistic.POSITIVE_INF_COUNT,
        Statistic.NEGATIVE_INF_COUNT,
    )
    return statistics.get(Statistic.NUMEL, 0.0) - sum(statistics.get(statistic, 0.0) for statistic in absent)
