"""What the tests of the rules share: rows as plain dictionaries, and the devices they run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flightrec.records import (
    NUM_STATISTICS,
    Key,
    Phase,
    RecordLayout,
    Representation,
    Severity,
    Stage,
    Statistic,
)
from flightrec.rules.evaluate import Evaluator
from flightrec.rules.limits import Limits

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


def layout_of(key: Key, row: int) -> RecordLayout:
    return RecordLayout(row, key, Representation.STATISTICS, (), "float32", -1, (), -1, 0, row)


def healthy(**values: float) -> dict[str, float]:
    """Statistics of a high-precision tensor of 4096 ordinary elements, some replaced (lower-case names)."""
    ordinary = {
        "numel": 4096, "nan_count": 0, "positive_inf_count": 0, "negative_inf_count": 0, "zero_count": 0,
        "amax": 3.0, "sum": 1.0, "sum_of_squares": 4000.0,
    }  # fmt: skip
    return ordinary | values


def loss(value: float) -> dict[str, float]:
    """Statistics of a scalar loss as the kernels give them: sums are over finite values."""
    finite = bool(np.isfinite(value))
    return {
        "numel": 1, "nan_count": float(np.isnan(value)), "positive_inf_count": float(value == np.inf),
        "negative_inf_count": float(value == -np.inf), "zero_count": float(value == 0),
        "amax": abs(value) if finite else np.nan, "sum": value if finite else 0.0,
    }  # fmt: skip


def key(layer: str = "fc", tensor: str = "activation", microbatch: int = 0, phase: Phase = Phase.TRAIN) -> Key:
    return Key(
        layer, tensor, microbatch=microbatch, phase=phase, stage=Stage.LOSS if tensor == "loss" else Stage.FORWARD
    )


def metric(number: int) -> list[Key]:
    """The key of a metric given to ``step``."""
    return [Key("", "metric", f"m{number}", stage=Stage.AFTER_STEP)]


def statistics_row(values: Mapping[str, float]) -> np.ndarray:
    row = np.full(NUM_STATISTICS, np.nan)
    for name, value in values.items():
        row[Statistic[name.upper()]] = value
    return row


class Run:
    """Feeds ticks, given as ``{key: statistics}``, to an evaluator; rows are given at first sight, as the ring does."""

    def __init__(self, rules: Iterable, device: str = "cpu", block: int = 16, **options) -> None:
        self.device = torch.device(device)
        self.rules = list(rules)
        self.evaluator = Evaluator(self.device, self.rules, **options)
        self.rows: dict[Key, int] = {}
        self.block = block
        self.ticks = 0

    def restart(self) -> None:
        """A new process: the state goes over, and rows are seen again in another order."""
        state = self.evaluator.state_dict()
        self.evaluator = Evaluator(self.device, self.rules)
        self.evaluator.load_state_dict(state)
        self.rows = {}

    def tick(self, records: Mapping[Key, Mapping[str, float]], left_out: Iterable[Key] | None = None):
        """Evaluate one tick, in which it was not the turn of ``left_out``; its verdict."""
        for seen in records:
            if seen not in self.rows:
                self.rows[seen] = len(self.rows)
                self.evaluator.register(layout_of(seen, self.rows[seen]))
        num_rows = -(-max(len(self.rows), 1) // self.block) * self.block
        matrix = np.full((num_rows, NUM_STATISTICS), 7.25)  # what an old tick left in rows that are not valid now
        valid = np.zeros(num_rows, bool)
        for seen, values in records.items():
            matrix[self.rows[seen]] = statistics_row(values)
            valid[self.rows[seen]] = True
        passed = None
        if left_out is not None:
            passed = torch.zeros(num_rows, dtype=torch.bool)
            passed[[self.rows[key] for key in left_out]] = True
            passed = passed.to(self.device)
        verdict = self.evaluator.evaluate(
            self.ticks, torch.from_numpy(matrix).to(self.device), torch.from_numpy(valid).to(self.device), passed
        )
        self.ticks += 1
        return verdict

    def fired(
        self, records: Mapping[Key, Mapping[str, float]], rule: int = 0, left_out: Iterable[Key] | None = None
    ) -> set[Key]:
        """Evaluate one tick; the keys on which the rule fired."""
        return self.marked(self.tick(records, left_out).fired, rule)

    def marked(self, matrix: torch.Tensor, rule: int = 0) -> set[Key]:
        """The keys whose row is true in a verdict's matrix."""
        marks = matrix[rule].cpu().numpy()
        assert not marks[len(self.rows) :].any()
        return {seen for seen, row in self.rows.items() if marks[row]}


