from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import te_cpu_modules
import torch
from sources_support import RecordingSink, Watch, assert_same_bits, assert_untouched, bits
from te_layer_support import (
    BF16,
    KINDS,
    NAMES,
    RECIPES,
    Layer,
    batch,
    check_call,
    expected_calls,
    loss_of,
    recipe_of,
    run,
    same,
    sink_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import flightrec
from flightrec.records import Phase
from flightrec.sources import te_patch
from flightrec.sources.te_run import current_run


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch):
    with te_cpu_modules.running(monkeypatch) as modules:
        before = snapshot()
        yield modules
        assert snapshot() == before
        assert not te_patch._sources
        assert not te_patch._installed


def snapshot() -> list[int]:
    """Identity of everything that the tap may replace."""
    places = [(place.owner(), place.name) for place in te_patch._places()]
    functions = [(te_patch.loaded_class(path), name) for path in te_patch._FUNCTIONS.values() for name in DIRECTIONS]
    gemm, grouped = (te_patch.sys.modules[f"{te_patch.PACKAGE}.{n}"] for n in ("cpp_extensions.gemm", GROUPED_OP))
    owners = [*places, *functions, *te_patch._operations(), (gemm, "tex"), (grouped, "tex")]
    return [id(vars(owner)[name]) for owner, name in owners]


DIRECTIONS = ("forward", "backward")
GROUPED_OP = "ops.basic.grouped_linear"


# -- what is recorded of each kind of layer


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operand_and_result_is_recorded_as_the_kernel_had_it_under_its_layer(te, kind, recipe_name):
    torch.manual_seed(0)
    model, recipe, sink = Layer(te, kind), recipe_of(te, recipe_name), sink_of()
    with Watch(model, sink) as watch:
        for iteration in range(2):
            for microbatch in range(2):
                with te_cpu_modules.watch() as (calls, _):
                    loss_of(run(te, model, batch(4 * iteration + microbatch), recipe)).backward()
                found = [(call["layout"]) for call in calls]
                names = expected_calls(kind)
                assert [layout.replace("recompute", "TN") for _, layout in names] == found
                for (name, layout), call in zip(names, calls, strict=True):
                    check_call(sink, iteration, microbatch, name, layout, call)
            watch.step()
    assert not sink.errors
    assert set(sink.blinds) <= {("", "operations of te.ops.Sequential"), ("layer.fc2", "dgrad")}
    assert_untouched(model)


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_bit_with_and_without_the_recorder(te, kind, recipe_name):
    def train(sink: RecordingSink | None) -> list[torch.Tensor]:
        te.state.reset()
        torch.manual_seed(0)
        model, recipe, trace = Layer(te, kind), recipe_of(te, recipe_name), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = Watch(model, sink) if sink is not None else None
        if watch:
            watch.__enter__()
        for iteration in range(3):
            optimizer.zero_grad()
            for microbatch in range(2):
                x = batch(10 * iteration + microbatch)
                loss = loss_of(run(te, model, x, recipe))
                loss.backward()
                trace += [loss.detach().clone(), x.grad.clone()]
            trace += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            trace += [p.detach().clone() for p in model.parameters()]
            if watch:
                watch.step()
        if watch:
            watch.__exit__()
        return trace

    sink = sink_of()
    assert_same_bits(train(None), train(sink))
    assert sink.find(NAMES[kind][0], "activation")


# -- high-precision partners and the quantizer's state


@pytest.mark.parametrize("recipe_name", ["delayed", "current"])
def test_the_partner_is_the_very_tensor_that_the_quantizer_read(te, recipe_name):
    model, recipe, sink = Layer(te, "Linear"), recipe_of(te, recipe_name), sink_of()
    x = batch(0)
    with Watch(model, sink), te_cpu_modules.watch() as (_, quantizations):
        run(te, model, x, recipe).backward(torch.randn(48, 64).to(BF16))
    read = [source for source, _ in quantizations]
    for tensor, source in (("activation", x), ("weight", model.layer.weight), ("gradient", None)):
        seen = sink.one("layer", tensor)
        assert any(torch.equal(bits(seen.tensor), bits(r)) for r in read)
        assert source is None or torch.equal(bits(seen.tensor), bits(source))
        assert "high_precision" not in seen.quantized.info.metadata
        assert seen.quantized.pair_codes == "data"


