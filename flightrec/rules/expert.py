"""The rule ``expert``: one expert of several goes wrong, or the router sends all tokens to one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flightrec.config.expert_rule import ExpertRule, expert_of
from flightrec.records import Key, Statistic
from flightrec.rules.base import DeviceRule, Judgement, Samples, number, subject, twinned
from flightrec.rules.state import SeriesState

RISE = 1.5
"""An expert that gets almost all tokens must have risen by this factor: it may have been the busy one for ever."""


class Expert(DeviceRule):
    """Fires when an expert's amax leaves its own range or its siblings', or when the token counts collapse.

    A series is one expert's tensor; its siblings are the same tensor of the other experts. Two things are judged.

    *Magnitude*: as ``amax_spike``, but it is one expert that must confirm itself, in ``confirm`` samples in a row. An
    amax is also too large above ``siblings`` x the largest of the siblings in the same iteration, without a history.

    *Token counts*: elements are tokens times a width that siblings share, so their share of all siblings' elements is
    the expert's share of the tokens; an expert without a record had none. A share is a sample in every iteration in
    which any sibling had a token, and in which all of them took their turn under a budget. Its usual share is the mean
    of the window before the run began. Faulty are an expert whose share is 0 in ``consecutive`` samples in a row though
    its usual one was ``minimum_share`` / the number of experts or more, and one above ``max_share`` for as long, if
    that is ``RISE`` times the usual one.

    The value is the amax, or, where the magnitude is fine, the share; the threshold goes with it (for a share of 0 it
    is the usual share).
    """

    kind: ClassVar[str] = "expert"
    wants_left_out: ClassVar[bool] = True

    def __init__(self, config: ExpertRule, state: SeriesState) -> None:
        super().__init__(config, state)
        self._factor, self._siblings = config.factor, config.siblings
        self._min_samples, self._min_numel, self._confirm = config.min_samples, config.min_numel, config.confirm
        self._minimum_share, self._max_share = config.minimum_share, config.max_share
        self._consecutive = config.consecutive
        self._zero = torch.zeros((), dtype=torch.float64, device=state.device)
        self._window = state.declare_window("amax", config.window)
        self._shares = state.declare_window("share", config.window)
        state.declare("run", dtype=torch.int32)  # samples in a row with an amax that is too large
        state.declare("pending", dtype=torch.float64)  # the largest of an unconfirmed run
        state.declare("starved", dtype=torch.int32)  # samples in a row without a token
        state.declare("crowded", dtype=torch.int32)  # samples in a row with almost all of them
        state.declare("usual", dtype=torch.float64, initial=float("nan"))  # share before such a run

    def accepts(self, key: Key) -> bool:
        """Only tensors of experts."""
        return expert_of(key, self.config.experts) is not None

    def relatives(self, key: Key) -> Hashable | None:
        """Experts of one layer."""
        found = expert_of(key, self.config.experts)
        return None if found is None else found[0]

    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick; see the class."""
        amax = samples.column(Statistic.AMAX)
        numel = torch.fmax(samples.column(Statistic.NUMEL), samples.column(Statistic.QUANTIZED_NUMEL))
        usable = (amax > 0) & (numel >= self._min_numel) & samples.present
        value = torch.where(usable, amax, self._zero)
        large, unconfirmed, limit = self._judge_magnitude(samples, value.amax(1))
        tokens = torch.where(samples.present & (numel > 0), numel, self._zero).sum(1)
        counted, collapsed, share, share_limit = self._judge_tokens(samples, tokens)
        by_tokens = collapsed & ~large
        first = torch.arange(numel.shape[1], device=numel.device) == 0  # speaks for an expert without a record
        return Judgement(
            sampled=counted | (tokens > 0),
            faulty=large | collapsed,
            rows=torch.where(by_tokens[:, None], first, value > limit[:, None]),
            value=torch.where(by_tokens[:, None], share[:, None], value),
            threshold=torch.where(by_tokens, share_limit, limit),
            watch=unconfirmed & ~collapsed,
        )

    def _judge_magnitude(self, samples: Samples, sample: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bool [S] confirmed excess, bool [S] unconfirmed excess, float64 [S] what is judged against (NaN: nothing)."""
        sampled = sample > 0
        own = self._window.maximum().mul_(self._factor)
        limit = twinned(own.masked_fill_(self._window.count < self._min_samples, torch.nan), samples.tables)
        if samples.tables.siblings is not None:
            largest, count = samples.tables.siblings.others(sample)
            limit = torch.fmin(limit, (largest * self._siblings).masked_fill_(count < 2, torch.nan))
        excess = sample > limit
        run = self.state["run"].add_(excess).clamp_(max=self._confirm).masked_fill_(sampled ^ excess, 0)
        confirmed = excess & (run >= self._confirm)
        unconfirmed = excess ^ confirmed
        pending, enters = self.state["pending"], sampled ^ unconfirmed
        highest = torch.maximum(pending, sample)
        self._window.push(torch.where(confirmed, highest, sample), samples.tables.feeding(enters))
        pending.copy_(highest).masked_fill_(enters, 0.0)
        return confirmed, unconfirmed, limit

    def _judge_tokens(self, samples: Samples, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bool [S] sampled, bool [S] collapsed, float64 [S] share of the tokens, float64 [S] its limit."""
        siblings = samples.tables.siblings
        if siblings is None:
            nothing = torch.zeros_like(tokens)
            return tokens > 0, nothing > 0, nothing, nothing
        total = siblings.total(tokens)
        counted = total > 0
        waiting = samples.took_no_turn()
        if waiting is not None:  # shares are known only when all experts of a layer took their turn
            counted &= siblings.largest(waiting.to(torch.float64)) <= 0
        share = tokens / total
        none = counted & (tokens == 0) & siblings.grouped
        most = counted & (share > self._max_share) & siblings.grouped
        usual = self._usual(none | most, counted)
        starved = self.state["starved"].add_(none).clamp_(max=self._consecutive).masked_fill_(counted ^ none, 0)
        crowded = self.state["crowded"].add_(most).clamp_(max=self._consecutive).masked_fill_(counted ^ most, 0)
        starves = none & (starved >= self._consecutive) & (usual * siblings.size >= self._minimum_share)
        crowds = most & (crowded >= self._consecutive) & (share >= usual * RISE)
        self._shares.push(share, samples.tables.feeding(counted))
        return counted, starves | crowds, share, torch.where(none, usual, self._max_share)

    def _usual(self, odd: Tensor, counted: Tensor) -> Tensor:
        """The share before a run of odd ones, float64 [S]; NaN while too little is known."""
        mean, _ = self._shares.mean_and_std()
        mean = mean.masked_fill_(self._shares.count < self._min_samples, torch.nan)
        begins = (self.state["starved"] + self.state["crowded"]) == 0
        usual = self.state["usual"]
        usual.copy_(torch.where(counted & (begins | ~odd), mean, usual))
        return usual.clone()

    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One sentence: the magnitude and what was normal, or the share of the tokens and what it was before."""
        found = expert_of(key, self.config.experts)
        which = f"expert {found[1]}" if found is not None else "the expert"
        if value == statistics.get(Statistic.AMAX) and value > 0:
            return (
                f"the largest magnitude of {subject(key)} is {number(value)}, above {number(threshold)}: beyond "
                f"{number(self._factor)} times the largest of this expert's last {self.config.window} samples, or "
                f"{number(self._siblings)} times the largest of its siblings now"
            )
        if value == 0:
            return (
                f"{which} got no token in {self._consecutive} iterations in a row ({subject(key)}); before, it got "
                f"{threshold:.1%} of them"
            )
        return (
            f"{which} got {value:.1%} of the tokens ({subject(key)}), more than {threshold:.1%} in "
            f"{self._consecutive} iterations in a row, which it did not before"
        )
