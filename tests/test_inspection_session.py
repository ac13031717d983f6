"""The feature FlightRecorder in the real nvdlfw_inspect and Transformer Engine's real debug layer, on a CPU."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import te_cpu
import torch
from te_debug import ALL, DebugLinear, batch, debugging, only_incident, plain, quantizer, section, te_features, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import flightrec
from flightrec.config.load import packaged
from flightrec.inspection import session as sessions
from flightrec.records import Phase, Stage

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _real_transformer_engine() -> None:
    te_cpu.install()


def debug_quantizer(layer: str, tensor: str, kind: str | None = None) -> Any:
    from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizer

    return DebugQuantizer(layer, tensor, quantizer(kind), None, 1)


def keys(incident: flightrec.Incident, **where: Any) -> list[tuple[int, str, str, int, int]]:
    return [(r.iteration, r.key.layer, r.key.tensor, r.key.microbatch, r.key.call) for r in incident.records(**where)]


def test_a_nan_is_found_in_its_layer_tensor_and_iteration(tmp_path: Path) -> None:
    net = nn.Sequential(DebugLinear("decoder.fc1"), DebugLinear("decoder.fc2"))
    with debugging({"flightrec": section(FlightRecorder={"tensors": ALL})}, tmp_path) as api:
        train(net, api, range(3))
        with torch.no_grad():
            net[1].weight[2, 5] = math.nan
        train(net, api, range(3, 6))
    with only_incident(tmp_path) as incident:
        assert incident.trigger.kind == "nonfinite"
        first = incident.blame()[0]
        assert (first.iteration, first.key.layer, first.key.tensor) == (3, "decoder.fc2", "weight")
        assert [entry.iteration for entry in incident.iterations] == [0, 1, 2, 3, 4]
        (weight,) = incident.records(layer="decoder.fc2", tensor="weight", iteration=3)
        assert np.argwhere(np.isnan(weight.high_precision)).tolist() == [[2, 5]]
        of_one = {(r.key.layer, r.key.tensor) for r in incident.records(iteration=2)}
        assert of_one == {(layer, tensor) for layer in ("decoder.fc1", "decoder.fc2") for tensor in ALL}


def test_the_shipped_configuration_is_silent_until_something_is_wrong(tmp_path: Path) -> None:
    file = packaged("inspect-transformer-engine")
    net = nn.Sequential(DebugLinear("mlp.fc1", kind="fp8"), DebugLinear("self_attention.proj"), DebugLinear("head"))
    with debugging(str(file), tmp_path) as api:
        train(net, api, range(8))
        assert not (tmp_path / "incidents").exists()
        with torch.no_grad():
            net[1].weight[0, 0] = math.inf
        train(net, api, range(8, 13))
    with only_incident(tmp_path) as incident:
        assert (incident.trigger.iteration, incident.trigger.kind) == (8, "nonfinite")
        assert incident.blame()[0].key.layer in ("self_attention.proj", "mlp.fc1")
        seen = {(r.key.layer, r.key.tensor) for r in incident.records(iteration=8)}
        attention = {("self_attention.proj", tensor) for tensor in ("activation", "gradient")}
        assert seen == attention | {("mlp.fc1", tensor) for tensor in ("activation", "gradient", "wgrad")}
        assert not incident.records(iteration=7, layer="self_attention.proj")


def test_layers_train_on_as_without_the_feature(tmp_path: Path) -> None:
    results = []
    for features in ({"FlightRecorder": {"tensors": ALL}}, {"DumpTensors": {"tensors": ALL}}):
        torch.manual_seed(0)
        net = nn.Sequential(DebugLinear("a", kind="fp8"), DebugLinear("b"))
        with debugging({"s": section(**features)}, tmp_path / next(iter(features))) as api:
            results.append((train(net, api, range(4)), net[0].weight.detach().clone()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "when",
    [
        {},
        {"freq": 3},
        {"freq": 2, "start_step": 3},
        {"end_step": 4},
        {"freq": 3, "start_step": 2, "end_step": 7},
        {"start_end_list": [[1, 2], [6, 6], [8, 20]]},
        {"freq": 2, "start_end_list": [[1, 2], [5, 7]]},
        {"start_step": 4, "end_step": 4},
        {"freq": 5, "start_step": 6, "end_step": 9},
    ],
)
def test_iterations_are_those_of_dump_tensors(when: dict[str, Any], tmp_path: Path) -> None:
    both = {
        "DumpTensors": {"tensors": ["activation"], "high_precision_tensor": True, **when},
        "FlightRecorder": {"tensors": ["activation"], "ring": {"iterations": 12}, **when},
    }
    net = DebugLinear("fc1")
    with debugging({"both": section(**both)}, tmp_path) as api:
        recorder = flightrec.inspect_recorder()
        train(net, api, range(10))
        recorder.trigger("compare")
        recorder.step()
    dumped = sorted(int(path.name.removeprefix("iter_")) for path in tmp_path.glob("tensor_dumps/rank_0/iter_*"))
    if not dumped:
        assert not (tmp_path / "incidents").exists() or not only_incident(tmp_path).records()
        return
    with only_incident(tmp_path) as incident:
        assert [r.iteration for r in incident.records(tensor="activation")] == dumped
        for record in incident.records(tensor="activation"):
            dump = torch.load(tmp_path / f"tensor_dumps/rank_0/iter_{record.iteration:06d}/fc1_activation.pt")
            assert np.array_equal(record.high_precision, dump["high_precision"].numpy())


def test_the_turns_are_those_of_next_enabled_iter() -> None:
    import random

    from flightrec.config.inspection import load_inspect

    te_cpu.install()
    import nvdlfw_inspect.api  # noqa: F401
    from transformer_engine.debug.features.utils import next_enabled_iter

    draw = random.Random(5)
    for _ in range(300):
        start, length = draw.randrange(12), draw.randrange(12)
        pairs = sorted([draw.randrange(15), 0] for _ in range(3))
        pairs = [[first, first + draw.randrange(6)] for first, _ in pairs]
        when: dict[str, Any] = draw.choice(
            [{"start_step": start, "end_step": start + length}, {"start_end_list": pairs}, {"start_step": start}, {}]
        )
        freq = draw.randrange(1, 6)
        raw = {"tensors": ["weight"], "freq": freq, **when}
        plan = load_inspect({"a": section(FlightRecorder=raw)}).sections[0].tensors["weight"]
        for iteration in range(30):
            expected = next_enabled_iter(
                when.get("start_step"), when.get("end_step"), when.get("start_end_list"), freq, iteration
            )
            assert plan.turn(iteration) == expected, (raw, iteration)


def test_an_end_of_minus_one_never_comes() -> None:
    from flightrec.config.inspection import load_inspect

    raw = {"tensors": ["weight"], "end_step": -1}
    plan = load_inspect({"a": section(FlightRecorder=raw)}).sections[0].tensors["weight"]
    assert plan.turn(10**9) == (True, 10**9 + 1)


def test_with_nothing_to_record_the_layer_leaves_debug_mode(tmp_path: Path) -> None:
    some = DebugLinear("some.fc1")
    other = DebugLinear("other.fc1")
    with debugging({"a": section("some", FlightRecorder={"tensors": ["weight"], "end_step": 1})}, tmp_path) as api:
        train(nn.Sequential(some, other), api, range(5))
        enabled = api.transformer_engine.inspect_tensor_enabled
        assert enabled(layer_name="some.fc1", tensor_name="weight", iteration=5) == (False, None)
        assert enabled(layer_name="some.fc1", tensor_name="gradient", iteration=0) == (False, None)
    assert some.debugged == [True, True, False, False, False]
    assert other.debugged == [False] * 5


def test_a_sparse_frequency_leaves_debug_mode_in_between(tmp_path: Path) -> None:
    net = DebugLinear("fc1")
    with debugging({"a": section(FlightRecorder={"tensors": ["output"], "freq": 3})}, tmp_path) as api:
        train(net, api, range(7))
    assert net.debugged == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("kind", [None, "identity", "fp8"])
def test_every_parent_quantizer_reaches_the_feature(kind: str | None, tmp_path: Path) -> None:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    with debugging({"a": section(FlightRecorder={"tensors": ["activation"]})}, tmp_path):
        made = debug_quantizer("l", "activation", kind).quantize(x, dtype=x.dtype)
        flightrec.inspect_recorder().trigger("look")
        copied = plain(made.get_tensor(False)).clone()
        x.fill_(7.0)  # a snapshot does not follow
    with only_incident(tmp_path) as incident:
        (record,) = incident.records(tensor="activation")
        assert record.key.part == ""
        assert not (record.high_precision == 7.0).any()
        assert (record.quantized is not None) == (kind == "fp8")  # an identity is the tensor itself
        if kind == "fp8":
            codes = next(array for array in record.quantized.components.values() if array.size == 256)
            raw = made.get_tensor(False)._data.numpy()
            assert np.array_equal(codes.view(np.uint8).reshape(16, 16), raw)
        if kind is None:
            assert np.array_equal(record.high_precision, copied.numpy())


def test_delayed_scaling_comes_with_the_words_of_its_quantizer(tmp_path: Path) -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

    class Delayed(Float8Quantizer):
        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            self.amax.copy_(tensor.abs().amax())
            codes = (tensor * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            inverse = self.scale.reciprocal().reshape(1)
            return Float8Tensor(
                tuple(tensor.shape), tensor.dtype, data=codes, fp8_scale_inv=inverse, fp8_dtype=self.dtype,
                quantizer=self, device=tensor.device,
            )  # fmt: skip

    history = torch.arange(12.0).reshape(4, 3).clone()  # a base of its own, as in the module
    scale = torch.tensor([1.0, 32.0, 1.0])
    with debugging({"a": section(FlightRecorder={"tensors": ["activation"]})}, tmp_path):
        wrapped = debug_quantizer("l", "activation", "fp8")
        wrapped.parent_quantizer = Delayed(scale[1], history[0][1].reshape((1,)), quantizer("fp8").dtype)
        wrapped.quantize(torch.full((4, 4), 2.5), dtype=torch.float32)
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        (record,) = incident.records(tensor="activation")
        words = {name: np.ravel(array).tolist() for name, array in record.quantized.components.items()}
        assert words["scale"] == [32.0]
        assert words["scale_inv"] == [1 / 32]
        assert words["amax"] == [2.5]
        assert words["amax_history"] == [2.5, 4.0, 7.0, 10.0]
        assert np.array_equal(record.quantized.dequantize(), record.high_precision)


def test_fp8_parameters_come_without_a_tensor(tmp_path: Path) -> None:
    weight = quantizer("fp8")(torch.randn(16, 16))
    with debugging({"a": section(FlightRecorder={"tensors": ["weight"]})}, tmp_path):
        debug_quantizer("l", "weight", "fp8").wrap_quantized_tensor(weight)
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        (record,) = incident.records(tensor="weight")
        assert record.high_precision is None
        assert record.quantized is not None


def test_different_objects_for_the_two_directions_are_one_record(tmp_path: Path) -> None:
    x = torch.randn(16, 16)
    row, column = quantizer("fp8")(x), quantizer("fp8")(x * 3)
    with debugging({"a": section(FlightRecorder={"tensors": ["gradient"]})}, tmp_path) as api:
        api.transformer_engine.inspect_tensor(
            layer_name="l", tensor_name="gradient", iteration=0, tp_group=None, tensor=x,
            rowwise_quantized_tensor=row, columnwise_quantized_tensor=column, quantizer=None, tp_size=1,
        )  # fmt: skip
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        (record,) = incident.records(tensor="gradient")
        arrays = [array.tobytes() for array in record.quantized.components.values()]
        assert row._data.numpy().tobytes() in arrays
        assert column._data.numpy().tobytes() in arrays


def test_plain_operands_that_are_not_the_tensor_are_records_of_their_own(tmp_path: Path) -> None:
    x, modified = torch.randn(4, 4), torch.randn(4, 4)
    arguments = {"layer_name": "l", "tensor_name": "activation", "iteration": 0, "tp_group": None, "tp_size": 1}
    with debugging({"a": section(FlightRecorder={"tensors": ["activation"]})}, tmp_path) as api:
        api.transformer_engine.inspect_tensor(
            **arguments, tensor=x, rowwise_quantized_tensor=modified, columnwise_quantized_tensor=x, quantizer=None
        )
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        found = {r.key.part: r.high_precision for r in incident.records(tensor="activation")}
        assert set(found) == {"", "rowwise"}
        assert np.array_equal(found[""], x.numpy())
        assert np.array_equal(found["rowwise"], modified.numpy())


def test_dots_and_underscores_do_not_collide(tmp_path: Path) -> None:
    config = {"a": section(FlightRecorder={"tensors": ["weight"]})}
    with debugging(config, tmp_path):
        for number, layer in enumerate(("block.0.attn", "block_0_attn", "block/0/attn")):
            debug_quantizer(layer, "weight").quantize(torch.full((2, 2), float(number)), dtype=torch.float32)
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        found = {r.key.layer: r.high_precision[0, 0] for r in incident.records(tensor="weight")}
    assert found == {"block.0.attn": 0.0, "block_0_attn": 1.0, "block/0/attn": 2.0}


def test_microbatches_do_not_overwrite_each_other(tmp_path: Path) -> None:
    net = DebugLinear("fc1")
    with debugging({"a": section(FlightRecorder={"tensors": ALL})}, tmp_path) as api:
        train(net, api, range(1), microbatches=3)
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        for tensor in ALL:
            assert [r.key.microbatch for r in incident.records(tensor=tensor)] == [0, 1, 2], tensor
        for microbatch, record in enumerate(incident.records(tensor="activation")):
            assert np.array_equal(record.high_precision, batch(microbatch).numpy())


def test_named_microbatches_also_name_backwards_in_their_order(tmp_path: Path) -> None:
    net = DebugLinear("fc1")
    with debugging({"a": section(FlightRecorder={"tensors": ALL})}, tmp_path) as api:
        recorder = flightrec.inspect_recorder()
        losses = []
        for index in (0, 1, 2):  # one forward ahead, as in a pipeline
            with recorder.microbatch(index):
                losses.append((net(batch(index)) * (index + 1)).sum())
            if index:
                losses.pop(0).backward()
        losses.pop().backward()
        recorder.trigger("look")
        api.step()
    with only_incident(tmp_path) as incident:
        gradients = {r.key.microbatch: r.high_precision for r in incident.records(tensor="gradient")}
        assert {index: float(array[0, 0]) for index, array in gradients.items()} == {0: 1.0, 1: 2.0, 2: 3.0}
        assert [r.key.microbatch for r in incident.records(tensor="activation")] == [0, 1, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_tensors_are_told_apart(reentrant: bool, tmp_path: Path) -> None:
    settings = {"tensors": ALL, "phases": ["train", "recompute"]}
    net = DebugLinear("fc1")
    with debugging({"a": section(FlightRecorder=settings)}, tmp_path) as api:
        x = batch(0).requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
        flightrec.inspect_recorder().trigger("look")
        api.step()
    with only_incident(tmp_path) as incident:
        phases = {
            tensor: [r.key.phase for r in incident.records(tensor=tensor)] for tensor in ("activation", "gradient")
        }
        assert phases["activation"] == [Phase.TRAIN, Phase.RECOMPUTE]
        assert phases["gradient"] == [Phase.TRAIN]
        (gradient,) = incident.records(tensor="gradient")
        assert gradient.key.stage is Stage.BACKWARD


def test_evaluation_is_not_recorded_unless_asked_for(tmp_path: Path) -> None:
    for folder, phases in (("plain", ["train"]), ("eval", ["train", "eval"])):
        net = DebugLinear("fc1")
        config = {"a": section(FlightRecorder={"tensors": ["activation"], "phases": phases})}
        with debugging(config, tmp_path / folder):
            with torch.no_grad():
                net(batch(7))
            with torch.inference_mode():
                net(batch(8))
            net(batch(0))
            flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path / "plain") as incident:
        assert [r.key.microbatch for r in incident.records(tensor="activation")] == [0]
    with only_incident(tmp_path / "eval") as incident:
        assert [r.key.phase for r in incident.records(tensor="activation")] == [Phase.EVAL, Phase.EVAL, Phase.TRAIN]


class _LayerNormMLP(torch.autograd.Function):
    """The dgrads of LayerNormMLP as 2.20.2 shows them in debug mode: both under the name of the first product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: int, dgrad: Any) -> torch.Tensor:
        ctx.inp_shape, ctx.inner, ctx.dgrad = x.shape, inner, dgrad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.dgrad.process_gemm_output(torch.full((4, ctx.inner), 2.0))
        return ctx.dgrad.process_gemm_output(torch.ones(4, 8)), None, None