def test_what_a_fused_kernel_quantized_has_no_partner_and_says_so(te):
    sink = sink_of()
    model = Layer(te, "LayerNormMLP")
    with Watch(model, sink):
        loss_of(run(te, model, batch(0), recipe_of(te, "delayed"))).backward()
    for layer, tensor in (("layer.fc1", "activation"), ("layer.fc2", "activation"), ("layer.fc1", "gradient")):
        seen = sink.one(layer, tensor)
        assert seen.tensor is None
        assert seen.quantized.info.metadata["high_precision"].startswith("not there")
    assert sink.one("layer.fc2", "gradient").tensor is not None


def test_each_expert_has_its_own_rows_as_partner(te):
    model, sink, x = Layer(te, "GroupedLinear"), sink_of(), batch(0)
    with Watch(model, sink):
        loss_of(run(te, model, x, recipe_of(te, "current"))).backward()
    assert torch.equal(sink.one("layer.gemm_0", "activation").tensor, x[:16])
    assert torch.equal(sink.one("layer.gemm_1", "activation").tensor, x[16:])


def test_without_fp8_there_is_the_high_precision_only(te):
    model, sink, x = Layer(te, "Linear"), sink_of(), batch(0)
    with Watch(model, sink):
        loss_of(run(te, model, x, None)).backward()
    seen = sink.one("layer", "activation")
    assert seen.quantized is None
    assert torch.equal(seen.tensor, x)


def test_delayed_scaling_comes_with_its_scale_its_amax_and_the_history_as_they_were_at_the_product(te):
    model, recipe, sink = Layer(te, "Linear"), recipe_of(te, "delayed"), sink_of()
    with Watch(model, sink) as watch:
        for iteration in range(3):
            x = batch(iteration)
            loss_of(run(te, model, x, recipe)).backward()
            parts = sink.one("layer", "activation", iteration).quantized
            state = parts.components
            torch.testing.assert_close(state["scale"] * state["scale_inv"], torch.ones(1), rtol=1e-6, atol=0)
            assert state["amax"] == x.abs().max()
            assert state["amax_history"].shape == (4,)
            assert state["amax_history"][0] == state["amax"]
            fields = parts.info.metadata["recipe"]
            assert fields["class"] == "DelayedScaling"
            assert (fields["margin"], fields["amax_history_len"], fields["amax_compute_algo"]) == (1, 4, "max")
            assert fields["fp8_format"] == "HYBRID"
            watch.step()
    scales = [s.quantized.components["scale"].item() for s in sink.find("layer", "gradient")]
    assert len(set(scales)) > 1
    histories = [s.quantized.components["amax_history"] for s in sink.find("layer", "activation")]
    assert not torch.equal(histories[0], histories[2])


def test_a_weight_that_was_quantized_in_an_earlier_microbatch_has_no_partner_and_a_scale_that_may_have_moved(te):
    model, recipe, sink = Layer(te, "Linear"), recipe_of(te, "delayed"), sink_of()
    with Watch(model, sink) as watch:
        for microbatch in range(2):
            loss_of(run(te, model, batch(microbatch), recipe, is_first_microbatch=microbatch == 0)).backward()
        watch.step()
        loss_of(run(te, model, batch(2), recipe, is_first_microbatch=False)).backward()
    fresh, kept = sink.find("layer", "weight")
    assert (fresh.iteration, kept.iteration) == (0, 1)
    assert torch.equal(fresh.tensor, model.layer.weight.detach())
    assert "live" not in fresh.quantized.info.metadata
    assert kept.tensor is None
    assert "scale" in kept.quantized.info.metadata["live"]
    assert torch.equal(kept.quantized.components["data"], fresh.quantized.components["data"])


