"""The evaluation that ``step()`` launches: statistics matrix in, verdict out, all on the device.

``register`` may be called from any thread (a key is first seen in a hook); everything else runs on the thread that
calls ``step()``, on its current stream. Nothing here waits for the device except
``state_dict`` and ``load_state_dict``. A rule that raises is disabled and told once; the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flightrec.config.rules import AnyRule
from flightrec.records import Key, Phase, RecordLayout, Severity
from flightrec.rules.base import DeviceRule, Samples, statistics_of, subject
from flightrec.rules.kinds import DEVICE_RULES
from flightrec.rules.series import SeriesIndex, SeriesTables, series_name, upload
from flightrec.rules.skips import Skip, SkippedSteps
from flightrec.rules.state import Arming, SeriesState
from flightrec.rules.verdict import RulePart, Verdict

STATE_VERSION = 1


class Gathered:
    """One tick's statistics by series; rules that see the same rows as the same series share them.

    Args:
        statistics: float64 [R, NUM_STATISTICS] on the device.
        valid: bool [R] on the device.
    """

    def __init__(self, statistics: Tensor, valid: Tensor) -> None:
        self.num_rows = statistics.shape[0]
        self._statistics, self._valid = statistics, valid
        self._known: dict[tuple[tuple[int, int], bytes], tuple[Tensor, Tensor]] = {}

    def of(self, tables: SeriesTables) -> tuple[Tensor, Tensor]:
        """float64 [S, K, NUM_STATISTICS] and bool [S, K], which of them were recorded; both read-only."""
        name = (tables.shape, tables.fingerprint)
        if name not in self._known:
            statistics = self._statistics.index_select(0, tables.rows).view(*tables.shape, -1)
            present = self._valid.index_select(0, tables.rows).view(tables.shape)
            self._known[name] = statistics, present if tables.real is None else present & tables.real
        return self._known[name]


class _Runner:
    """One device rule with its series, state and arming."""

    def __init__(self, number: int, config: Any, device: torch.device) -> None:
        self.number = number
        self.config = config
        self.state = SeriesState(device)
        self.rule: DeviceRule = DEVICE_RULES[config.kind](config, self.state)
        self.index = SeriesIndex(device, self.rule.grouping, self.rule.relatives)
        self._arming = Arming(self.state, "rearming", config.rearm)
        self._watch_arming = Arming(self.state, "watch_rearming", config.rearm)
        self._remembered: dict[str, Tensor] = {}  # rows of a loaded state ...
        self._remembered_rows: dict[str, int] = {}  # ... whose series were not seen since

    def add(self, key: Key, row: int) -> None:
        """Take a row if the rule is meant to see it. ``warmup`` is never evaluated."""
        if key.phase is Phase.WARMUP or not self.config.sees(key.layer, key.tensor, key.phase):
            return
        if self.rule.accepts(key):
            self.index.add(key, row)

    def run(self, gathered: Gathered, skip: Skip | None, left_out: Tensor | None) -> RulePart | None:
        """Judge one tick; None while the rule has no series."""
        known = self.state.num_series
        if self.index.num_series == 0:
            return None
        if self.index.num_series > known:
            self.state.grow(self.index.num_series)
            self._recall(known)
        tables = self.index.tables(gathered.num_rows)
        statistics, present = gathered.of(tables)
        if left_out is not None and self.rule.wants_left_out:
            left_out = left_out.index_select(0, tables.rows).view(tables.shape)
            if tables.real is not None:
                left_out &= tables.real
        judgement = self.rule.judge(Samples(statistics, present, tables, skip, left_out))
        fires = self._arming.fire(judgement.sampled, judgement.faulty)
        watches = None
        if judgement.watch is not None:
            watches = self._watch_arming.fire(judgement.sampled, judgement.watch)
        return RulePart(self.number, fires, watches, judgement, tables)

    def state_dict(self) -> dict[str, Any]:
        """Windows and arming, one row a series, with those loaded but not seen since."""
        names = [series_name(key) for key in self.index.series[: self.state.num_series]]
        fields = self.state.export()
        if self._remembered_rows:
            rows = torch.tensor(list(self._remembered_rows.values()), dtype=torch.int64, device="cpu")
            names += self._remembered_rows
            fields = {
                name: torch.cat((values, self._remembered[name].index_select(0, rows)))
                for name, values in fields.items()
            }
        return {"kind": self.config.kind, "series": names, "fields": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the series over; one that is not known yet is remembered until it is, one not in it starts afresh."""
        self.state.reset()
        self._remembered = self.state.adapt(state["fields"], len(state["series"]))
        self._remembered_rows = {name: row for row, name in enumerate(state["series"])}
        self._recall(0)

    def _recall(self, first: int) -> None:
        """Give the series from number ``first`` on what is remembered of them. Synchronises if there is any."""
        if not self._remembered_rows:
            return
        names = [series_name(key) for key in self.index.series[first : self.state.num_series]]
        found = [
            (number, self._remembered_rows.pop(name))
            for number, name in enumerate(names, first)
            if name in self._remembered_rows
        ]
        if found:
            rows = torch.tensor([row for _, row in found], dtype=torch.int64, device="cpu")
            fields = {name: values.index_select(0, rows) for name, values in self._remembered.items()}
            self.state.assign([number for number, _ in found], fields)


