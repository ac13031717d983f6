"""The rule ``quantization_error``: what the codes decode to is far from the tensor that they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from flightrec.records import Key, Statistic
from flightrec.rules.base import Samples, number, subject
from flightrec.rules.relative import E2M1, E4M3, E4M3_FNUZ, E5M2, RelativeRule


class QuantizationError(RelativeRule):
    """Fires when norm(dequantized - x) / norm(x) is large against the series' own history.

    Both norms are over finite values. A record without a true pair, or whose tensor is all zero like what its codes
    decode to, is no sample.
    """

    kind: ClassVar[str] = "quantization_error"
    minimums: ClassVar[dict[float, float]] = {E4M3: 0.1, E4M3_FNUZ: 0.1, E5M2: 0.2, E2M1: 0.35}

    def measure(self, samples: Samples) -> Tensor:
        """The relative error, [S, K]; NaN when absent or 0 of 0."""
        return (samples.column(Statistic.SQUARED_ERROR) / samples.column(Statistic.SUM_OF_SQUARES)).sqrt_()

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the error, what was allowed, and the scale if it is one word."""
        low, high = statistics.get(Statistic.SCALE_MIN), statistics.get(Statistic.SCALE_MAX)
        scale = f" (with a scale of {number(low)})" if low is not None and low == high else ""
        return (
            f"what the codes of {subject(key)} decode to{scale} differs from the tensor by {number(value)} of its "
            f"norm; up to {number(threshold)} is normal here"
        )