def test_fp8_parameters_have_no_high_precision_form(te):
    recipe = recipe_of(te, "current")
    with te.quantized_model_init(enabled=True, recipe=recipe):
        model = Layer(te, "Linear")
    sink = sink_of()
    with Watch(model, sink):
        loss_of(run(te, model, batch(0), recipe)).backward()
    seen = sink.one("layer", "weight")
    assert seen.tensor is None
    assert torch.equal(seen.quantized.components["data"], model.layer.weight._data)
    assert sink.one("layer", "activation").tensor is not None


# -- microbatches, calls, phases


def test_backward_products_belong_to_the_microbatch_of_their_forward_when_passes_interleave(te):
    model, sink = (
        nn.Sequential(Layer(te, "Linear"), te.LayerNormMLP(64, 32, params_dtype=BF16, device="cpu")),
        sink_of(),
    )
    recipe = recipe_of(te, "current")
    outputs = []
    with Watch(model, sink):
        for microbatch in range(3):
            outputs.append(run(te, model, batch(microbatch), recipe))
            if microbatch:  # one forward, one backward
                with te_cpu_modules.watch() as (calls, _):
                    loss_of(outputs[microbatch - 1]).backward()
                check_interleaved(sink, microbatch - 1, calls)
        with te_cpu_modules.watch() as (calls, _):
            loss_of(outputs[2]).backward()
        check_interleaved(sink, 2, calls)


def check_interleaved(sink, microbatch, calls) -> None:
    order = ["1.fc2", "1.fc2", "1.fc1", "1.fc1", "0.layer", "0.layer"]
    for layer, call in zip(order, calls, strict=True):
        tensor = "dgrad" if call["layout"] == "NN" else "wgrad"
        assert same(sink.one(layer, tensor, microbatch=microbatch, part=""), call["out"])


def test_a_layer_that_runs_twice_has_two_calls(te):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = te.Linear(32, 32, params_dtype=BF16, device="cpu")
            self.op = te.ops.Sequential(te.ops.Linear(32, 32, dtype=BF16, device="cpu"))

        def forward(self, x):
            return self.op(self.op(self.inner(self.inner(x))))

    model, sink = Twice(), sink_of()
    with Watch(model, sink):
        loss_of(run(te, model, batch(0), recipe_of(te, "current"))).backward()
    for layer in ("inner", "op.0"):
        for tensor in ("activation", "output", "gradient", "dgrad", "wgrad"):
            assert sorted(seen.key.call for seen in sink.find(layer, tensor, part="")) == [0, 1]
        assert len(sink.find(layer, "weight")) == 1
        first = sink.one(layer, "output", call=0)
        second = sink.one(layer, "activation", call=1)
        assert torch.equal(first.tensor, second.tensor)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "te"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "ops"])
def test_a_checkpointed_layer_records_its_recompute_as_such(te, kind, mode):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer(te, kind)

        def forward(self, x):
            if mode == "te":
                return te.checkpoint(self.inner, x)
            return checkpoint(self.inner, x, use_reentrant=mode == "reentrant")

    model, sink = Checkpointed(), sink_of()
    name = "none" if mode != "te" else "current" if kind == "ops" else "delayed"  # torch's loses the autocast
    recipe = recipe_of(te, name)  # and operations do not put the old scale back
    with Watch(model, sink):
        for microbatch in range(2):
            loss_of(run(te, model, batch(microbatch), recipe)).backward()
    assert not sink.errors
    for name in (f"inner.{name}" for name in NAMES[kind]):
        for microbatch in range(2):
            first = sink.one(name, "activation", microbatch=microbatch, phase=Phase.TRAIN)
            again = sink.one(name, "activation", microbatch=microbatch, phase=Phase.RECOMPUTE)
            assert (first.quantized is None) is (recipe is None)
            for one, other in zip(values(first), values(again), strict=True):
                assert torch.equal(bits(one), bits(other))
            for tensor in ("gradient", "wgrad"):
                assert sink.one(name, tensor, microbatch=microbatch, part="").key.phase is Phase.TRAIN


