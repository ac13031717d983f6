"""The rule ``inconsistent_scale``: the words that scale a tensor contradict each other or its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from flightrec.config.quantizer_rules import InconsistentScaleRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.state import SeriesState


class InconsistentScale(DeviceRule):
    """Fires when |scale x scale_inv - 1| > ``tolerance``, or a scale is NaN, infinite, or zero for non-zero data.

    The value is the worst deviation over the scale's words, infinity in the other cases. Only scales that were
    recorded with the codes that they belong to count, so both words must be those of the quantizing call. A scale of
    zero for a block of zeros is legal, and so is one that is a code itself and underflowed.
    """

    kind: ClassVar[str] = "inconsistent_scale"

    def __init__(self, config: InconsistentScaleRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._tolerance = config.tolerance
        self._min_samples = config.min_samples
        if self._min_samples:
            state.declare("samples", dtype=torch.int64)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        column = samples.column
        impossible = (column(Statistic.SCALE_NONFINITE_COUNT) > 0) | (column(Statistic.ZERO_SCALE_COUNT) > 0)
        value = column(Statistic.SCALE_INVERSE_ERROR).masked_fill(impossible, torch.inf)
        rows = (value > self._tolerance) & samples.present
        sampled = samples.present.any(1)
        faulty = rows.any(1)
        if self._min_samples:
            count = self.state["samples"]
            faulty &= count >= self._min_samples
            count.add_(sampled)
        return Judgement(sampled, faulty, rows, value, self._tolerance)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: what is wrong with the scale, with its words where they are finite."""
        broken, zero = statistics.get(Statistic.SCALE_NONFINITE_COUNT, 0), statistics.get(Statistic.ZERO_SCALE_COUNT, 0)
        if broken > 0:
            return f"{number(broken)} of the words that scale {subject(key)} are NaN or infinite"
        if zero > 0:
            return f"the scale of {number(zero)} non-zero values of {subject(key)} is 0"
        low, high = statistics.get(Statistic.SCALE_MIN), statistics.get(Statistic.SCALE_MAX)
        word = f" (the one that decodes is {number(low)})" if low is not None and low == high else ""
        return (
            f"scale and inverse scale of {subject(key)}{word} contradict each other: their product differs from 1 by "
            f"{number(value)}, more than {number(threshold)}"
        )
