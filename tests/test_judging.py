"""Judging beside the training, replayed, against judging in order: the same verdicts to the bit, the same evidence.

On the CPU the captured functions are called in place of their graphs, in the order of the two streams.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from rules_support import DEVICES, Run, healthy, key, loss, statistics_row

from flightrec.config.rules import RULE_CLASSES
from flightrec.flush.verdicts import VerdictQueue
from flightrec.judging import Beside, Judge
from flightrec.records import NO_MICROBATCH, SKIPPED_STEP, Key, Phase, Stage
from flightrec.ring.ring import Ring
from flightrec.rules.evaluate import Evaluator

ITERATIONS, AFTER, LATENCY = 3, 1, 2
EAGER = {
    "metric_threshold": {"above": 60.0}, "amax_spike": {"min_samples": 4, "window": 8, "confirm": 1},
    "loss_drift": {"short": 4, "long": 16}, "expert": {"min_samples": 4, "confirm": 1, "consecutive": 1},
    "loss_jump": {"min_samples": 8}, "metric_jump": {"min_samples": 8},
    "underflow": {"min_samples": 4}, "saturation": {"min_samples": 4}, "quantization_error": {"min_samples": 4},
    "stale_scale": {"consecutive": 1, "min_samples": 1}, "zero_gradient": {"consecutive": 1, "min_samples": 2},
    "missing_record": {"min_samples": 3, "consecutive": 2},
    "unchanged_parameters": {"consecutive": 1, "min_samples": 2},
    "loss_scale_collapse": {"minimum": 1e9, "consecutive": 1, "min_samples": 1},
}  # fmt: skip
"""Settings with which short histories have something to tell, by rule."""


def make_rules():
    rules = []
    for kind, cls in RULE_CLASSES.items():
        if not cls.is_host:
            wanted = EAGER.get(kind, {})
            rules.append(cls(**{name: value for name, value in wanted.items() if name in cls.model_fields}))
    return rules


def draw(generator: np.random.Generator, tick: int, num_layers: int) -> dict[Key, dict[str, float]]:
    """One iteration of a model of experts in FP8, in which now and then something is wrong."""

    def odd(probability: float = 0.02) -> bool:
        return bool(generator.random() < probability)

    records = {key("", "loss", NO_MICROBATCH): loss(np.nan if odd() else (2.5 + generator.random()) * (1 + 40 * odd()))}
    metrics = {"loss_scale": 2.0 ** generator.integers(10, 20), SKIPPED_STEP: float(odd(0.1)), "norm": 50 + 20 * odd()}
    for name, value in metrics.items():
        records[Key("", "metric", name, stage=Stage.AFTER_STEP)] = loss(float(value))
    for number in range(num_layers):
        layer = f"experts.{number}" if number % 2 else f"layer.{number}"
        is_gone, is_frozen = number == 0 and tick in range(33, 43), number == 2 and tick in range(48, 54)
        for tensor in ("activation", "gradient", "wgrad", "parameter"):
            is_dead = tensor == "wgrad" and odd(0.1)
            for microbatch in range(1 if tensor == "parameter" else 2):
                if odd() or is_gone:
                    continue
                codes = {
                    "quantized_numel": 4096, "quantized_nan_count": float(odd()), "quantized_inf_count": 0,
                    "underflow_count": 4000.0 * odd() + int(40 * generator.random()), "clipped_count": 3000.0 * odd(),
                    "squared_error": 4.0 + 4000 * odd(), "quantized_largest": 448.0, "scale_min": 2.0,
                    "scale_max": 2.0 + odd(), "range_ratio": 0.5 + 40 * odd(), "scale_inverse_error": float(odd()),
                    "scale_nonfinite_count": 0, "zero_scale_count": 0,
                }  # fmt: skip
                amax = (3 + generator.random()) * (1 + 99 * odd()) * (not is_dead)
                values = healthy(amax=amax, nan_count=float(odd()), sum=generator.random())
                if is_frozen:
                    values |= healthy()
                at = NO_MICROBATCH if tensor == "parameter" else microbatch
                records[key(layer, tensor, at)] = values | codes
        if tick % 3 == 0:
            records[key(layer, "activation", 0, Phase.RECOMPUTE)] = healthy(amax=1 + generator.random())
    return records


class Judged:
    """A ring, all rules and a way to the host; statistics are those of the history, whatever was recorded."""

    def __init__(self, device: str, *, replays: bool | None, takes_turns: bool = True) -> None:
        self.device = torch.device(device)
        beside = Beside(self.device)
        self.failures: list[object] = []
        with beside.allocating():
            rules = make_rules()
            self.evaluator = Evaluator(self.device, rules, on_failure=lambda *told: self.failures.append(told))
        latency = LATENCY + (replays is not False)
        self.ring = Ring(
            self.device, iterations=ITERATIONS, after=AFTER, latency=latency, memory_bytes=1 << 20,
            on_layout=self.evaluator.register,
        )  # fmt: skip
        self.queue = VerdictQueue(self.device, 8)
        self.judge = Judge(
            self.ring, self.evaluator, self.queue, beside, lambda part, call, *args: call(*args),
            takes_turns=takes_turns, replays=replays,
        )  # fmt: skip
        self.ring.begin(0)
        self.tiny = torch.ones(1, device=self.device)
        self.told: list[Told] = []

    def tick(self, tick, records, *, hold=False, releases=(), left_out=None) -> None:
        rows = torch.from_numpy(np.stack([statistics_row(values) for values in records.values()])).to(self.device)
        for number, seen in enumerate(records):
            layout = self.ring.record(seen, high_precision=self.tiny, keep=frozenset())
            values, _ = self.ring._registry.statistics.row(layout.row)
            values.index_copy_(0, self.ring.slot_view(tick), rows[number : number + 1])
        self.ring.join()
        self.ring.commit()
        state = self.ring.slots.decode(self.ring.slots.state.cpu())
        pairs = [(state.slot_of(held), held) for held in releases if state.slot_of(held) is not None]
        marks = None
        if left_out is not None:
            marks = np.zeros(self.ring.shape[2], bool)
            marks[[row for row in left_out if row < len(marks)]] = True
        self.judge.close(tick, pairs, hold, marks)
        self.ring.begin(tick + 1)

    def take(self, *, wait: bool = True) -> None:
        """What has come to the host; views are overwritten after some ticks."""
        for view in self.queue.poll(wait=wait):
            state = self.ring.slots.decode(torch.from_numpy(view.slots.astype(np.int64)))
            held = {tick for tick, held in zip(state.slot_tick, state.held, strict=True) if held}
            rows = [self.ring.layouts[number].row for number in self.ring.index(view.tick).layout_ids]
            self.told.append(Told(view.tick, bits(view.firings), view.statistics[sorted(rows)].tobytes(), held))


class Told(NamedTuple):
    tick: int
    firings: list
    statistics: bytes
    held: set[int]


def bits(firings):
    """Firings with their numbers' bits: a threshold is NaN where there is no history."""
    return [(f.rule, f.row, np.float64(f.value).tobytes(), np.float64(f.threshold).tobytes(), f.watch) for f in firings]