def values(seen: Any) -> list[torch.Tensor]:
    codes = [] if seen.quantized is None else [seen.quantized.components[name] for name in ("data", "scale_inv")]
    return codes + ([seen.tensor] if seen.tensor is not None else [])


def test_an_evaluation_is_one_and_records_no_weight(te):
    model, sink = Layer(te, "LayerNormMLP").eval(), sink_of()
    with Watch(model, sink), torch.no_grad():
        run(te, model, batch(0), recipe_of(te, "current"))
    assert {seen.key.phase for seen in sink.seen} == {Phase.EVAL}
    assert {seen.key.layer for seen in sink.seen if seen.key.tensor == "activation"} == {"layer.fc1", "layer.fc2"}
    assert not [seen for seen in sink.seen if seen.key.tensor == "weight"]


def test_gradients_off_in_training_mode_work_without_a_context(te):
    model, sink = Layer(te, "Linear"), sink_of()
    with Watch(model, sink):
        with torch.no_grad():
            run(te, model, batch(0), recipe_of(te, "current"))
        loss_of(run(te, model, batch(1), recipe_of(te, "current"))).backward()
    assert [seen.key.phase for seen in sink.find("layer", "activation")] == [Phase.EVAL, Phase.TRAIN]


# -- weight gradients


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_a_delayed_weight_gradient_belongs_to_the_microbatch_of_its_forward(te, kind, recipe_name):
    model, recipe, sink = Layer(te, kind, delay_wgrad_compute=True), recipe_of(te, recipe_name), sink_of()
    with Watch(model, sink):
        for microbatch in range(2):
            loss_of(run(te, model, batch(microbatch), recipe)).backward()
        assert not [seen for seen in sink.seen if seen.key.tensor == "wgrad" and seen.key.part == ""]
        for microbatch in range(2):
            with te_cpu_modules.watch() as (calls, _):
                model.layer.backward_dw()
            names = NAMES[kind] if kind == "GroupedLinear" else NAMES[kind][::-1]
            for name, call in zip(names, calls, strict=True):
                assert call["layout"] == "NT"
                assert same(sink.one(name, "wgrad", microbatch=microbatch, part=""), call["out"])
                assert len(sink.find(name, "gradient", microbatch=microbatch)) == 1
    assert not sink.errors


def test_a_delayed_weight_gradient_still_runs_after_the_recorder_has_gone(te):
    model, sink = Layer(te, "Linear", delay_wgrad_compute=True), sink_of()
    with Watch(model, sink):
        loss_of(run(te, model, batch(0), None)).backward()
    count = len(sink.seen)
    model.layer.backward_dw()
    assert model.layer.weight.grad is not None
    assert len(sink.seen) == count


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_a_fused_weight_gradient_is_a_running_sum_and_the_dummy_is_not_recorded(te, kind):
    model, recipe, sink = Layer(te, kind, fuse_wgrad_accumulation=True), recipe_of(te, "current"), sink_of()
    for name, parameter in model.named_parameters():
        if "weight" in name and "norm" not in name:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
    with Watch(model, sink):
        for microbatch in range(2):
            with te_cpu_modules.watch() as (calls, _):
                loss_of(run(te, model, batch(microbatch), recipe)).backward()
            sums = [call["out"] for call in calls if call["layout"] == "NT"]
            names = NAMES[kind] if kind == "GroupedLinear" else NAMES[kind][::-1]
            for name, total in zip(names, sums, strict=True):
                found = [s for s in sink.find(name, "wgrad", microbatch=microbatch) if s.key.part in ("", "main_grad")]
                assert [seen.key.part for seen in found] == ["main_grad"]
                assert torch.equal(found[0].tensor, total)
                assert found[0].tensor.dtype == torch.float32


