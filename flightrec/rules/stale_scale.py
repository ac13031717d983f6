"""The rule ``stale_scale``: a scale stays where it is although its tensor has outgrown it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.quantizer_rules import StaleScaleRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.state import SeriesState


class StaleScale(DeviceRule):
    """Fires when amax x scale > ``factor`` x the format's range in ``consecutive`` samples in a row.

    Delayed scaling runs behind by design: a tensor that grows is beyond the range for an iteration or two, until its
    scale follows. With ``margin`` the recorded amax history is held against the scale too, as the recipe "range / the
    largest of the history / 2^margin" computes it: then a history that grew while the scale did not also counts. A
    sample is the largest ratio over the microbatches; an all-zero tensor says nothing of its scale and is none.
    """

    kind: ClassVar[str] = "stale_scale"

    def __init__(self, config: StaleScaleRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor = config.factor
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        self._spread = None if config.margin is None else 2.0**config.margin
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        state.declare("run", dtype=torch.int32)  # samples in a row beyond the factor
        state.declare("samples", dtype=torch.int64)

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        ratio = self._ratio(samples)
        value = torch.where((ratio > 0) & samples.present, ratio, self._zero)
        rows = value > self._factor
        sampled, excess = (value > 0).any(1), rows.any(1)
        run, count = self.state["run"], self.state["samples"]
        run.add_(excess).clamp_(max=self._consecutive).masked_fill_(sampled ^ excess, 0)
        faulty = excess & (run >= self._consecutive) & (count >= self._min_samples)
        count.add_(sampled)
        return Judgement(sampled, faulty, rows, value, self._factor)

    def _ratio(self, samples: Samples) -> Tensor:
        now = samples.column(Statistic.RANGE_RATIO)
        if self._spread is None:
            return now
        return torch.fmax(now, samples.column(Statistic.HISTORY_RATIO) * self._spread)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: how far beyond the range, for how long, with which scale."""
        low, high = statistics.get(Statistic.SCALE_MIN), statistics.get(Statistic.SCALE_MAX)
        scale = f" of {number(low)}" if low is not None and low == high else ""
        now = statistics.get(Statistic.RANGE_RATIO, value)
        what = "the largest magnitude" if now >= value else "the amax history"
        samples = f"in {self._consecutive} samples in a row" if self._consecutive > 1 else "now"
        return (
            f"the scale{scale} does not follow {subject(key)}: {what} is {number(value)} times the range of the codes, "
            f"more than {number(threshold)} times {samples}"
        )
