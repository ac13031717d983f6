"""What the tests of the rules share: rows as plain dictionaries, and the devices they run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from flightrec.records import NUM_STATISTICS, Key, Phase, RecordLayout, Representation, Stage, Statistic
from flightrec.rules.evaluate import Evaluator

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


class PlainSeries:
    """A rule as plain Python for one series; see ``compare``."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def judge(self, values: Mapping[Key, Mapping[str, float]]) -> tuple[bool, set[Key]]:
        """Judge what was recorded in one tick: whether it is a sample, and the keys that show a fault."""
        raise NotImplementedError


def compare(
    rule: Any,
    plain: Callable[[Any], PlainSeries],
    draw: Callable[[np.random.Generator], Mapping[str, float] | None],
    *,
    device: str = "cpu",
    seed: int = 0,
    num_series: int = 150,
    num_ticks: int = 60,
    keys: Callable[[int], list[Key]] = lambda number: [key(f"layer.{number}", microbatch=m) for m in range(2)],
) -> int:
    """Hold a rule against its plain form on random histories with gaps and restarts; the rows that fired.

    Series join late; ``draw`` gives the statistics of one of a series' ``keys``, or None if it was not recorded.
    """
    generator = np.random.default_rng(seed)
    run = Run([rule], device)
    series = [plain(rule) for _ in range(num_series)]
    arming = [ReferenceArming(rule.rearm) for _ in range(num_series)]
    known: set[int] = set()
    num_fired = 0
    for tick in range(num_ticks):
        if tick and tick % 23 == 0:
            run.restart()
            known.clear()
        records, expected = {}, set()
        for number in range(num_series if tick > 8 else num_series // 3):
            values = {seen: draw(generator) for seen in keys(number)}
            values = {seen: statistics for seen, statistics in values.items() if statistics is not None}
            known |= {number} if values else set()
            records |= values
            if number not in known:
                continue
            sampled, marked = series[number].judge(values)
            if sampled and arming[number].fire(bool(marked)):
                expected |= marked
        assert run.fired(records) == expected, f"tick {tick}"
        num_fired += len(expected)
    return num_fired