def test_both_dgrads_of_a_layernorm_mlp_are_kept(tmp_path: Path) -> None:
    for folder, inner in (("wide", 16), ("square", 8)):
        with debugging({"a": section(FlightRecorder={"tensors": ["dgrad"]})}, tmp_path / folder):
            for _ in range(2):
                x = batch(0).requires_grad_()
                _LayerNormMLP.apply(x, inner, debug_quantizer("mlp.fc1", "dgrad")).sum().backward()
            flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path / "wide") as incident:
        found = [(r.key.microbatch, r.key.call, r.key.part, r.shape[-1]) for r in incident.records(tensor="dgrad")]
        assert found == [(0, 0, "fc2", 16), (0, 0, "", 8), (1, 0, "fc2", 16), (1, 0, "", 8)]
    with only_incident(tmp_path / "square") as incident:  # nobody can tell them apart by shape
        found = [(r.key.microbatch, r.key.call, float(r.high_precision[0, 0])) for r in incident.records()]
        assert found == [(0, 0, 2.0), (0, 1, 1.0), (1, 0, 2.0), (1, 1, 1.0)]


def test_losses_count_whether_given_before_or_after_the_step_of_nvdlfw_inspect(tmp_path: Path) -> None:
    rule = {"kind": "metric_threshold", "metrics": ["acc"], "above": 100.0, "name": "acc"}
    for order in ("before", "after"):
        config = {"a": section(FlightRecorder={"tensors": ["weight"], "triggers": [rule]})}
        net = DebugLinear("fc1")
        with debugging(config, tmp_path / order) as api:
            recorder = flightrec.inspect_recorder()
            for iteration in range(6):
                net(batch(iteration)).sum().backward()
                values = {"loss": torch.tensor(float(iteration)), "metrics": {"acc": 200.0 if iteration == 3 else 1.0}}
                if order == "before":
                    recorder.step(**values)
                with torch.no_grad():
                    net(batch(9))  # an evaluation between the two
                api.step()
                if order == "after":
                    recorder.step(**values)
        with only_incident(tmp_path / order) as incident:
            assert incident.trigger.iteration == 3
            assert {e.iteration: e.loss for e in incident.iterations} == {i: float(i) for i in (0, 1, 2, 3, 4)}
            assert {e.attempt for e in incident.iterations} == {0}
            assert [r.iteration for r in incident.records(tensor="weight")] == [0, 1, 2, 3, 4]