@pytest.mark.parametrize("device", DEVICES)
def test_replayed_judging_tells_what_judging_in_order_tells(device):
    """All device rules; rows that join, limits, holds, releases, turns and a loaded state in the middle."""
    generator, num_ticks = np.random.default_rng(3), 70
    pair = Judged(device, replays=False), Judged(device, replays=True)
    known, ahead = pair
    fault_at, held_since, saved = {15, 16, 38, 62}, {}, {}
    for tick in range(num_ticks):
        records = draw(generator, tick, 4 if tick < 25 else 6)
        left_out = generator.integers(0, 30, 3) if generator.random() < 0.3 else None
        due = [held for held, since in held_since.items() if since == tick - 9]
        for one in pair:
            for number in range(len(one.evaluator.rules)):
                one.evaluator.set_may_hold(number, tick % 20 == 7)
            if tick == 45:  # a loop that goes back to its checkpoint
                one.take()
                one.evaluator.load_state_dict(saved)
            one.tick(tick, records, hold=tick in fault_at, releases=due, left_out=left_out)
            one.take(wait=tick % 13 == 0 or tick == 30)
        if tick == 30:
            saved = known.evaluator.state_dict()
            assert_states_equal(saved, ahead.evaluator.state_dict())
        for held in known.told[-1].held if known.told else ():
            held_since.setdefault(held, tick)
    for one in pair:
        one.take()
        assert one.failures == []
        assert [told.tick for told in one.told] == list(range(num_ticks))
    assert ahead.judge.is_replayed
    assert len(ahead.judge._retired) <= 1
    for first, second in zip(known.told, ahead.told, strict=True):
        assert first[:3] == second[:3]
        if first.tick in fault_at:
            recent = set(range(first.tick - ITERATIONS + 1, first.tick + 1))
            assert first.tick in second.held
            assert len(recent & second.held) >= len(recent & first.held)
    fired = {make_rules()[firing[0]].kind for told in known.told for firing in told.firings}
    assert {rule.kind for rule in make_rules()} - fired <= {"loss_drift"}
    assert_states_equal(known.evaluator.state_dict(), ahead.evaluator.state_dict())


