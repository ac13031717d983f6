"""The rule ``unchanged_parameters``: a parameter that used to be trained stands still."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.expert_rule import expert_of
from flightrec.config.training_rules import UnchangedParametersRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.state import SeriesState


class UnchangedParameters(DeviceRule):
    """Fires when a parameter is the same in ``consecutive`` samples in a row, after ``min_samples`` changes.

    The same is a parameter whose sum, sum of squares and amax are equal to the bit. One that never changed is frozen on
    purpose and stays silent; an iteration whose step a scaler skipped is no sample. The value is the number of samples
    without a change. An expert without tokens has no gradient, and many optimizers then leave it alone: one of several
    experts stands still only when all of them do.
    """

    kind: ClassVar[str] = "unchanged_parameters"

    def __init__(self, config: UnchangedParametersRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._consecutive = config.consecutive
        self._min_samples = config.min_samples
        state.declare("known", dtype=torch.float64, initial=float("nan"), shape=(3,))
        state.declare("run", dtype=torch.int64)  # samples in a row without a change
        state.declare("changes", dtype=torch.int64)

    def relatives(self, key: Key) -> Hashable | None:
        """Experts of one layer."""
        found = expert_of(key)
        return None if found is None else found[0]

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        usable = samples.present & (samples.column(Statistic.NUMEL) > 0)
        sampled = usable.any(1)
        if samples.skip is not None:
            sampled = sampled & ~samples.skip.skipped
        now = torch.stack([self._total(samples, usable, statistic) for statistic in _TELLING], dim=1)
        known, run, changes = self.state["known"], self.state["run"], self.state["changes"]
        seen_before = sampled & (known[:, 0] == known[:, 0])
        same = seen_before & (now == known).all(1)
        changed = seen_before ^ same
        changes.add_(changed)
        if samples.tables.siblings is not None:
            same &= samples.tables.siblings.largest(changed.to(torch.float64)) == 0
        run.add_(same).masked_fill_(sampled ^ same, 0)
        known.copy_(torch.where(sampled[:, None], now, known))
        faulty = same & (run >= self._consecutive) & (changes >= self._min_samples)
        return Judgement(sampled, faulty, usable, run.to(torch.float64)[:, None], float(self._consecutive))

    @staticmethod
    def _total(samples: Samples, usable: Tensor, statistic: Statistic) -> Tensor:
        return samples.column(statistic).nan_to_num(0.0).masked_fill_(~usable, 0.0).sum(1)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: for how long it has not changed."""
        del threshold, statistics
        return f"{subject(key)} has not changed in {number(value)} samples in a row, though it used to"


_TELLING = (Statistic.SUM, Statistic.SUM_OF_SQUARES, Statistic.AMAX)