def test_a_run_that_resumes_and_one_that_rewinds_keep_their_numbers(tmp_path: Path) -> None:
    config = {"a": section(FlightRecorder={"tensors": ["weight"], "ring": {"iterations": 8}})}
    with debugging(config, tmp_path, first=1000) as api:
        train(DebugLinear("fc1"), api, range(3))
        api.initialize_training_step(1001)
        train(DebugLinear("fc1"), api, range(2))  # the old one would wait for 1003 before it is in debug mode again
        flightrec.inspect_recorder().trigger("look")
        flightrec.inspect_recorder().step()
    with only_incident(tmp_path) as incident:
        found = [(r.attempt, r.iteration) for r in incident.records(tensor="weight")]
        assert found == [(0, 1000), (0, 1001), (0, 1002), (1, 1001), (1, 1002)]


def test_several_sections_share_one_recorder(tmp_path: Path) -> None:
    config = {
        "first": section("fc1", FlightRecorder={"tensors": ["weight"], "ring": {"iterations": 6}}),
        "second": section(
            "fc2",
            FlightRecorder={
                "tensors_struct": [
                    {"tensor": "activation", "freq": 2, "quantized_tensor": False, "high_precision_tensor": False},
                    {"tensor": "output", "high_precision_tensor": True},
                ],
                "directory": "elsewhere",
            },
        ),
    }
    net = nn.Sequential(DebugLinear("fc1"), DebugLinear("fc2"))
    with debugging(config, tmp_path) as api:
        train(net, api, range(3))
        flightrec.inspect_recorder().trigger("look")
        flightrec.inspect_recorder().step()
    with only_incident(tmp_path, "elsewhere") as incident:
        assert [(i, layer, t) for i, layer, t, *_ in keys(incident)] == [
            (0, "fc1", "weight"), (0, "fc2", "activation"), (0, "fc2", "output"),
            (1, "fc1", "weight"), (1, "fc2", "output"),
            (2, "fc1", "weight"), (2, "fc2", "activation"), (2, "fc2", "output"),
        ]  # fmt: skip
        assert all(r.high_precision is None for r in incident.records(tensor="activation"))
        assert all(r.high_precision is not None for r in incident.records(tensor="output"))


