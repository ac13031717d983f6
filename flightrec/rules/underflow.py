"""The rule ``underflow``: quantization turned too many non-zero values into zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from flightrec.records import Key, Statistic
from flightrec.rules.base import Samples, number, subject
from flightrec.rules.relative import RelativeRule


class Underflow(RelativeRule):
    """Fires when the share of non-zero finite values that became zero is large against the series' own history.

    A record without a pair of high precision and codes, or without a non-zero finite value, is no sample.
    """

    kind: ClassVar[str] = "underflow"

    def measure(self, samples: Samples) -> Tensor:
        """Share of non-zero finite elements that became zero, [S, K]; NaN when absent or 0 of 0."""
        column = samples.column
        infinite = column(Statistic.POSITIVE_INF_COUNT) + column(Statistic.NEGATIVE_INF_COUNT)
        nonzero = column(Statistic.NUMEL) - column(Statistic.ZERO_COUNT) - column(Statistic.NAN_COUNT) - infinite
        return column(Statistic.UNDERFLOW_COUNT) / nonzero

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


def _num_nonzero(statistics: Mapping[Statistic, float]) -> float:
    absent = (
        Statistic.ZERO_COUNT,
        Statistic.NAN_COUNT,
        Statistic.POSITIVE_INF_COUNT,
        Statistic.NEGATIVE_INF_COUNT,
    )
    return statistics.get(Statistic.NUMEL, 0.0) - sum(statistics.get(statistic, 0.0) for statistic in absent)
