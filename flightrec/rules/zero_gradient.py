"""The rule ``zero_gradient``: a gradient that used to be something is all zero."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch

from flightrec.config.expert_rule import expert_of
from flightrec.config.training_rules import ZeroGradientRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.state import SeriesState


class ZeroGradient(DeviceRule):
    """Fires when amax is 0 in ``consecutive`` samples in a row, after ``min_samples`` that were not zero.

    A sample is the largest amax over the microbatches. An empty tensor, or one without a finite value, is none. The
    value is the number of zero samples in a row.

    An expert that gets no tokens has gradients of zero in health, for as long as its router likes. So experts of one
    layer count together: a zero is one only in an iteration in which the same tensor is zero, or not there, in all.
    """

    kind: ClassVar[str] = "zero_gradient"

    def __init__(self, config: ZeroGradientRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        self._none = torch.full((), -1.0, dtype=torch.float64, device=state.device)
        state.declare("run", dtype=torch.int64)  # zero samples in a row
        state.declare("nonzero", dtype=torch.int64)  # samples that were not zero

    def relatives(self, key: Key) -> Hashable | None:
        """Experts of one layer."""
        found = expert_of(key)
        return None if found is None else found[0]

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        amax = samples.column(Statistic.AMAX)
        usable = (amax >= 0) & (samples.column(Statistic.NUMEL) > 0) & samples.present
        sample = torch.where(usable, amax, self._none).amax(1)
        siblings = samples.tables.siblings
        largest = sample if siblings is None else siblings.largest(sample)
        sampled, some = sample >= 0, largest > 0
        zero = sampled & ~some
        run, nonzero = self.state["run"], self.state["nonzero"]
        run.add_(zero).masked_fill_(some, 0)
        nonzero.add_(samples.tables.feeding(sample > 0))
        faulty = zero & (run >= self._consecutive) & (nonzero >= self._min_samples)
        return Judgement(sampled, faulty, usable, run.to(torch.float64)[:, None], float(self._consecutive))

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: for how long it has been zero."""
        del threshold
        numel = number(statistics.get(Statistic.NUMEL, float("nan")))
        return (
            f"{subject(key)} is all zero ({numel} elements), as in {number(value)} samples in a row; before, it was not"
        )