def test_beside_dump_tensors_and_log_tensor_stats(tmp_path: Path) -> None:
    features = {
        "DumpTensors": {"tensors": ["activation", "gradient"], "high_precision_tensor": True, "freq": 2},
        "LogTensorStats": {"tensors": ["output"], "stats": ["max"], "start_step": 100},  # its kernels need a GPU
        "FlightRecorder": {"tensors": ["activation", "weight"], "freq": 3},
    }
    net = DebugLinear("fc1", kind="fp8")
    with debugging({"all": section(**features)}, tmp_path) as api:
        train(net, api, range(4))
        flightrec.inspect_recorder().trigger("look")
        flightrec.inspect_recorder().step()
    with only_incident(tmp_path) as incident:
        assert [r.iteration for r in incident.records(tensor="activation")] == [0, 3]
        assert [r.iteration for r in incident.records(tensor="weight")] == [0, 3]
    dumped = sorted(path.name for path in tmp_path.glob("tensor_dumps/rank_0/iter_*"))
    assert dumped == ["iter_000000", "iter_000002", "iter_000003"]  # it does not ask again when another is on: we do


def test_a_second_initialize_starts_clean(tmp_path: Path) -> None:
    recorders = []
    for number in range(2):
        config = {"a": section(FlightRecorder={"tensors": ["weight"]})}
        with debugging(config, tmp_path / str(number)) as api:
            train(DebugLinear(f"layer{number}"), api, range(2))
            recorders.append(flightrec.inspect_recorder())
            recorders[-1].trigger("look")
    for number in range(2):
        with only_incident(tmp_path / str(number)) as incident:
            assert {r.key.layer for r in incident.records()} == {f"layer{number}"}
            assert [e.iteration for e in incident.iterations] == [0, 1]
    assert recorders[0] is not recorders[1]
    recorders[1].step(loss=1.0)  # after the end: nothing happens
    assert flightrec.inspect_recorder() is recorders[1]