def assert_states_equal(first, second):
    assert first["rules"].keys() == second["rules"].keys()
    for name, state in first["rules"].items():
        assert state["series"] == second["rules"][name]["series"]
        for field, values in state["fields"].items():
            assert values.numpy().tobytes() == second["rules"][name]["fields"][field].numpy().tobytes(), (name, field)


@pytest.mark.parametrize("device", DEVICES)
def test_the_fault_of_a_replayed_tick_has_its_iterations_and_those_beyond(device):
    one = Judged(device, replays=True, takes_turns=False)
    calm = {key("fc"): healthy(), key("", "loss", NO_MICROBATCH): loss(2.0)}
    for tick in range(24):
        bad = {key("fc"): healthy(nan_count=1.0)} if tick == 20 else {}
        one.tick(tick, calm | bad)
    one.take()
    assert one.judge.is_replayed
    assert [told.tick for told in one.told if told.firings] == [20]
    assert one.told[-1].held == {18, 19, 20, 21}
    state = one.ring.slots.decode(one.ring.slots.state.cpu())
    assert {20, 21, 22, 23, 24} <= set(state.slot_tick)  # held ones, and those that go on


@pytest.mark.parametrize("device", DEVICES)
def test_the_bytes_for_the_host_tell_what_the_verdict_holds(device):
    generator, run, number = np.random.default_rng(5), Run(make_rules(), device), 0
    slots = torch.arange(5, device=device)
    for tick in range(40):
        verdict = run.tick(draw(generator, tick, 4))
        statistics = torch.rand(3, 7, dtype=torch.float64, device=device)
        packed, form = verdict.pack(slots, statistics)
        data = packed.cpu().numpy()
        found = form.firings(data)
        assert bits(found) == bits(verdict.row_firings())
        words = data[: form.num_words * 8].view(np.float64)
        assert words[0] == verdict.any.item()
        assert words[1:6].tolist() == [0, 1, 2, 3, 4]
        assert np.array_equal(words[6:].reshape(form.shape), statistics.cpu().numpy())
        number += len(found)
    assert number > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_capture_that_fails_leaves_the_run_as_it_was(caplog):
    """An operation that waits makes a capture invalid; judging goes on launch by launch, and dropout still works."""
    one = Judged("cuda", replays=True)
    look = one.evaluator._skips.look

    def waits(statistics, valid):
        if torch.cuda.is_current_stream_capturing():
            statistics.sum().item()
        return look(statistics, valid)

    one.evaluator._skips.look = waits
    generator = np.random.default_rng(0)
    for tick in range(12):
        one.tick(tick, draw(generator, 1, 4))
        torch.nn.functional.dropout(torch.ones(64, device="cuda"))
    assert not one.judge.is_replayed
    assert not one.judge._may_capture
    assert len([record for record in caplog.records if "cannot be captured" in record.message]) == 1
    assert [view.tick for view in one.queue.poll(wait=True)] == list(range(12))
    graph = torch.cuda.CUDAGraph()  # the run's own captures still work
    with torch.cuda.graph(graph):
        out = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert out.numel() == 64