class Evaluator:
    """All rules of a configuration over the rows of the statistics matrix.

    Args:
        device: of the statistics.
        rules: the configuration's triggers; their order gives the rule numbers of every verdict. Host rules
            (``exception``, ``manual``) have a number and no part on the device.
        on_failure: told once, with the rule's name and the error, when a rule raises and is disabled.
    """

    def __init__(
        self,
        device: torch.device | str,
        rules: Sequence[AnyRule],
        *,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.rules = tuple(rules)
        self._on_failure = on_failure
        self._runners = {
            number: _Runner(number, rule, self.device)
            for number, rule in enumerate(self.rules)
            if rule.kind in DEVICE_RULES
        }
        self._skips = SkippedSteps(self.device)
        self._pending: deque[RecordLayout] = deque()
        self._rows: set[int] = set()
        self._may_hold = [rule.severity is not Severity.WATCH for rule in self.rules]
        self._new_may_hold = False
        self._hold_mask = upload(np.array(self._may_hold, bool), self.device)
        self._strict = False
        self._branches: tuple[torch.cuda.Stream, ...] = ()
        self.generation = 0
        """Changes whenever ``evaluate`` would do something else: rows that are new, a rule that was disabled."""

    @property
    def wants_left_out(self) -> bool:
        """Whether a rule makes something of rows that were left out."""
        return any(runner.rule.wants_left_out for runner in self._runners.values())

    def register(self, layout: RecordLayout) -> None:
        """Make a row known; rules see it from the next ``evaluate`` on. Any thread; idempotent by row."""
        self._pending.append(layout)

    def set_may_hold(self, rule_index: int, may_hold: bool) -> None:
        """Let a rule hold the evidence, or not (``limit``, ``cooldown``), from the next ``evaluate`` on.

        A rule of severity ``watch`` never holds.
        """
        allowed = may_hold and self.rules[rule_index].severity is not Severity.WATCH
        if allowed != self._may_hold[rule_index]:
            self._may_hold[rule_index] = allowed
            self._new_may_hold = True

    @torch.inference_mode(False)  # the state outlives a loop that is in inference mode
    @torch.no_grad()
    def evaluate(self, tick: int, statistics: Tensor, valid: Tensor, left_out: Tensor | None = None) -> Verdict:
        """Judge one tick. Launches operations on the current stream and returns without waiting.

        Args:
            tick: whose statistics; ticks are evaluated once each, in order.
            statistics: float64 [R, NUM_STATISTICS] on the device, NaN where absent; R covers all rows registered.
            valid: bool [R] on the device, the row was written in this tick.
            left_out: bool [R] on the device, it was not the row's turn; None if all took theirs, or if no rule wants to
                know (``wants_left_out``).
        """
        self.prepare()
        skip = self._skips.look(statistics, valid)
        gathered = Gathered(statistics, valid if skip is None else valid & ~skip.excused)
        branches = self._fork(gathered)
        found = []
        for number, runner in enumerate(tuple(self._runners.values())):
            with torch.cuda.stream(branches[number % len(branches)]) if branches else nullcontext():
                found.append(self._guarded(runner, lambda r: r.run(gathered, skip, left_out)))
        for branch in branches:
            torch.cuda.current_stream(self.device).wait_stream(branch)
        parts = [part for part in found if part is not None]
        return Verdict(tick, len(self.rules), statistics.shape[0], parts, self._hold_mask)

    def _fork(self, gathered: Gathered) -> Sequence[torch.cuda.Stream]:
        """Let the branches begin here, with all that rules share."""
        branches = self._branches[: len(self._runners)]
        if branches:
            for runner in self._runners.values():
                if runner.index.num_series:
                    gathered.of(runner.index.tables(gathered.num_rows))
        for branch in branches:
            branch.wait_stream(torch.cuda.current_stream(self.device))
        return branches

    @torch.no_grad()
    def prepare(self) -> None:
        """Take what was registered and set since the last tick; the first thing that ``evaluate`` does.

        After it, and while ``generation`` stays, ``evaluate`` does the same operations on the same memory whatever the
        tick, so that they can be captured and replayed in its place.
        """
        while self._pending:
            layout = self._pending.popleft()
            if layout.row in self._rows:
                continue
            self._rows.add(layout.row)
            self.generation += 1
            self._skips.add(layout.key, layout.row)
            for runner in tuple(self._runners.values()):
                self._guarded(runner, lambda r: r.add(layout.key, layout.row))  # noqa: B023
        if self._new_may_hold:
            self._hold_mask.copy_(upload(np.array(self._may_hold, bool), self.device))
            self._new_may_hold = False

    @contextmanager
    def capturing(self, branches: Sequence[torch.cuda.Stream] = ()) -> Iterator[None]:
        """In here a rule that raises is not disabled: the error passes, it may be the capture's.

        Args:
            branches: rules are shared out over these streams, so that they become parallel branches of the graph:
                hundreds of small launches in a row wait for as many gaps in the training's kernels.
        """
        self._strict, self._branches = True, tuple(branches)
        try:
            yield
        finally:
            self._strict, self._branches = False, ()

    def explain(
        self, rule_index: int, key: Key, value: float, threshold: float, stats_row: Any, *, watch: bool = False
    ) -> str:
        """One plain sentence with its numbers for a row that fired. On the host.

        Args:
            rule_index: number of the rule.
            key: of the row.
            value: the verdict's value for the row.
            threshold: the verdict's threshold for the row.
            stats_row: the row's NUM_STATISTICS statistics: a sequence, an array or a CPU tensor.
            watch: the rule only watches.
        """
        runner = self._runners.get(rule_index)
        if runner is None:
            return f"{self.rules[rule_index].name}: {subject(key)}"
        sentence = runner.rule.explain(key, value, threshold, statistics_of(stats_row))
        return f"{sentence}, not confirmed yet" if watch else sentence

    def state_dict(self) -> dict[str, Any]:
        """Windows and arming of all rules, CPU tensors keyed by rule name and series. Synchronises."""
        rules = {runner.config.name: runner.state_dict() for runner in self._runners.values()}
        return {"version": STATE_VERSION, "rules": rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave. A rule that is gone, or now of another kind, is passed over.

        Synchronises. A state of another version is passed over whole: windows then fill afresh.
        """
        if state.get("version") != STATE_VERSION:
            return
        for runner in self._runners.values():
            saved = state["rules"].get(runner.config.name)
            if saved is not None and saved["kind"] == runner.config.kind:
                runner.load_state_dict(saved)

    def _guarded(self, runner: _Runner, call: Callable[[_Runner], RulePart | None]) -> RulePart | None:
        """Run a rule; if it raises, disable it and tell."""
        try:
            return call(runner)
        except Exception as error:  # a rule's fault must never reach the training loop
            if self._strict:
                raise
            self._runners.pop(runner.number, None)
            self.generation += 1
            if self._on_failure is not None:
                self._on_failure(runner.config.name, error)
            return None
