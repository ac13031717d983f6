"""Real fault reports about what surrounds a fault: evaluation, shapes, copies, the tool itself, metadata.

The numbers are those of the project's list of fault cases.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from models import RECORD_ALL, batches, make, train
from torch import nn
from verdict_support import began, judged, kind_of

import flightrec
from flightrec.records import Phase, Stage

EVERYTHING = {"tensors": "*", "phases": ["train", "recompute", "eval"]}


def config(*triggers, iterations: int = 4, after: int = 1, **more):
    made = {
        **RECORD_ALL,
        "select": [EVERYTHING],
        "ring": {"iterations": iterations},
        "incident": {"after": after, "cooldown": 0},
        **more,
    }
    if triggers:
        made["triggers"] = list(triggers)
    return made


def incidents(directory: Path) -> list[flightrec.Incident]:
    return [flightrec.open(folder) for folder in sorted(directory.iterdir())] if directory.exists() else []


def only(directory: Path) -> flightrec.Incident:
    (incident,) = incidents(directory)
    return incident


# -- F19: deterministic mode writes NaN into empty memory -------------------------------------------------------------


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_f19_unwritten_memory_is_never_taken_for_data(deterministic, tmp_path):
    assert torch.isnan(torch.empty(3)).all()
    net = make("torchao")
    with flightrec.Recorder(config(iterations=6, after=0), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(2), recorder, before_step=lambda i: recorder.trigger("two of six") if i == 1 else None)
        train(net, batches(3), recorder)
    incident = only(tmp_path)
    assert incident.trigger.kind == "manual"
    assert [entry.iteration for entry in incident.iterations] == [0, 1]
    for record in incident.records():
        assert np.isfinite(record.high_precision).all()


def test_f19_an_uninitialised_bias_is_blamed_before_any_activation(deterministic, tmp_path):
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(3, 3))
    model.add_module("gate", nn.Linear(3, 3))
    model.gate.bias = torch.nn.utils.skip_init(nn.Linear, 3, 3).bias
    assert torch.isnan(model.gate.bias).all()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(model)
        model(torch.ones(2, 3)).sum().backward()
        recorder.step()
    incident = only(tmp_path)
    first = incident.blame()[0]
    assert (first.iteration, first.key.stage) == (0, Stage.START)
    assert (first.key.layer, first.key.tensor, first.key.part) == ("gate", "parameter", "bias")
    verdict = judged(incident)
    assert kind_of(verdict) == ("numbers", "certain")
    assert began(verdict) == ("gate parameter (weight) 0.-1", "gate parameter (bias) 0.-1")
    assert "initialisation or a checkpoint" in verdict.cause
    assert (verdict.elements.indices, verdict.precursors, verdict.missing) == (((0,), (1,), (2,)), (), ())


# -- F21: evaluation between training steps ---------------------------------------------------------------------------


def f21_run(directory: Path, *, poison: bool = False, select=EVERYTHING, evaluations: int = 2):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    spike = {"kind": "amax_spike", "min_samples": 1, "min_numel": 1, "confirm": 1, "factor": 3}
    jump = {"kind": "loss_jump", "min_samples": 2, "window": 8}
    rules = [spike, jump, {"kind": "nonfinite", "phases": ["train", "recompute", "eval"]}]
    x = batches(1)[0][0]
    with flightrec.Recorder(config(*rules, select=[select]), directory=directory) as recorder:
        recorder.attach(net)
        for iteration in range(6):
            loss = (net(x) - x).square().mean()
            recorder.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if iteration % 2:
                with torch.no_grad():
                    for _ in range(evaluations):
                        net(10 * x)  # left in train() mode
                net.eval()
                net(x * (math.nan if poison and iteration == 3 else 10))
                net.train()
            recorder.step()
        layouts = len(recorder._capture.engine.ring.layouts)
    assert recorder.iteration == 6
    return layouts


def test_f21_evaluation_feeds_no_rule_and_no_count(tmp_path):
    f21_run(tmp_path)
    assert not incidents(tmp_path)


def test_f21_a_thousand_evaluations_take_no_more_memory_than_one(tmp_path):
    train_only = {"tensors": "*"}
    assert f21_run(tmp_path, select=train_only) == f21_run(tmp_path, select=train_only, evaluations=300)


def test_f21_a_nan_in_evaluation_is_told_as_such(tmp_path):
    f21_run(tmp_path, poison=True)
    incident = only(tmp_path)
    assert incident.trigger.iteration == 3
    assert incident.trigger.key.phase is Phase.EVAL
    assert not [f for f in incident.firings if f.key and f.key.phase is Phase.TRAIN]
    verdict = judged(incident)
    assert kind_of(verdict)[0] == "numbers"
    assert verdict.began.before.key == incident.trigger.key
    assert verdict.precursors == ()


def test_f21_gradients_of_a_frozen_module_in_eval_mode_are_training(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).eval())
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(model)
        model(torch.ones(2, 8)).sum().backward()
        recorder.trigger("look")
        recorder.step()
    (gradient,) = only(tmp_path).records(layer="1", tensor="gradient")
    assert gradient.key.phase is Phase.TRAIN


# -- F28: empty, scalar and changing shapes ---------------------------------------------------------------------------


def test_f28_shapes_come_and_go_and_the_exception_is_the_loops_own(tmp_path):
    lengths = {"expert0": (0, 7, 3, 0, 9), "expert1": (7, 0, 5, 9, 1)}
    with (
        pytest.raises(AssertionError, match="divisible by 8"),
        flightrec.Recorder(config(iterations=6), directory=tmp_path) as recorder,
    ):
        for iteration in range(6):
            if iteration == 5:
                recorder.record("layer", "input", high_precision=torch.zeros(4092, 2))
                raise AssertionError("4092 rows are not divisible by 8")
            for name, rows in lengths.items():
                x = torch.full((rows[iteration], 16), 1.0 + iteration)
                recorder.record(name, "activation", high_precision=x)
            recorder.step(loss=torch.tensor(1.0))
    incident = only(tmp_path)
    assert incident.trigger.kind == "exception"
    verdict = judged(incident)
    assert kind_of(verdict) == ("host", "certain")
    assert (verdict.began.after, verdict.began.before.key, verdict.elements, verdict.precursors) == (
        None,
        None,
        None,
        (),
    )
    for name, rows in lengths.items():
        for iteration, count in enumerate(rows):
            (record,) = incident.records(layer=name, iteration=iteration)
            assert record.shape == (count, 16) == record.high_precision.shape
            assert record.statistics["amax"] == (1.0 + iteration if count else None)
            assert np.all(record.high_precision == 1.0 + iteration)
    assert incident.records(layer="layer", iteration=5)[0].shape == (4092, 2)
    assert all(record.shape == () for record in incident.records(tensor="loss"))


# -- F32: copies ------------------------------------------------------------------------------------------------------


def test_f32_what_was_recorded_is_what_is_written_whatever_becomes_of_the_tensor(tmp_path):
    bucket = torch.arange(12.0)
    gradient = torch.full((3,), math.nan)
    with flightrec.Recorder(config({"kind": "manual"}, after=0), directory=tmp_path) as recorder:
        recorder.record("p", "wgrad", high_precision=gradient)
        recorder.record("transposed", "wgrad", high_precision=bucket.view(3, 4).t())
        recorder.record("strided", "wgrad", high_precision=bucket[::2])
        recorder.record("expanded", "wgrad", high_precision=torch.zeros(1).expand(1000))
        recorder.record("view", "wgrad", high_precision=bucket[3:7])
        recorder.record("overlapping", "wgrad", high_precision=bucket.as_strided((5, 4), (2, 1)))
        gradient.zero_()
        bucket.zero_()
        recorder.trigger("flush")
        recorder.step()
    values = {record.key.layer: record.high_precision for record in only(tmp_path).records(tensor="wgrad")}
    original = np.arange(12, dtype="f4")
    assert np.isnan(values["p"]).all()
    assert np.array_equal(values["transposed"], original.reshape(3, 4).T)
    assert np.array_equal(values["strided"], original[::2])
    assert np.array_equal(values["expanded"], np.zeros(1000))
    assert np.array_equal(values["view"], original[3:7])
    assert np.array_equal(values["overlapping"], [original[2 * i : 2 * i + 4] for i in range(5)])


# -- F33: the debug tool is the fault ---------------------------------------------------------------------------------


def test_f33_a_rule_that_raises_is_disabled_by_name_and_the_others_go_on(tmp_path, caplog):
    plain = train(make(), batches(6))
    net = make()
    spike = {"kind": "amax_spike", "name": "breaks", "min_samples": 1, "min_numel": 1, "confirm": 1}
    with flightrec.Recorder(config(spike, {"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net)
        runner = recorder._capture.engine.evaluator._runners[0]
        judge, calls = runner.rule.judge, []

        def raising(samples):
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("planted in a rule")
            return judge(samples)

        runner.rule.judge = raising
        recorded = train(net, batches(6), recorder)
        with torch.no_grad():
            net.head.weight[0, 0] = math.nan
        train(net, batches(1), recorder)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert len(calls) == 3
    assert sum("rule breaks" in record.getMessage() for record in caplog.records) == 1
    incident = only(tmp_path)
    assert incident.trigger.kind == "nonfinite"
    assert any("planted in a rule" in entry.reason for entry in incident.blind)


def test_f33_a_rule_about_a_statistic_that_does_not_exist_is_refused_at_the_start(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("triggers:\n  - kind: nonfinite\n  - kind: amax_spyke\n    factor: 4\n")
    with pytest.raises(flightrec.ConfigError, match=r"bad\.yaml:3.*amax_spike"):
        flightrec.Recorder(path, directory=tmp_path / "out")


class Strange(torch.Tensor):
    """A quantized class that nobody has heard of."""

    @staticmethod
    def __new__(cls, codes):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made._codes = codes
        return made

    def __tensor_flatten__(self):
        return ["_codes"], {"bits": 6}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError("a strange tensor computes nothing")


def test_f33_quantized_tensors_without_partner_of_unknown_class_or_two_sided_are_kept(tmp_path):
    codes = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    fp8 = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    row = flightrec.Quantized(fp8.to(torch.float8_e4m3fn), "float8_e4m3fn", scale_inv=torch.tensor(2.0))
    column = flightrec.Quantized(fp8.t().to(torch.float8_e4m3fn), "float8_e4m3fn", scale_inv=torch.tensor(4.0))
    with flightrec.Recorder(config({"kind": "manual"}, after=0), directory=tmp_path) as recorder:
        recorder.record("no_partner", "weight", high_precision=None, quantized=row)
        recorder.record("unknown", "weight", high_precision=fp8, quantized=Strange(codes))
        recorder.record("two_sided", "weight", quantized=row, columnwise=column)
        recorder.trigger("look")
        recorder.step()
    records = {record.key.layer: record for record in only(tmp_path).records(tensor="weight")}
    assert records["no_partner"].high_precision is None
    assert np.array_equal(records["no_partner"].quantized.dequantize(), fp8.numpy() * 2)
    unknown = records["unknown"].quantized
    assert unknown.metadata["class_name"].endswith("Strange")
    assert np.array_equal(unknown.components["codes"], codes.numpy())
    assert np.array_equal(records["unknown"].high_precision, fp8.numpy())
    two_sided = records["two_sided"].quantized
    assert np.array_equal(two_sided.dequantize(side="columnwise"), fp8.numpy().T * 4)


# -- F38: metadata that HDF5 will not take ----------------------------------------------------------------------------


def test_f38_large_and_odd_metadata_never_lose_the_tensors(tmp_path):
    text = "# " + "x" * 70_000 + "\nselect: [{tensors: '*'}]\ntriggers: [{kind: manual}]\nincident: {after: 0}\n"
    (tmp_path / "long.yaml").write_text(text)
    history = torch.arange(16384.0)
    x = torch.ones(4)
    with flightrec.Recorder(tmp_path / "long.yaml", directory=tmp_path / "out") as recorder:
        q = flightrec.Quantized(
            x.to(torch.float8_e4m3fn), "float8_e4m3fn", scale=torch.tensor(1.0), amax_history=history
        )
        recorder.record("a", "weight", high_precision=x, quantized=q)
        odd = {
            "none": None,
            "mixed": [1, "x", None],
            "nul": "ab\0cd",
            "dtype": torch.float16,
            "size": torch.Size([2, 3]),
            "nan": math.nan,
            "inf": math.inf,
            "minus_zero": -0.0,
            "big": 2**63,
            "nested": {"a": {"b": [1.5]}},
            "surrogate": "\ud800",
        }
        recorder._capture.engine.flusher.send_config(text, odd)
        recorder.trigger("look")
        recorder.step()
    incident = only(tmp_path / "out")
    assert incident.config_text == text
    (record,) = incident.records(tensor="weight")
    assert np.array_equal(record.high_precision, x.numpy())
    assert np.array_equal(record.quantized.components["amax_history"], history.numpy())
    found = incident.environment
    assert found["mixed"] == [1, "x", None] and found["nul"] == "ab\0cd" and found["nested"] == {"a": {"b": [1.5]}}
    assert found["big"] == 2**63 and math.isnan(float(found["nan"])) and float(found["inf"]) == math.inf
    assert set(found) >= set(odd)
