"""The rule ``nonfinite``: NaN or infinity in a tensor or in its codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flightrec.config.rules import NonfiniteRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.series import upload
from flightrec.rules.state import SeriesState

_HIGH_PRECISION_COUNTS = (Statistic.NAN_COUNT, Statistic.POSITIVE_INF_COUNT, Statistic.NEGATIVE_INF_COUNT)
_HIGH_PRECISION = slice(int(Statistic.NAN_COUNT), int(Statistic.NEGATIVE_INF_COUNT) + 1)
_QUANTIZED = slice(int(Statistic.QUANTIZED_NAN_COUNT), int(Statistic.QUANTIZED_INF_COUNT) + 1)


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
        legal = np.array([False, "+inf" in self._allow, "-inf" in self._allow])
        self._counts = upload((~legal).astype(np.float64), state.device)
        self._legal = upload(legal.astype(np.float64), state.device)
        if self._min_samples:
            state.declare("samples", dtype=torch.int64)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        statistics = samples.statistics
        high_precision = (statistics[..., _HIGH_PRECISION] * self._counts).sum(-1)
        value = torch.fmax(high_precision, self._nonfinite_codes(statistics))  # the one that is there; else NaN
        rows = (value > 0) & samples.present
        sampled = samples.present.any(1)
        faulty = rows.any(1)
        if self._min_samples:
            count = self.state["samples"]
            faulty &= count >= self._min_samples
            count.add_(sampled)
        return Judgement(sampled, faulty, rows, value, 0.0)

    def _nonfinite_codes(self, statistics: Tensor) -> Tensor:
        if not self._allow:
            return statistics[..., _QUANTIZED].sum(-1)
        legal = (statistics[..., _HIGH_PRECISION] * self._legal).sum(-1)
        nan_codes, inf_codes = statistics[..., _QUANTIZED].unbind(-1)
        return torch.where(legal.isnan(), nan_codes, (nan_codes + inf_codes - legal).clamp(min=0))

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