def test_an_initialize_without_an_end_closes_the_recorder_before(tmp_path: Path) -> None:
    import nvdlfw_inspect.api as api

    with debugging({"a": section(FlightRecorder={"tensors": ["weight"]})}, tmp_path):
        debug_quantizer("l", "weight").quantize(torch.ones(2, 2), dtype=torch.float32)
        flightrec.inspect_recorder().trigger("look")
        session = sessions.begin()  # as executing the feature's file again does
        assert len(list((tmp_path / "incidents").iterdir())) == 1
        session.close()
    assert api.DEBUG_MANAGER is None


def test_nothing_grows_with_iterations(tmp_path: Path) -> None:
    net = DebugLinear("fc1")
    sizes = []
    with debugging({"a": section(FlightRecorder={"tensors": ["activation"]})}, tmp_path) as api:
        x = batch(0)
        for iteration in range(1200):
            net(x)
            api.step()
            if iteration in (199, 1199):
                gc.collect()
                ours = [o for o in gc.get_objects() if str(type(o).__module__).startswith("flightrec.")]
                session = sessions._current
                counts = session._counter._counts, session._counter._forwards, session._tensors
                sizes.append((len(ours), *map(len, counts)))
        from nvdlfw_inspect.registry import Registry

        cached = [v for v in Registry.data["transformer_engine"].api._api_cache.values() if v[1]]
        assert len(cached) > 1200  # nvdlfw_inspect keeps an entry an iteration
        assert len({id(config) for _, config in cached}) == 1  # which all share one object of ours
    assert sizes[1][1:] == sizes[0][1:]
    assert sizes[1][0] - sizes[0][0] <= 200, sizes  # bounded logs still fill up