class ReferenceArming:
    """Plain arming of one series."""

    def __init__(self, rearm: int) -> None:
        self.rearm, self.remaining = rearm, 0

    def fire(self, faulty: bool) -> bool:
        fires = faulty and self.remaining == 0
        self.remaining = self.rearm if faulty else max(0, self.remaining - 1)
        return fires


ALL_HISTORIES = 10_000
HISTORIES = ALL_HISTORIES if os.environ.get("FLIGHTREC_TEST_SLOW") == "1" else 4_000
"""Random histories by which each rule is held against its plain form, all its variants together."""

LIMIT, COOLDOWN = 3, 20
"""Of the incidents that a history's firings may write in ``compare``."""


class PlainSeries:
    """A rule as plain Python for one series; see ``compare``."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.arming = ReferenceArming(rule.rearm)

    def judge(self, values: Mapping[Key, Mapping[str, float]]) -> tuple[bool, set[Key]]:
        """Judge what was recorded in one tick: whether it is a sample, and the keys that show a fault."""
        raise NotImplementedError


class PlainRule:
    """A rule as plain Python for all series of an evaluator; here for series that know nothing of each other."""

    def __init__(self, rule: Any, plain: Callable[[Any], PlainSeries], num_series: int) -> None:
        self.series = [plain(rule) for _ in range(num_series)]

    def restart(self) -> None:
        """The process is another one now."""

    def tick(self, records: Mapping[int, Mapping[Key, Mapping[str, float]]]) -> tuple[set[Key], set[Key]]:
        """What fires and what is only watched, of the series known by now, by number."""
        fired: set[Key] = set()
        for number, values in records.items():
            series = self.series[number]
            sampled, marked = series.judge(values)
            if sampled and series.arming.fire(bool(marked)):
                fired |= marked
        return fired, set()


class Proof(NamedTuple):
    """What ``compare`` saw: rows that fired, incidents that were written, firings that wrote none."""

    fired: int
    written: int
    suppressed: int

    @property
    def tells(self) -> bool:
        """Whether enough happened that a difference would have shown."""
        return self.fired > 40 and self.written > 30 and self.suppressed > 0


class Histories:
    """Random histories of many series: what is recorded when, who joins late, who vanishes and comes back.

    Statistics come out of a pool that ``draw`` made, so that ten thousand histories take seconds.
    """

    def __init__(
        self,
        generator: np.random.Generator,
        draw: Callable[[np.random.Generator], Mapping[str, float] | None],
        keys: list[list[Key]],
        num_ticks: int,
        pool: int,
    ) -> None:
        self.keys = keys
        self.flat = [seen for several in keys for seen in several]
        self.drawn = [draw(generator) for _ in range(pool)]
        self.rows = np.stack([statistics_row(values or {}) for values in self.drawn])
        self.is_there = np.array([values is not None for values in self.drawn])
        width = max(map(len, keys))
        shape = (num_ticks, len(keys), width)
        columns = np.arange(width)  # no two keys of a series have the same record in a tick: there are no ties
        self.chosen = generator.integers(0, pool // width, shape) * width + columns
        there = self.is_there[self.chosen]
        ticks = np.arange(num_ticks)[:, None]
        joins = np.where(generator.random(len(keys)) < 0.3, generator.integers(0, 12, len(keys)), 0)
        gone = generator.integers(0, num_ticks, len(keys))
        back = gone + np.where(generator.random(len(keys)) < 0.5, generator.integers(1, 20, len(keys)), 0)
        away = (ticks < joins) | ((ticks >= gone) & (ticks < back))
        real = np.array([[column < len(several) for column in range(width)] for several in keys])
        self.there = there & ~away[:, :, None] & real
        self.places = np.flatnonzero(real.reshape(-1))

    def records(self, tick: int) -> dict[int, dict[Key, Mapping[str, float]]]:
        """What was recorded, by series."""
        found: dict[int, dict[Key, Mapping[str, float]]] = {}
        chosen, there = self.chosen[tick].tolist(), self.there[tick].tolist()
        for number, several in enumerate(self.keys):
            found[number] = {
                seen: self.drawn[chosen[number][column]] for column, seen in enumerate(several) if there[number][column]
            }
        return found


def compare(
    rule: Any,
    plain: Callable[[Any], PlainSeries] | None,
    draw: Callable[[np.random.Generator], Mapping[str, float] | None],
    *,
    device: str = "cpu",
    seed: int = 0,
    num_series: int = HISTORIES // 4,
    num_ticks: int = 40,
    pool: int = 500,
    keys: Callable[[int], list[Key]] = lambda number: [key(f"layer.{number}", microbatch=m) for m in range(2)],
    whole: Callable[[Any], PlainRule] | None = None,
) -> Proof:
    """Hold a rule against its plain form on random histories.

    Series join late, vanish and come back; three times the process is another one, that sees the rows in another
    order. Each series' firings then ask ``Limits`` for an incident, as if it were alone in its run.

    Args:
        rule: its configuration.
        plain: makes the plain form of one series.
        draw: gives the statistics of one of a series' ``keys``, or None if it was not recorded.
        device: where the rule runs.
        seed: of the histories.
        num_series: how many histories.
        num_ticks: how long each is.
        pool: how many different records there are.
        keys: of one series, by its number.
        whole: makes the plain form of all series, in place of ``plain``, where they know of each other.
    """
    generator = np.random.default_rng(seed)
    histories = Histories(generator, draw, [keys(number) for number in range(num_series)], num_ticks, pool)
    plain_rule = whole(rule) if whole is not None else PlainRule(rule, plain, num_series)
    restarts = sorted(generator.choice(np.arange(5, num_ticks), 3, replace=False).tolist())
    evaluator = Evaluator(torch.device(device), [rule])
    num_rows = len(histories.flat)
    row_of = generator.permutation(num_rows)  # of each key
    registered = np.zeros(num_rows, bool)
    series_of_key = np.repeat(np.arange(num_series), [len(several) for several in histories.keys])
    fired_at: list[list[int]] = [[] for _ in range(num_series)]
    number_of = {seen: number for number, seen in enumerate(histories.flat)}
    num_fired = 0
    for tick in range(num_ticks):
        if tick in restarts:
            plain_rule.restart()
            state = evaluator.state_dict()
            evaluator = Evaluator(torch.device(device), [rule])
            evaluator.load_state_dict(state)
            row_of, registered = generator.permutation(num_rows), np.zeros(num_rows, bool)
        there = histories.there[tick].reshape(-1)[histories.places]
        chosen = histories.chosen[tick].reshape(-1)[histories.places]
        for number in np.flatnonzero(there & ~registered).tolist():
            evaluator.register(layout_of(histories.flat[number], int(row_of[number])))
        registered |= there
        matrix = np.full((num_rows, NUM_STATISTICS), 7.25)  # what an old tick left in rows that are not valid now
        matrix[row_of[there]] = histories.rows[chosen[there]]
        valid = np.zeros(num_rows, bool)
        valid[row_of[there]] = True
        verdict = evaluator.evaluate(tick, torch.from_numpy(matrix).to(device), torch.from_numpy(valid).to(device))
        known = set(series_of_key[registered].tolist())
        records = {number: values for number, values in histories.records(tick).items() if number in known}
        fired, watched = plain_rule.tick(records)
        for marks, expected in ((verdict.fired, fired), (verdict.watch, watched)):
            found = np.flatnonzero(marks[0].cpu().numpy()[row_of]).tolist()
            wanted = sorted(number_of[seen] for seen in expected)
            assert found == wanted, (tick, [histories.flat[number] for number in set(found) ^ set(wanted)][:9])
        for number in {int(series_of_key[number_of[seen]]) for seen in fired}:
            fired_at[number].append(tick)
        num_fired += len(fired)
    written = [_compare_limits(rule, ticks, restarts) for ticks in fired_at]
    return Proof(num_fired, sum(written), sum(map(len, fired_at)) - sum(written))


def _compare_limits(rule: Any, ticks: list[int], restarts: list[int]) -> int:
    """Hold ``Limits`` against plain counting for the firings of one history; how many incidents are written."""
    limits = Limits([rule], LIMIT, COOLDOWN)
    ordinary = LIMIT if rule.severity is Severity.FAULT else LIMIT - 1  # one is kept for faults
    written: list[int] = []
    process = 0
    for tick in ticks:
        if (now := sum(tick >= restart for restart in restarts)) != process:
            process, state = now, limits.state_dict()
            limits = Limits([rule], LIMIT, COOLDOWN)
            limits.load_state_dict(state)
        cools = bool(written) and tick - written[-1] < COOLDOWN
        cools = cools and not any(written[-1] < restart <= tick for restart in restarts)
        allowed = limits.allows(0, tick)
        assert allowed == (len(written) < ordinary and not cools), (ticks, tick)
        if allowed:
            limits.count(0, tick)
            written.append(tick)
    return len(written)