def test_the_first_microbatch_overwrites_the_sum_and_is_none(te):
    model, sink = Layer(te, "Linear", fuse_wgrad_accumulation=True), sink_of()
    model.layer.weight.main_grad = torch.full_like(model.layer.weight, 7, dtype=torch.float32)
    with Watch(model, sink):
        for microbatch in range(2):
            y = run(te, model, batch(microbatch), recipe_of(te, "current"), is_first_microbatch=microbatch == 0)
            loss_of(y).backward()
    parts = [seen.key.part for seen in sink.find("layer", "wgrad") if "bias" not in seen.key.part]
    assert parts == ["", "main_grad"]


def test_without_a_dgrad_product_the_gradient_comes_from_the_wgrad_product(te):
    model, sink = Layer(te, "Linear"), sink_of()
    with Watch(model, sink), te_cpu_modules.watch() as (calls, _):
        loss_of(run(te, model, batch(0).detach(), recipe_of(te, "current"))).backward()
    assert [call["layout"] for call in calls] == ["TN", "NT"]
    assert same(sink.one("layer", "gradient"), calls[1]["b"])
    assert not sink.find("layer", "dgrad")


def test_a_shared_weight_belongs_to_its_first_layer(te):
    model = nn.Sequential(*(te.Linear(32, 32, params_dtype=BF16, device="cpu") for _ in range(2)))
    model[1].weight = model[0].weight
    sink = sink_of()
    with Watch(model, sink):
        loss_of(run(te, model, batch(0), recipe_of(te, "current"))).backward()
    assert sink.one("0", "weight")
    assert not sink.find("1", "weight")
    assert "the same parameter as that of 0" in sink.blinds["1", "weight"]
    assert sink.one("1", "activation")
    assert sink.one("1", "wgrad", part="")


# -- beside the modules source


def test_the_modules_source_keeps_what_the_tap_does_not_record(te):
    model = nn.Sequential(
        te.LayerNormLinear(32, 32, params_dtype=BF16, device="cpu"),
        te.LayerNormMLP(32, 64, params_dtype=BF16, device="cpu"),
        nn.Linear(32, 8, dtype=BF16),
    )
    x, sink = batch(0), sink_of()
    with Watch(model, sink):
        loss_of(run(te, model, x, None)).backward()
    assert torch.equal(sink.one("0", "input").tensor, x)
    assert not torch.equal(sink.one("0", "activation").tensor, x)
    for tensor in ("output", "gradient", "dgrad", "activation", "weight"):
        assert len(sink.find("0", tensor)) == 1
    assert [seen.key.part for seen in sink.find("0", "wgrad")].count("") == 1
    assert {seen.key.part for seen in sink.find("0", "wgrad")} == {"", "bias", "layer_norm_weight", "layer_norm_bias"}
    assert {seen.key.tensor for seen in sink.find("1", "input") + sink.find("1", "output")} == {"input", "output"}
    assert not sink.find("1", "activation") + sink.find("1", "weight")
    assert {seen.key.part for seen in sink.find("1", "wgrad")} == {
        "fc1_bias", "fc2_bias", "layer_norm_weight", "layer_norm_bias"
    }  # fmt: skip
    assert sink.one("2", "activation")


def test_only_what_is_selected_is_recorded(te):
    model, sink = Layer(te, "LayerNormMLP"), sink_of(tensors=("activation",), layers={"layer.fc2"})
    with Watch(model, sink):
        loss_of(run(te, model, batch(0), None)).backward()
    assert [(key.layer, key.tensor) for key in sink.recorded()] == [("layer.fc2", "activation")]