def test_a_refused_configuration_switches_the_feature_off_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "inspect.yaml"
    file.write_text(
        "flight:\n  enabled: True\n  layers: {layer_name_regex_pattern: .*}\n  transformer_engine:\n"
        "    FlightRecorder:\n      enabled: True\n      tensors: [activation]\n      ring: {iteratons: 4}\n"
    )
    where = (
        f"{file}:8:14: flight.transformer_engine.FlightRecorder.ring.iteratons: unknown key, did you mean iterations"
    )
    with pytest.raises(flightrec.ConfigError, match="did you mean iterations"):
        flightrec.feature_directory(file)
    net = DebugLinear("fc1")
    with debugging(str(file), tmp_path) as api, caplog.at_level(logging.ERROR, "flightrec"):
        train(net, api, range(3))
        with pytest.raises(flightrec.ConfigError, match="did you mean iterations"):
            flightrec.inspect_recorder()
    told = [record.getMessage() for record in caplog.records if record.name == "flightrec"]
    assert len(told) == 1
    assert where in told[0]
    assert net.debugged == [False] * 3


def test_a_refusal_in_the_middle_of_an_iteration_never_reaches_transformer_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer is in debug mode already and shows its other tensors; the API's own default would not take them."""
    (tmp_path / "incidents").write_text("in the way")
    net = DebugLinear("fc1")
    with (
        debugging({"a": section(FlightRecorder={"tensors": ALL})}, tmp_path) as api,
        caplog.at_level(logging.ERROR, "flightrec"),
    ):
        train(net, api, range(3))
    told = [record.getMessage() for record in caplog.records if record.name == "flightrec"]
    assert len(told) == 1
    assert "is not a directory" in told[0]
    assert net.debugged == [True, False, False]


