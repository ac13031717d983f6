"""The rule ``nonfinite``: NaN or infinity in a tensor or in its codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.rules import NonfiniteRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.state import SeriesState

_HIGH_PRECISION_COUNTS = (Statistic.NAN_COUNT, Statistic.POSITIVE_INF_COUNT, Statistic.NEGATIVE_INF_COUNT)


class Nonfinite(DeviceRule):
    """Fires on the first NaN or infinity of the logical region, in high precision or in the codes.

    The value is the number of such elements, of the worse side; the threshold is 0. An infinity that ``allow`` names
    does not count; nor do as many non-finite codes as there are such infinities, since a format without infinity turns
    them into NaN. Codes without a high-precision tensor do not tell the sign: with any ``allow`` their infinities are
    legal. Scales are not looked at: padding blocks may hold anything.
    """

    kind: ClassVar[str] = "nonfinite"

    def __init__(self, config: NonfiniteRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._allow = frozenset(config.allow)
        self._min_samples = config.min_samples
        signs = ((Statistic.POSITIVE_INF_COUNT, "+inf"), (Statistic.NEGATIVE_INF_COUNT, "-inf"))
        self._legal = [statistic for statistic, sign in signs if sign in self._allow]
        self._illegal = [statistic for statistic, sign in signs if sign not in self._allow]
        if self._min_samples:
            state.declare("samples", dtype=torch.int64)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        value = torch.fmax(self._nonfinite(samples), self._nonfinite_codes(samples))  # the one that is there; else NaN
        rows = (value > 0) & samples.present
        sampled = samples.present.any(1)
        faulty = rows.any(1)
        if self._min_samples:
            count = self.state["samples"]
            faulty &= count >= self._min_samples
            count.add_(sampled)
        return Judgement(sampled, faulty, rows, value, 0.0)

    def _nonfinite(self, samples: Samples) -> Tensor:
        count = samples.column(Statistic.NAN_COUNT)
        for statistic in self._illegal:
            count = count + samples.column(statistic)
        return count

    def _nonfinite_codes(self, samples: Samples) -> Tensor:
        nan_codes, inf_codes = (
            samples.column(Statistic.QUANTIZED_NAN_COUNT),
            samples.column(Statistic.QUANTIZED_INF_COUNT),
        )
        codes = nan_codes + inf_codes
        if not self._legal:
            return codes
        for statistic in self._legal:
            codes = codes - samples.column(statistic)
        return torch.where(codes.isnan(), nan_codes, codes)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: which values, how many of how many, on which side."""
        del value, threshold  # counts by class say more
        counts = [
            f"{number(statistics[statistic])} {word}"
            for statistic, word in zip(_HIGH_PRECISION_COUNTS, ("NaN", "+Inf", "-Inf"), strict=True)
            if statistics.get(statistic, 0) > 0 and word.lower() not in self._allow
        ]
        if counts:
            numel = number(statistics.get(Statistic.NUMEL, float("nan")))
            return f"{subject(key)} holds {' and '.join(counts)} among {numel} elements"
        codes = [
            f"{number(statistics[statistic])} {word}"
            for statistic, word in ((Statistic.QUANTIZED_NAN_COUNT, "NaN"), (Statistic.QUANTIZED_INF_COUNT, "Inf"))
            if statistics.get(statistic, 0) > 0
        ]
        numel = number(statistics.get(Statistic.QUANTIZED_NUMEL, float("nan")))
        finite = Statistic.NUMEL in statistics and not any(statistics.get(word, 0) for word in _HIGH_PRECISION_COUNTS)
        before = ", while it was finite in high precision" if finite else ""
        return f"{subject(key)} holds {' and '.join(codes)} among {numel} quantized elements{before}"
