"""The rule ``saturation``: too many values lie beyond what the codes can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from flightrec.records import Key, Statistic
from flightrec.rules.base import Samples, number, subject
from flightrec.rules.relative import E2M1, E4M3, E4M3_FNUZ, E5M2, RelativeRule


class Saturation(RelativeRule):
    """Fires when the share of clipped finite values is large against the series' own history.

    Clipped is a value whose scaled magnitude is beyond the format's largest finite value; one that just reaches the
    largest code is not: a scale that fits exactly makes some of every tensor. A record without a true pair is no
    sample.
    """

    kind: ClassVar[str] = "saturation"
    minimums: ClassVar[dict[float, float]] = {E4M3: 0.05, E4M3_FNUZ: 0.05, E5M2: 0.05, E2M1: 0.2}

    def measure(self, samples: Samples) -> Tensor:
        """Share of finite elements that are clipped, [S, K]; NaN when absent or without a finite element."""
        column = samples.column
        infinite = column(Statistic.POSITIVE_INF_COUNT) + column(Statistic.NEGATIVE_INF_COUNT)
        return column(Statistic.CLIPPED_COUNT) / (column(Statistic.NUMEL) - column(Statistic.NAN_COUNT) - infinite)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the share, how far beyond the range the largest is, and what was allowed."""
        beyond = ""
        if {Statistic.RANGE_RATIO, Statistic.QUANTIZED_LARGEST} <= statistics.keys():
            ratio, largest = statistics[Statistic.RANGE_RATIO], statistics[Statistic.QUANTIZED_LARGEST]
            beyond = f" (up to {number(ratio)} times the largest code, {number(largest)})"
        return (
            f"{value:.1%} of the values of {subject(key)} are beyond the range of their codes{beyond}; "
            f"up to {threshold:.1%} is normal here"
        )
