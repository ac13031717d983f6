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

    Under a budget, samples that follow each other may be many iterations apart, each beyond the range for an iteration
    of its own. Across turns that the tensor did not get, samples count as in a row only if the scale is still the same
    word: then it did not follow in all that time.
    """

    kind: ClassVar[str] = "stale_scale"
    wants_left_out: ClassVar[bool] = True

    def __init__(self, config: StaleScaleRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor = config.factor
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        self._spread = None if config.margin is None else 2.0**config.margin
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        state.declare("run", dtype=torch.int32)  # samples in a row beyond the factor
        state.declare("samples", dtype=torch.int64)
        state.declare("passed", dtype=torch.bool)  # turns without it since the last sample
        state.declare("scale", dtype=torch.float64, initial=float("nan"), shape=(2,))  # smallest and largest word then

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        ratio = self._ratio(samples)
        value = torch.where((ratio > 0) & samples.present, ratio, self._zero)
        rows = value > self._factor
        sampled, excess = (value > 0).any(1), rows.any(1)
        run, count = self.state["run"], self.state["samples"]
        run.masked_fill_(self._followed(samples, sampled), 0)
        run.add_(excess).clamp_(max=self._consecutive).masked_fill_(sampled ^ excess, 0)
        faulty = excess & (run >= self._consecutive) & (count >= self._min_samples)
        count.add_(sampled)
        return Judgement(sampled, faulty, rows, value, self._factor)

    def _followed(self, samples: Samples, sampled: Tensor) -> Tensor:
        """Bool [S]: the scale has changed over turns that the series did not get."""
        passed, known = self.state["passed"], self.state["scale"]
        low = samples.column(Statistic.SCALE_MIN).nan_to_num(torch.inf).masked_fill(~samples.present, torch.inf).amin(1)
        high = samples.column(Statistic.SCALE_MAX).nan_to_num(-torch.inf)
        now = torch.stack((low, high.masked_fill(~samples.present, -torch.inf).amax(1)), dim=1)
        followed = sampled & passed & (now != known).any(1)
        known.copy_(torch.where(sampled[:, None], now, known))
        waiting = samples.took_no_turn()
        if waiting is not None:
            passed.logical_or_(waiting)
        passed.masked_fill_(sampled, False)
        return followed

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
