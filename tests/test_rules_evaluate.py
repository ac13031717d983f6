from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rules_support import DEVICES, Run, healthy, key, layout_of, loss, statistics_row
from torch.utils._python_dispatch import TorchDispatchMode

from flightrec.config.quantizer_rules import UnderflowRule
from flightrec.config.rules import (
    RULE_CLASSES,
    AmaxSpikeRule,
    ExceptionRule,
    LossJumpRule,
    ManualRule,
    NonfiniteRule,
    default_rules,
)
from flightrec.records import NO_MICROBATCH, NUM_STATISTICS, Key, Phase, Stage
from flightrec.rules.base import Judgement, number, statistics_of, subject
from flightrec.rules.evaluate import Evaluator
from flightrec.rules.kinds import DEVICE_RULES
from flightrec.rules.nonfinite import Nonfinite


class Calls(TorchDispatchMode):
    """Names of the operations that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def model_records(generator, num_layers=4, num_microbatches=2):
    """An iteration of a small model in FP8, healthy."""
    records = {key("", "loss", NO_MICROBATCH): loss(2.5 + 0.01 * generator.standard_normal())}
    for layer in range(num_layers):
        for microbatch in range(num_microbatches):
            for tensor in ("activation", "gradient", "output"):
                codes = {"quantized_numel": 4096, "quantized_nan_count": 0, "quantized_inf_count": 0}
                records[key(f"layer.{layer}", tensor, microbatch)] = (
                    healthy(amax=3 + generator.random()) | codes | {"underflow_count": int(40 * generator.random())}
                )
        records[key(f"layer.{layer}", "weight", 0, Phase.RECOMPUTE)] = healthy()
    return records


def bits(matrix):
    return matrix.view(torch.int64) if matrix.dtype == torch.float64 else matrix


@pytest.mark.parametrize("device", DEVICES)
def test_verdict_shapes_and_silence(device):
    generator = np.random.default_rng(0)
    run = Run(default_rules(), device)
    for _ in range(150):
        verdict = run.tick(model_records(generator))
        assert not verdict.any.item()
        assert not verdict.hold.item()
    num_rows = -(-len(run.rows) // run.block) * run.block
    for matrix, dtype in (
        (verdict.fired, torch.bool),
        (verdict.watch, torch.bool),
        (verdict.value, torch.float64),
        (verdict.threshold, torch.float64),
    ):
        assert matrix.shape == (len(default_rules()), num_rows)
        assert matrix.dtype == dtype
        assert matrix.device.type == device
    assert not verdict.fired.any()
    assert verdict.row_firings() == []
    activation = run.rows[key("layer.0")]
    assert 12 < verdict.threshold[2, activation].item() < 16
    assert verdict.threshold[3, activation].item() == 0.25


def test_rules_in_the_order_of_the_configuration_and_host_rules_stay_empty():
    rules = [ManualRule(), NonfiniteRule(name="outputs", tensors=["output"]), ExceptionRule(), NonfiniteRule()]
    run = Run(rules)
    verdict = run.tick({key("a", "output"): healthy(nan_count=1), key("a", "weight"): healthy(nan_count=2)})
    assert verdict.fired.sum(1).tolist() == [0, 1, 0, 2]
    firings = [
        (firing.rule, firing.row, firing.value, firing.threshold, firing.watch) for firing in verdict.row_firings()
    ]
    assert firings == [(1, 0, 1.0, 0.0, False), (3, 0, 1.0, 0.0, False), (3, 1, 2.0, 0.0, False)]
    assert (
        run.evaluator.explain(0, key("a"), 0.0, 0.0, [np.nan] * 16) == "manual: activation of a (microbatch 0, forward)"
    )


def test_nothing_registered_and_only_host_rules():
    for rules in ([], [ManualRule()], default_rules()):
        verdict = Run(rules).tick({})
        assert not verdict.any
        assert not verdict.hold
        assert verdict.fired.shape == (len(rules), 16)


def test_layer_patterns():
    run = Run([NonfiniteRule(layers="blocks.*.fc1"), NonfiniteRule(name="b", layers=[r"re:blocks\.[01]\..*", "head"])])
    layers = ["blocks.0.fc1", "blocks.12.mlp.fc1", "blocks.1.fc2", "blocks.2.fc2", "head", "heads", "Blocks.0.fc1"]
    verdict = run.tick({key(layer): healthy(nan_count=1) for layer in layers})
    assert {seen.layer for seen in run.marked(verdict.fired, 0)} == {"blocks.0.fc1", "blocks.12.mlp.fc1"}
    assert {seen.layer for seen in run.marked(verdict.fired, 1)} == {"blocks.0.fc1", "blocks.1.fc2", "head"}


def test_may_hold_is_applied_at_the_next_evaluate():
    run = Run([NonfiniteRule(rearm=1), UnderflowRule(rearm=1)])
    bad, good = {key(): healthy(nan_count=1)}, {key(): healthy()}
    assert run.tick(bad).hold
    run.tick(good)
    run.evaluator.set_may_hold(0, False)
    verdict = run.tick(bad)
    assert run.marked(verdict.fired) == {key()}
    assert not verdict.hold
    run.evaluator.set_may_hold(0, True)
    run.tick(good)
    assert run.tick(bad).hold


def test_earlier_verdict_is_not_changed_by_later_ticks():
    run = Run([NonfiniteRule(rearm=1), AmaxSpikeRule(min_samples=1, min_numel=1)])
    run.tick({key(): healthy(amax=1.0)})
    first = run.tick({key(): healthy(nan_count=1, amax=8.0)})
    for _ in range(3):
        run.tick({key(): healthy(amax=2.0)})
    assert run.marked(first.fired) == {key()}
    assert run.marked(first.watch, 1) == {key()}
    assert first.value[1, 0].item() == 8.0
    assert first.threshold[1, 0].item() == 4.0


def test_registration_is_idempotent_by_row_and_a_new_shape_changes_nothing():
    run = Run([NonfiniteRule()])
    run.tick({key(): healthy()})
    for _ in range(3):
        run.evaluator.register(layout_of(key(), 0))
    assert run.fired({key(): healthy(nan_count=1)}) == {key()}
    assert len(run.evaluator.state_dict()["rules"]["nonfinite"]["series"]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_rows_join_during_a_run_across_blocks(device):
    run = Run([NonfiniteRule(), AmaxSpikeRule(min_samples=1, min_numel=1, confirm=1)], device)
    records = {}
    for tick in range(40):
        records |= {key(f"layer.{tick}.{number}"): healthy(amax=1.0) for number in range(20)}
        assert not run.tick(records).any.item()
    last = key("layer.39.19")
    verdict = run.tick(records | {last: healthy(nan_count=1, amax=3.0), key("layer.0.0"): healthy(amax=5.0)})
    assert run.marked(verdict.fired, 0) == {last}
    assert run.marked(verdict.fired, 1) == {key("layer.0.0")}


def test_state_survives_a_restart_by_torch_save():
    generator = np.random.default_rng(0)
    runs = [Run(default_rules()), Run(default_rules())]
    history = [model_records(generator) for _ in range(70)]
    for records in history:
        for run in runs:
            run.tick(records)
    buffer = io.BytesIO()
    torch.save(runs[1].evaluator.state_dict(), buffer)
    buffer.seek(0)
    fresh = Run(default_rules())
    fresh.evaluator.load_state_dict(torch.load(buffer))
    spike = model_records(generator) | {
        key("layer.1"): healthy(amax=99.0),
        key("layer.2"): healthy(amax=99.0),
        key("", "loss", NO_MICROBATCH): loss(9.0),
    }
    kept, restarted = runs[0].tick(spike), fresh.tick(spike)
    assert kept.fired.any()
    for rule in range(len(default_rules())):
        assert runs[0].marked(kept.fired, rule) == fresh.marked(restarted.fired, rule)


def test_series_not_seen_since_a_restart_are_carried_on():
    run = Run([AmaxSpikeRule(min_samples=1, min_numel=1, confirm=1)])
    run.tick({key("a"): healthy(amax=1.0), key("b"): healthy(amax=2.0)})
    run.restart()
    run.tick({key("a"): healthy(amax=1.0)})
    run.restart()
    assert run.fired({key("b"): healthy(amax=7.0)}) == set()
    assert run.fired({key("b"): healthy(amax=29.0)}) == {key("b")}


def test_loading_overwrites_series_that_are_known_and_passes_over_what_does_not_fit():
    rule = AmaxSpikeRule(min_samples=1, min_numel=1, confirm=1)
    old, new = Run([rule]), Run([rule])
    old.tick({key(): healthy(amax=1.0)})
    new.tick({key(): healthy(amax=500.0)})
    new.evaluator.load_state_dict(old.evaluator.state_dict())
    assert new.fired({key(): healthy(amax=5.0)}) == {key()}

    state = old.evaluator.state_dict()
    for foreign in (
        {**state, "version": 99},
        {**state, "rules": {}},
        {**state, "rules": {"amax_spike": {**state["rules"]["amax_spike"], "kind": "underflow"}}},
    ):
        other = Run([rule])
        other.evaluator.load_state_dict(foreign)
        assert other.fired({key(): healthy(amax=5.0)}) == set()


class Broken(Nonfinite):
    """A rule that raises in its third tick."""

    kind = "broken"
    ticks = 0

    def judge(self, samples) -> Judgement:
        self.ticks += 1
        if self.ticks == 3:
            raise RuntimeError("boom")
        return super().judge(samples)


class BrokenRule(NonfiniteRule):
    kind: str = "broken"


def test_a_rule_that_raises_is_disabled_and_told_once(monkeypatch):
    monkeypatch.setitem(DEVICE_RULES, "broken", Broken)
    failures = []
    run = Run(
        [BrokenRule(name="mine", rearm=1), NonfiniteRule(rearm=1)],
        on_failure=lambda name, error: failures.append((name, str(error))),
    )
    fired = [run.tick({key(): healthy(nan_count=count)}).fired.any(1).tolist() for count in (1, 0, 1, 0, 1)]
    assert fired == [[True, True], [False, False], [False, True], [False, False], [False, True]]
    assert failures == [("mine", "boom")]


@pytest.mark.parametrize("device", DEVICES)
def test_no_synchronising_operation_is_dispatched(device):
    generator = np.random.default_rng(0)
    run = Run([*default_rules(), NonfiniteRule(name="masks", allow=["-inf"], min_samples=2)], device)
    history = [model_records(generator) for _ in range(6)]
    for records in history[:-1]:
        run.tick(records)
    with Calls() as calls:
        verdict = run.evaluator.evaluate(*prepared(run, history[-1]))
        for matrix in (verdict.fired, verdict.watch, verdict.value, verdict.threshold):
            assert matrix.shape[0] == len(run.rules)
    forbidden = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "index.Tensor", "item", "equal")
    assert not [name for name in calls.names if any(name.endswith(f"::{word}") for word in forbidden)]
    assert len(calls.names) > 20


@pytest.mark.parametrize("device", DEVICES)
def test_every_rule_is_free_of_synchronising_and_of_nondeterministic_operations(device):
    generator = np.random.default_rng(0)
    settings = {"metric_threshold": {"above": 2.0}}
    rules = [cls(**settings.get(kind, {})) for kind, cls in RULE_CLASSES.items() if not cls.is_host]
    failures = []
    run = Run(rules, device, on_failure=lambda name, error: failures.append((name, error)))
    extra = {key("fc", "parameter", NO_MICROBATCH): healthy()}
    extra |= {Key("", "metric", name, stage=Stage.AFTER_STEP): loss(1.0) for name in ("loss_scale", "grad_norm")}
    extra |= {key(f"experts.{number}", "gradient", 0): healthy() for number in range(4)}
    history = [model_records(generator) | extra for _ in range(4)]
    torch.use_deterministic_algorithms(True)
    try:
        for records in history[:-1]:
            run.tick(records)
        with Calls() as calls:
            verdict = run.evaluator.evaluate(*prepared(run, history[-1]))
            assert verdict.fired.shape[0] == len(rules)
    finally:
        torch.use_deterministic_algorithms(False)
    assert failures == []
    forbidden = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "index.Tensor", "item", "equal")
    assert not [name for name in calls.names if any(name.endswith(f"::{word}") for word in forbidden)]


def prepared(run: Run, records):
    num_rows = -(-len(run.rows) // run.block) * run.block
    matrix, valid = np.full((num_rows, NUM_STATISTICS), np.nan), np.zeros(num_rows, bool)
    for seen, values in records.items():
        matrix[run.rows[seen]], valid[run.rows[seen]] = statistics_row(values), True
    return run.ticks, torch.from_numpy(matrix).to(run.device), torch.from_numpy(valid).to(run.device)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_mode_changes_nothing(device):
    def outcome():
        generator = np.random.default_rng(0)
        run = Run([*default_rules(), NonfiniteRule(name="masks", allow=["-inf"], min_samples=2)], device)
        for _ in range(70):
            verdict = run.tick(model_records(generator))
        return [bits(m).cpu() for m in (verdict.fired, verdict.watch, verdict.value, verdict.threshold)]

    expected = outcome()
    torch.use_deterministic_algorithms(True)
    try:
        found = outcome()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("deterministic", [False, True])
def test_evaluation_never_waits_for_the_device(deterministic):
    generator = np.random.default_rng(0)
    run = Run([*default_rules(), NonfiniteRule(name="masks", allow=["-inf"], min_samples=2)], "cuda")
    for _ in range(70):
        run.tick(model_records(generator))
    late = {key(f"late.{number}", tensor): healthy() for number in range(300) for tensor in ("activation", "gradient")}
    for seen in late:
        run.rows[seen] = len(run.rows)
        run.evaluator.register(layout_of(seen, run.rows[seen]))
    run.evaluator.set_may_hold(0, False)
    inputs = prepared(run, model_records(generator) | late)
    torch.use_deterministic_algorithms(deterministic)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            verdict = run.evaluator.evaluate(*inputs)
            _ = verdict.fired, verdict.watch, verdict.value, verdict.threshold
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert not verdict.any.item()


def test_works_under_the_users_defaults():
    run = Run([NonfiniteRule(), AmaxSpikeRule(min_samples=1, min_numel=1, confirm=1), LossJumpRule()])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            run.tick({key(): healthy(amax=1.0)})
        with torch.autocast("cpu", torch.bfloat16):
            verdict = run.tick({key(): healthy(amax=4.001), key("b"): healthy(nan_count=1)})
    finally:
        torch.set_default_dtype(torch.float32)
    assert run.marked(verdict.fired, 1) == {key()}
    assert verdict.value[1, 0].item() == 4.001


def test_words():
    assert [number(value) for value in (3.0, 3114.0, 2.5e10, 3.6e19, 0.1234567, np.inf, np.nan)] == [
        "3", "3114", "25000000000", "3.6e+19", "0.1235", "inf", "nan",
    ]  # fmt: skip
    record = Key("blocks.0", "output", part="aux.0", microbatch=2, phase=Phase.RECOMPUTE, call=1, stage=Stage.FORWARD)
    assert subject(record) == "output.aux.0 of blocks.0 (microbatch 2, call 1, recompute, forward)"
    row = statistics_row({"numel": 4, "amax": 2.0})
    assert statistics_of(row) == statistics_of(torch.from_numpy(row)) == statistics_of(row.tolist())
    assert statistics_of(statistics_of(row)) == {0: 4.0, 5: 2.0}
    with pytest.raises(ValueError, match="zip"):
        statistics_of([1.0])


def test_kinds_are_those_of_the_configuration():
    assert set(DEVICE_RULES) == {kind for kind, rule in RULE_CLASSES.items() if not rule.is_host}
    assert Evaluator("cpu", default_rules()).rules == default_rules()
