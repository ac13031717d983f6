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
    row; until then it is only watched, and kept out of the window. All tensors of one expert count as one there. Once
    confirmed, the largest value of the run enters as one sample. A series with fewer than ``min_samples`` samples is
    silent.
    """

    kind: ClassVar[str] = "amax_spike"

    def __init__(self, config: AmaxSpikeRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor = config.factor
        self._min_samples = max(1, config.min_samples)
        self._min_numel = config.min_numel
        self._confirm = config.confirm
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        self._window = state.declare_window("amax", config.window)
        state.declare("run", dtype=torch.int32)  # samples in a row with an excess
        state.declare("pending", dtype=torch.float64)  # the largest of an unconfirmed run

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        amax = samples.column(Statistic.AMAX)
        usable = (amax > 0) & (samples.column(Statistic.NUMEL) >= self._min_numel) & samples.present
        value = torch.where(usable, amax, self._zero)
        sample = value.amax(1)
        sampled = sample > 0
        threshold = self._threshold(samples)
        excess = sample > threshold  # NaN: no history, silent
        confirmed = self._confirmed(samples, excess, calm=sampled ^ excess)
        unconfirmed = excess ^ confirmed
        self._remember(samples, sample, confirmed, enters=sampled ^ unconfirmed)
        return Judgement(sampled, confirmed, value > threshold[:, None], value, threshold, watch=unconfirmed)

    def _threshold(self, samples: Samples) -> Tensor:
        own = self._window.maximum().mul_(self._factor)
        return twinned(own.masked_fill_(self._window.count < self._min_samples, torch.nan), samples.tables)

    def _confirmed(self, samples: Samples, excess: Tensor, calm: Tensor) -> Tensor:
        run = self.state["run"].add_(excess).masked_fill_(calm, 0)
        return excess & ((run >= self._confirm) | (samples.tables.num_tensors(excess) >= self._confirm))

    def _remember(self, samples: Samples, sample: Tensor, confirmed: Tensor, enters: Tensor) -> None:
        pending = self.state["pending"]
        largest = torch.maximum(pending, sample)  # without a sample: what was pending
        self._window.push(torch.where(confirmed, largest, sample), samples.tables.feeding(enters))
        pending.copy_(largest).masked_fill_(enters, 0.0)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: amax, the window's maximum, their ratio and the factor allowed."""
        del statistics
        before = threshold / self._factor
        return (
            f"the largest magnitude of {subject(key)} is {number(value)}, {number(value / before)} times the "
            f"largest of the last {self.config.window} samples ({number(before)}); "
            f"up to {number(self._factor)} times is normal"
        )
