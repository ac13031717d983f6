"""The evaluation that ``step()`` launches: statistics matrix in, verdict out, all on the device.

``register`` may be called from any thread (a key is first seen in a hook); everything else runs on the thread that
calls ``step()``, on its current stream. Nothing here waits for the device except ``Verdict.row_firings``,
``state_dict`` and ``load_state_dict``. A rule that raises is disabled and told once; the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flightrec.config.rules import AnyRule
from flightrec.records import Key, Phase, RecordLayout, Severity
from flightrec.rules.base import DeviceRule, Judgement, Samples, statistics_of, subject
from flightrec.rules.kinds import DEVICE_RULES
from flightrec.rules.series import SeriesIndex, SeriesTables, series_name, upload
from flightrec.rules.skips import Skip, SkippedSteps
from flightrec.rules.state import Arming, SeriesState

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class RowFiring:
    """One row on which one rule fired, on the host."""

    rule: int
    row: int
    value: float
    threshold: float
    watch: bool


@dataclass(frozen=True, slots=True)
class _RulePart:
    """What one rule said in one tick, still in its own places [S, K]."""

    rule: int
    fires: Tensor
    watches: Tensor | None
    judgement: Judgement
    tables: SeriesTables

    def rows(self, series: Tensor) -> Tensor:
        """Bool [R]: the rows that show it, of the flagged series."""
        return self._place(self.judgement.rows & series[:, None]) & self.tables.row_is_seen

    def numbers(self, values: Tensor) -> Tensor:
        """float64 [R], NaN for rows that the rule does not see."""
        return torch.where(self.tables.row_is_seen, self._place(values), torch.nan)

    def _place(self, values: Tensor) -> Tensor:
        return values.expand(self.tables.shape).reshape(-1).index_select(0, self.tables.place_of_row)


class Verdict:
    """The answer for one tick.

    Attributes:
        tick: whose.
        hold: bool scalar on the device: a rule that may hold fired with severity ``warning`` or ``fault``.
        any: bool scalar on the device: some rule fired or watches. While it is false the matrices need not be read.

    The matrices ``fired``, ``watch``, ``value`` and ``threshold`` are put together when first asked for, by operations
    on the then current stream, which must follow the one that evaluated; they do not synchronise and do not change
    with later ticks.
    """

    def __init__(self, tick: int, num_rules: int, num_rows: int, parts: Sequence[_RulePart], hold_mask: Tensor) -> None:
        self.tick = tick
        self._shape = (num_rules, num_rows)
        self._parts = {part.rule: part for part in parts}
        self._device = hold_mask.device
        self._matrices: dict[str, Tensor] = {}
        self.hold, self.any = self._summarize(hold_mask)

    @property
    def fired(self) -> Tensor:
        """Bool [num_rules, R]: rows that show the fault of a series that fires now (it was armed)."""
        return self._matrix("fired", lambda part: part.rows(part.fires), False)

    @property
    def watch(self) -> Tensor:
        """Bool [num_rules, R]: rows whose rule only watches, as an amax excess that is not confirmed."""
        return self._matrix("watch", lambda part: None if part.watches is None else part.rows(part.watches), False)

    @property
    def value(self) -> Tensor:
        """float64 [num_rules, R]: what was judged; NaN or arbitrary where the row was not recorded in this tick."""
        return self._matrix("value", lambda part: part.numbers(part.judgement.value), torch.nan)

    @property
    def threshold(self) -> Tensor:
        """float64 [num_rules, R]: what the value was judged against; NaN where nothing was (no history)."""
        return self._matrix("threshold", self._thresholds, torch.nan)

    def row_firings(self) -> list[RowFiring]:
        """All firings, on the host, by rule and row. Synchronises: only after ``any`` was seen to be true."""
        marks = (self.fired | self.watch).cpu().numpy()
        fired, value, threshold = self.fired.cpu().numpy(), self.value.cpu().numpy(), self.threshold.cpu().numpy()
        return [
            RowFiring(int(rule), int(row), float(value[rule, row]), float(threshold[rule, row]), not fired[rule, row])
            for rule, row in np.argwhere(marks)
        ]

    def _thresholds(self, part: _RulePart) -> Tensor:
        threshold = part.judgement.threshold
        if not isinstance(threshold, Tensor):
            threshold = torch.full((part.tables.shape[0],), threshold, dtype=torch.float64, device=self._device)
        return part.numbers(threshold[:, None])

    def _matrix(self, name: str, row: Callable[[_RulePart], Tensor | None], blank: float) -> Tensor:
        if name not in self._matrices:
            dtype = torch.bool if blank is False else torch.float64
            matrix = torch.full(self._shape, blank, dtype=dtype, device=self._device)
            for rule, part in self._parts.items():
                values = row(part)
                if values is not None:
                    matrix[rule].copy_(values)
            self._matrices[name] = matrix
        return self._matrices[name]

    def _summarize(self, hold_mask: Tensor) -> tuple[Tensor, Tensor]:
        num_rules = self._shape[0]
        blank = torch.zeros((), dtype=torch.bool, device=self._device)
        if not self._parts:
            return blank, blank
        flags = [self._parts[rule].fires.any() if rule in self._parts else blank for rule in range(num_rules)]
        flags += [part.watches.any() for part in self._parts.values() if part.watches is not None]
        marks = torch.stack(flags)
        return (marks[:num_rules] & hold_mask).any(), marks.any()


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

    def run(self, statistics: Tensor, valid: Tensor, skip: Skip | None, left_out: Tensor | None) -> _RulePart | None:
        """Judge one tick; None while the rule has no series."""
        known = self.state.num_series
        if self.index.num_series == 0:
            return None
        if self.index.num_series > known:
            self.state.grow(self.index.num_series)
            self._recall(known)
        tables = self.index.tables(statistics.shape[0])
        gathered = statistics.index_select(0, tables.rows).view(*tables.shape, -1)
        present = valid.index_select(0, tables.rows).view(tables.shape)
        if tables.real is not None:
            present &= tables.real
        if left_out is not None and self.rule.wants_left_out:
            left_out = left_out.index_select(0, tables.rows).view(tables.shape)
            if tables.real is not None:
                left_out &= tables.real
        judgement = self.rule.judge(Samples(gathered, present, tables, skip, left_out))
        fires = self._arming.fire(judgement.sampled, judgement.faulty)
        watches = None
        if judgement.watch is not None:
            watches = self._watch_arming.fire(judgement.sampled, judgement.watch)
        return _RulePart(self.number, fires, watches, judgement, tables)

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
        self._may_hold = [rule.severity is not Severity.WATCH for rule in self.rules]
        self._hold_mask: Tensor | None = None

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
            self._hold_mask = None

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
        while self._pending:
            layout = self._pending.popleft()
            self._skips.add(layout.key, layout.row)
            for runner in tuple(self._runners.values()):
                self._guarded(runner, lambda r: r.add(layout.key, layout.row))  # noqa: B023
        parts = []
        skip = self._skips.look(statistics, valid)
        judged = valid if skip is None else valid & ~skip.excused
        for runner in tuple(self._runners.values()):
            part = self._guarded(runner, lambda r: r.run(statistics, judged, skip, left_out))
            if part is not None:
                parts.append(part)
        if self._hold_mask is None:
            self._hold_mask = upload(np.array(self._may_hold, bool), self.device)
        return Verdict(tick, len(self.rules), statistics.shape[0], parts, self._hold_mask)

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

    def _guarded(self, runner: _Runner, call: Callable[[_Runner], _RulePart | None]) -> _RulePart | None:
        """Run a rule; if it raises, disable it and tell."""
        try:
            return call(runner)
        except Exception as error:  # a rule's fault must never reach the training loop
            self._runners.pop(runner.number, None)
            if self._on_failure is not None:
                self._on_failure(runner.config.name, error)
            return None