def test_odd_arguments_raise_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with debugging({"a": section(FlightRecorder={"tensors": ALL})}, tmp_path) as api:
        from nvdlfw_inspect.registry import Registry

        debug_quantizer("l", "activation").quantize(torch.ones(2, 2), dtype=torch.float32)
        feature = Registry.data["transformer_engine"].features["FlightRecorder"]
        plan = sessions.live_plan().sections[0].tensors["activation"]
        for arguments in (
            {},
            {"config": {}},
            {"config": plan, "layer_name": "x", "iteration": "one", "tensor": torch.ones(2)},
            {"config": plan, "layer_name": "x", "tensor": object(), "new_argument": 1},
            {"config": plan, "layer_name": "x", "rowwise_quantized_tensor": 3},
            {"config": plan, "layer_name": "x", "tensor": torch.ones(2, device="meta")},
            {"config": plan, "layer_name": "x"},
        ):
            assert feature.inspect_tensor(**arguments) is None
        assert feature.inspect_tensor_enabled(config=plan, iteration=0) == (True, 1)
        assert feature.parse_config_and_api(None) == (False, None)
        assert feature.parse_config_and_api({"enabled": True}, tensor_name="weight") == (False, None)
        assert feature.inspect_tensor_enabled() == (False, None)
        api.step()
    told = [record for record in caplog.records if record.name == "flightrec"]
    assert len(told) == len({record.getMessage() for record in told}) <= 8