def test_a_model_without_transformer_engine_leaves_it_alone(te):
    before = snapshot()
    with Watch(nn.Linear(4, 4), sink_of()):
        assert snapshot() == before


def test_two_recorders_see_their_own_models_and_a_stranger_is_seen_by_none(te):
    first, second, stranger = (Layer(te, "Linear") for _ in range(3))
    sinks = sink_of(), sink_of()
    with Watch(first, sinks[0]), Watch(second, sinks[1]):
        for seed, model in enumerate((first, second, stranger)):
            loss_of(run(te, model, batch(seed), None)).backward()
    for seed, sink in enumerate(sinks):
        assert torch.equal(sink.one("layer", "activation").tensor, batch(seed))
        assert not sink.blinds


def test_nothing_of_the_run_is_held_after_the_pass(te):
    model, sink = Layer(te, "Linear"), sink_of()
    with Watch(model, sink):
        x = batch(0)
        y = run(te, model, x, recipe_of(te, "current"))
        loss_of(y).backward()
        refs = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


# -- what must not be recorded, and trouble


def test_a_product_outside_any_layer_is_told_once(te):
    model, sink = Layer(te, "Linear"), sink_of()
    a, b = torch.randn(16, 32, dtype=BF16), torch.randn(8, 32, dtype=BF16)
    with Watch(model, sink):
        for _ in range(2):
            te.gemm.general_gemm(a, b, out_dtype=BF16)
    assert "inside no layer" in sink.blinds["", "products outside any layer"]
    assert not sink.seen


def test_a_failing_sink_never_reaches_the_run_and_switches_its_layer_off(te):
    model, sink = Layer(te, "LayerNormMLP"), sink_of()
    sink.fail_on = lambda key: key.layer == "layer.fc1"
    with Watch(model, sink):
        for seed in range(2):
            loss_of(run(te, model, batch(seed), None)).backward()
    assert len(sink.errors) == 1
    assert not [key for key in sink.recorded() if key.layer == "layer.fc1"]
    assert len(sink.find("layer.fc2", "activation")) == 2
    assert model.layer.fc1_weight.grad is not None


def test_an_exception_of_the_run_passes_and_the_next_pass_is_recorded(te):
    model, sink = Layer(te, "Linear"), sink_of()
    with Watch(model, sink):
        with pytest.raises(AssertionError, match="GEMM not possible"):
            run(te, model, torch.randn(16, 16, dtype=BF16), None)
        assert current_run() is None
        loss_of(run(te, model, batch(0), None)).backward()
    assert len(sink.find("layer", "activation")) == 1
    assert not sink.errors


def test_a_patch_above_ours_stays_and_passes_through(te):
    function = te_patch.loaded_class("module.linear._Linear")
    original = vars(function)["forward"]
    model, sink = Layer(te, "Linear"), sink_of()
    calls = []
    watch = Watch(model, sink)
    with watch:
        ours = function.forward

        def theirs(*args):
            calls.append(len(args))
            return ours(*args)

        function.forward = staticmethod(theirs)
        loss_of(run(te, model, batch(0), None)).backward()
    try:
        assert vars(function)["forward"].__func__ is theirs
        loss_of(run(te, model, batch(1), None)).backward()
        assert len(calls) == 2
        assert len(sink.find("layer", "activation")) == 1
        again = sink_of()
        with Watch(model, again):  # on top of theirs, which still holds our old one
            loss_of(run(te, model, batch(2), None)).backward()
        assert len(again.find("layer", "activation")) == 1
    finally:
        function.forward = original


