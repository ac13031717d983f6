"""The rule ``amax_spike``: a tensor's largest magnitude is far above its recent maximum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.rules import AmaxSpikeRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject, twinned
from flightrec.rules.state import SeriesState


class AmaxSpike(DeviceRule):
    """Fires when amax > ``factor`` x the maximum of the window, in ``confirm`` tensors or samples in a row.

    A sample is the largest amax over the microbatches, of records with ``min_numel`` elements or more that are neither
    empty nor all zero; amax is over finite values. An excess is confirmed when ``confirm`` different tensors (layer,
    tensor, part) that this rule sees have one in the same tick, or this series has one in ``confirm`` samples in a
    row; until then it is only watched, and kept out of the window. Once confirmed, the largest value of the run enters
    as one sample. A series with fewer than ``min_samples`` samples is silent.
    """

    kind: ClassVar[str] = "amax_spike"

    def __init__(self, config: AmaxSpikeRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor = config.factor
        self._min_samples = max(1, config.min_samples)
        self._min_numel = config.min_numel
        self._confirm = config.confirm
        self._window = state.declare_window("amax", config.window)
        state.declare("run", dtype=torch.int32)  # samples in a row with an excess
        state.declare("pending", dtype=torch.float64)  # the largest of an unconfirmed run

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        amax = samples.column(Statistic.AMAX)
        usable = (amax > 0) & (samples.column(Statistic.NUMEL) >= self._min_numel) & samples.present
        value = torch.where(usable, amax, 0.0)
        sample = value.amax(1)
        sampled = sample > 0
        threshold = self._threshold(samples)
        excess = sample > threshold  # NaN: no history, silent
        confirmed = self._confirmed(samples, sampled, excess)
        rows = value > threshold[:, None]
        self._remember(sample, sampled, excess, confirmed, samples.tables.feeds)
        return Judgement(sampled, confirmed, rows, value, threshold, watch=excess & ~confirmed)

    def _threshold(self, samples: Samples) -> Tensor:
        known = self._window.count >= self._min_samples
        own = torch.where(known, self._window.maximum() * self._factor, torch.nan)
        return twinned(own, samples.tables)

    def _confirmed(self, samples: Samples, sampled: Tensor, excess: Tensor) -> Tensor:
        run = self.state["run"]
        run.add_(excess).masked_fill_(sampled & ~excess, 0).clamp_(max=self._confirm)
        in_a_row = run >= self._confirm
        return excess & (in_a_row | (samples.tables.num_tensors(excess) >= self._confirm))

    def _remember(self, sample: Tensor, sampled: Tensor, excess: Tensor, confirmed: Tensor, feeds: Tensor) -> None:
        pending = self.state["pending"]
        largest = torch.maximum(sample, torch.where(confirmed, pending, 0.0))
        self._window.push(largest, sampled & feeds & (confirmed | ~excess))
        held = torch.where(excess & ~confirmed, torch.maximum(pending, sample), 0.0)
        pending.copy_(torch.where(sampled, held, pending))

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: amax, the window's maximum, their ratio and the factor allowed."""
        del statistics
        before = threshold / self._factor
        return (
            f"the largest magnitude of {subject(key)} is {number(value)}, {number(value / before)} times the "
            f"largest of the last {self.config.window} samples ({number(before)}); "
            f"up to {number(self._factor)} times is normal"
        )