def test_without_the_feature_or_nvdlfw_inspect_asking_for_the_recorder_says_what_to_do(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import te_cpu; te_cpu.install()
import flightrec
def refused():
    try:
        flightrec.inspect_recorder()
    except flightrec.AttachError as error:
        print(error)
refused()
import nvdlfw_inspect.api as api
from te_debug import section, te_features
config = {{"a": section(DumpTensors={{"tensors": ["weight"], "high_precision_tensor": True}})}}
api.initialize(config, feature_dirs=[te_features()], log_dir={str(tmp_path)!r})
refused()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    first, second = done.stdout.splitlines()[-2:]
    assert "nvdlfw_inspect is not initialized" in first
    assert "add flightrec.feature_directory() to feature_dirs" in second


@pytest.mark.parametrize("end", ["return", "sys.exit(0)", "raise ValueError('boom')"])
def test_an_exit_without_end_debug_leaves_the_evidence(end: str, tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import te_cpu; te_cpu.install()
import torch, flightrec
import nvdlfw_inspect.api as api
from te_debug import DebugLinear, batch, section, te_features
def main():
    config = {{"a": section(FlightRecorder={{"tensors": ["activation"]}})}}
    api.initialize(config, feature_dirs=[te_features(), flightrec.feature_directory(config)], log_dir={str(tmp_path)!r})
    net = DebugLinear("fc1")
    for i in range(3):
        x = batch(i)
        if i == 2 and {end == "return" or end.startswith("sys")}:
            x[0, 0] = float("nan")
        net(x)
        api.step()
    {end}
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == (1 if "boom" in end else 0), done.stderr
    with only_incident(tmp_path) as incident:
        assert incident.trigger.kind == ("exception" if "boom" in end else "nonfinite")
        assert incident.trigger.iteration == 2


def test_a_feature_file_is_executed_by_path_and_finds_its_state(tmp_path: Path) -> None:
    with debugging({"a": section(FlightRecorder={"tensors": ["weight"]})}, tmp_path):
        from nvdlfw_inspect.registry import Registry

        assert "flight_recorder" not in sys.modules
        assert "FlightRecorder" in Registry.data["transformer_engine"].features
        assert os.path.isabs(flightrec.feature_directory())
        names = Registry.data["transformer_engine"].features["FlightRecorder"].inspect_tensor.__code__.co_varnames
        wanted = {"quantizer", "rowwise_quantized_tensor", "columnwise_quantized_tensor", "tp_size"}
        assert wanted <= set(names)
    assert te_features()