def test_what_this_version_lacks_is_told_once_and_the_rest_works(te):
    store = te_patch.loaded_class("module._common.WeightGradStore")
    model, sink = Layer(te, "Linear"), sink_of()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delattr(te.gemm, "custom_gemm")
        monkeypatch.setattr(store, "put", lambda self, function: None)
        watch = Watch(model, sink)
        watch.__enter__()
        loss_of(run(te, model, batch(0), recipe_of(te, "current"))).backward()
        watch.__exit__()
    assert (
        "no transformer_engine.pytorch.cpp_extensions.gemm.custom_gemm" in sink.blinds["", "products of custom recipes"]
    )
    assert "put takes self, function, expected self, tensor_list" in sink.blinds["", "delayed weight gradients"]
    assert sink.one("layer", "wgrad", part="")


def test_a_version_without_the_kernel_is_told_and_left_alone(te):
    model, sink = Layer(te, "Linear"), sink_of()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(te.gemm, "tex", object())
        watch = Watch(model, sink)
    assert "calls no tex.generic_gemm" in sink.blinds["layer", ""]
    assert [source.describe() for source in watch.sources] == ["modules (2 layers)"]


def test_a_kind_of_layer_that_looks_different_is_left_to_the_modules_source(te):
    function = te_patch.loaded_class("module.layernorm_mlp._LayerNormMLP")
    model, sink = (
        nn.Sequential(Layer(te, "Linear"), te.LayerNormMLP(64, 32, params_dtype=BF16, device="cpu")),
        sink_of(),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(function, "backward", staticmethod(lambda context, *gradients: None))
        with Watch(model, sink):
            run(te, model, batch(0), None)
    assert "cannot be told apart: backward takes context" in sink.blinds["1", ""]
    assert sink.one("0.layer", "activation")
    assert sink.one("1", "input")


def test_it_says_what_it_observes_and_what_it_cannot_see(te):
    class DotProductAttention(nn.Module):
        __module__ = "transformer_engine.pytorch.attention"

    model = nn.Sequential(Layer(te, "LayerNormMLP"), DotProductAttention())
    sink = sink_of()
    watch = Watch(model, sink)
    assert watch.sources[0].describe() == "Transformer Engine (2 products, not seen: attention products)"
    with watch:
        assert "fused kernels" in sink.blinds["", "attention products"]


@pytest.mark.parametrize("recipe_name", ["delayed", "block"])
def test_an_incident_of_the_whole_recorder_decodes_to_what_the_kernels_read(te, recipe_name, tmp_path):
    model, recipe = Layer(te, "LayerNormMLP"), recipe_of(te, recipe_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    select, triggers = [{"tensors": ["activation", "weight", "gradient"]}], [{"kind": "manual"}]
    config = {"budget": "none", "select": select, "triggers": triggers}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        recorder.attach(model, optimizer=optimizer)
        for iteration in range(3):
            with te_cpu_modules.watch() as (calls, _):
                loss_of(run(te, model, batch(iteration), recipe)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if iteration == 2:
                recorder.trigger("look")
            recorder.step()
    (folder,) = tmp_path.iterdir()
    with flightrec.open(folder) as incident:
        assert [firing.rule for firing in incident.firings] == ["manual"]
        tensors = {"TN": ("weight", "activation"), "NN": ("", "gradient"), "NT": ("activation", "gradient")}
        for (name, layout), call in zip(expected_calls("LayerNormMLP"), calls, strict=True):
            for tensor, operand in zip(tensors[layout], (call["a"], call["b"]), strict=True):
                if not tensor:
                    continue
                (record,) = [r for r in incident.records(layer=name, tensor=tensor) if r.iteration == 2]
                codes = np.asarray(record.quantized.components["data"]).view(np.uint8)
                if operand[2:] != ("columnwise",):
                    assert np.array_equal(codes.reshape(operand[0].shape), operand[0].numpy())
                if recipe_name == "delayed":
                    kind = {"weight": torch.float8_e4m3fn, "activation": torch.float8_e4m3fn}.get(
                        tensor, torch.float8_e5m2
                    )
                    values = operand[0].view(kind).float() * operand[1]
                    assert np.array_equal(record.quantized.dequantize(), values.numpy())
