"""The rule ``missing_record``: a tensor that used to be recorded no longer is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch

from flightrec.config.expert_rule import expert_of
from flightrec.config.training_rules import MissingRecordRule
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject
from flightrec.rules.state import SeriesState


class MissingRecord(DeviceRule):
    """Fires when a series has been absent for more iterations than its own rhythm explains.

    That is more than ``consecutive`` and more than ``factor`` x the longest absence that it came back from, after
    ``min_samples`` iterations in which it was there. So a tensor that is recorded in every n-th iteration is not
    missing, nor is one whose turn it is not under a budget, nor are gradients while a scaler skips steps: such
    iterations do not count. The value is the number of iterations without it. It fires once, and again when it has
    come back for ``rearm`` iterations and is gone again. An expert without tokens has no gradients in health: one of
    several experts of a layer is there when any of them is.
    """

    kind: ClassVar[str] = "missing_record"
    wants_left_out: ClassVar[bool] = True

    def __init__(self, config: MissingRecordRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._consecutive = float(config.consecutive)
        self._factor = config.factor
        self._min_samples = config.min_samples
        state.declare("gap", dtype=torch.int64)  # iterations since it was last there
        state.declare("longest", dtype=torch.int64)  # gap that it came back from
        state.declare("samples", dtype=torch.int64)

    def relatives(self, key: Key) -> Hashable | None:
        """Experts of one layer."""
        found = expert_of(key)
        return None if found is None else found[0]

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        there = samples.present.any(1)
        if samples.tables.siblings is not None:
            there = samples.tables.siblings.largest(there.to(torch.float64)) > 0
        gap, longest, count = self.state["gap"], self.state["longest"], self.state["samples"]
        longest.copy_(torch.where(there, torch.maximum(longest, gap), longest))
        missed = ~there
        for no_chance in (samples.excused(), samples.took_no_turn()):
            if no_chance is not None:
                missed = missed & ~no_chance
        gap.add_(missed).masked_fill_(there, 0)
        count.add_(there)
        threshold = (longest.to(torch.float64) * self._factor).clamp_(min=self._consecutive)
        faulty = (gap > threshold) & (count >= self._min_samples)
        first = torch.arange(samples.present.shape[1], device=gap.device) == 0
        rows = first.expand(samples.present.shape)  # the first of the microbatches speaks for all
        return Judgement(there | faulty, faulty, rows, gap.to(torch.float64)[:, None], threshold)

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: for how long it has been missing."""
        del statistics
        return (
            f"{subject(key)} has not been recorded for {number(value)} iterations, though it used to be; up to "
            f"{number(threshold)} are normal here"
        )
