"""The tap with the real Transformer Engine on a GPU: what is recorded is what its kernels read, and nothing changes."""

from __future__ import annotations

import contextlib
import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import te_cpu_modules
import torch
from sources_support import BACKWARD, RecordingSink, Watch, assert_same_bits, bits
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

from flightrec.records import Phase
from flightrec.sources import te_patch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def te() -> types.SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            package = importlib.import_module("transformer_engine.pytorch")
            gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
        except Exception as error:
            pytest.skip(f"the real Transformer Engine cannot be imported: {error}")
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    quantization.FP8GlobalStateManager.reset()
    names = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer", "autocast", "checkpoint")
    return types.SimpleNamespace(
        **{name: getattr(package, name) for name in (*names, "ops", "quantized_model_init")},
        device="cuda",
        gemm=gemm,
        state=quantization.FP8GlobalStateManager,
        recipe=importlib.import_module("transformer_engine.common.recipe"),
    )


class Spy:
    """Notes what the kernels read and made, below the tap; install it before the recorder attaches."""

    def __init__(self, te: types.SimpleNamespace) -> None:
        self.gemm, self.extension = te.gemm, te.gemm.tex
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.extension, name)

    def generic_gemm(self, a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **named: Any) -> Any:
        call = self._begin(a, transa, b, transb)
        result = self.extension.generic_gemm(a, transa, b, transb, *rest, **named)
        gelu, grad = rest[5], rest[7]
        shown = result[2] if gelu and not grad else None
        call.update(out=te_cpu_modules.copied(result[0]), gelu_input=te_cpu_modules.copied(shown))
        self.calls.append(call)
        return result

    def te_general_grouped_gemm(self, a: Any, transa: bool, b: Any, transb: bool, out: Any, *rest: Any) -> Any:
        calls = [self._begin(one, transa, other, transb) for one, other in zip(a, b, strict=True)]
        result = self.extension.te_general_grouped_gemm(a, transa, b, transb, out, *rest)
        outs = torch.split(out[0], [int(n) for n in rest[1]]) if rest[4] else out
        for call, made in zip(calls, outs, strict=True):
            call.update(out=te_cpu_modules.copied(made), gelu_input=None)
        self.calls += calls
        return result

    @staticmethod
    def _begin(a: Any, transa: bool, b: Any, transb: bool) -> dict[str, Any]:
        return {
            "a": te_cpu_modules.copied(a, "rowwise" if transa else "columnwise"),
            "b": te_cpu_modules.copied(b, "columnwise" if transb else "rowwise"),
            "layout": ("T" if transa else "N") + ("T" if transb else "N"),
        }

    def take(self) -> list[dict[str, Any]]:
        taken, self.calls = self.calls, []
        return taken


@contextlib.contextmanager
def spying(te: types.SimpleNamespace) -> Iterator[Spy]:
    spy = Spy(te)
    te.gemm.tex = spy
    try:
        yield spy
        assert te.gemm.tex is spy
        assert not te_patch._installed
    finally:
        te.gemm.tex = spy.extension


def make(te: types.SimpleNamespace, kind: str, **options: Any) -> Layer:
    torch.manual_seed(0)
    return Layer(te, kind, **options).to("cuda")


def skip_if_it_does_not_run(te: types.SimpleNamespace, kind: str, recipe_name: str, **options: Any) -> None:
    """What the installed version refuses on this device without the recorder says nothing about the recorder."""
    try:
        loss_of(run(te, make(te, kind, **options), batch(0, "cuda"), recipe_of(te, recipe_name))).backward()
        torch.cuda.synchronize()
    except Exception as error:
        pytest.skip(f"{kind} with {recipe_name} does not run here: {str(error)[:200]}")
    te.state.reset()


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operand_and_result_is_recorded_as_the_kernel_had_it_under_its_layer(te, kind, recipe_name):
    skip_if_it_does_not_run(te, kind, recipe_name)
    model, recipe, sink = make(te, kind), recipe_of(te, recipe_name), sink_of()
    with spying(te) as spy, Watch(model, sink) as watch:
        for iteration in range(2):
            for microbatch in range(2):
                loss_of(run(te, model, batch(4 * iteration + microbatch, "cuda"), recipe)).backward()
                calls, names = spy.take(), expected_calls(kind)
                assert [call["layout"] for call in calls] == [x.replace("recompute", "TN") for _, x in names]
                for (name, layout), call in zip(names, calls, strict=True):
                    check_call(sink, iteration, microbatch, name, layout, call)
            watch.step()
    assert not sink.errors


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_bit_with_and_without_the_recorder(te, kind, recipe_name):
    skip_if_it_does_not_run(te, kind, recipe_name)

    def train(sink: RecordingSink | None) -> list[torch.Tensor]:
        te.state.reset()
        model, recipe, trace = make(te, kind), recipe_of(te, recipe_name), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(Watch(model, sink)) if sink is not None else None
            for iteration in range(4):
                optimizer.zero_grad()
                for microbatch in range(2):
                    x = batch(10 * iteration + microbatch, "cuda")
                    loss = loss_of(run(te, model, x, recipe))
                    loss.backward()
                    trace += [loss.detach().clone(), x.grad.clone()]
                trace += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                trace += [p.detach().clone() for p in model.parameters()]
                if watch is not None:
                    watch.step()
        return trace

    sink = sink_of()
    assert_same_bits(train(None), train(sink))
    assert sink.find(NAMES[kind][0], "activation")


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_delayed_and_fused_weight_gradients_belong_to_their_microbatch(te, kind, recipe_name):
    for options in ({"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}):
        te.state.reset()
        model, recipe, sink = make(te, kind, **options), recipe_of(te, recipe_name), sink_of()
        fused = "fuse_wgrad_accumulation" in options
        if fused:
            for name, parameter in model.named_parameters():
                if "weight" in name and "norm" not in name:
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        with spying(te) as spy, Watch(model, sink):
            names = NAMES[kind] if kind == "GroupedLinear" else NAMES[kind][::-1]
            made = []
            for microbatch in range(2):
                loss_of(run(te, model, batch(microbatch, "cuda"), recipe)).backward()
                made.append([call for call in spy.take() if call["layout"] == "NT"])
            if not fused:
                made = []
                for _ in range(2):
                    model.layer.backward_dw()
                    made.append(spy.take())
            for microbatch, calls in enumerate(made):
                for name, call in zip(names, calls, strict=True):
                    seen = sink.one(name, "wgrad", microbatch=microbatch, part="main_grad" if fused else "")
                    assert same(seen, call["out"])
        assert not sink.errors


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_partners_are_what_the_quantizer_read_and_quantize_to_the_recorded_codes(te, recipe_name):
    if recipe_name == "none":
        pytest.skip("nothing is quantized")
    model, recipe, sink, x = make(te, "Linear"), recipe_of(te, recipe_name), sink_of(), batch(0, "cuda")
    with Watch(model, sink):
        loss_of(run(te, model, x, recipe)).backward()
    for tensor, source in (("activation", x), ("weight", model.layer.weight)):
        assert torch.equal(bits(sink.one("layer", tensor).tensor), bits(source.detach()))
    gradient = sink.one("layer", "gradient")
    assert gradient.tensor is not None
    if recipe_name == "block":
        return
    codes = gradient.quantized.components
    kind = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}[gradient.quantized.info.format]
    again = (gradient.tensor.float() / codes["scale_inv"]).clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
    assert (again.to(kind).view(torch.uint8) != codes["data"].view(torch.uint8)).float().mean() < 1e-3  # 1/scale


@pytest.mark.parametrize("recipe_name", ["delayed", "current", "block"])
def test_fp8_parameters_and_te_checkpoint(te, recipe_name):
    recipe = recipe_of(te, recipe_name)
    with te.quantized_model_init(enabled=True, recipe=recipe):
        model = make(te, "LayerNormMLP")
    root = nn.ModuleList([model])
    root.forward = lambda x: te.checkpoint(model, x)
    sink = sink_of()
    with spying(te) as spy, Watch(root, sink):
        loss_of(run(te, root, batch(0, "cuda"), recipe)).backward()
        wgrads = [call for call in spy.take() if call["layout"] == "NT"]
    for name, call in zip(["0.layer.fc2", "0.layer.fc1"], wgrads, strict=True):
        assert same(sink.one(name, "wgrad", part=""), call["out"])
        assert all(seen.tensor is None for seen in sink.find(name, "weight"))
        assert sink.find(name, "weight")
        assert sink.one(name, "activation", phase=Phase.RECOMPUTE)
        assert any(same(seen, call["a"]) for seen in sink.find(name, "activation"))
    assert not sink.errors


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_transformer_layer_has_all_its_products_and_says_that_attention_is_unseen(te, recipe_name):
    torch.manual_seed(0)
    model = nn.Sequential(te.TransformerLayer(512, 1024, 8, fuse_qkv_params=True, params_dtype=BF16, device="cuda"))
    x = torch.randn(128, 2, 512, device="cuda", dtype=BF16, requires_grad=True)
    sink = sink_of()
    with Watch(model, sink):
        loss_of(run(te, model, x, recipe_of(te, recipe_name))).backward()
    attention = "0.self_attention"
    layers = [f"{attention}.layernorm_qkv", f"{attention}.proj", "0.layernorm_mlp.fc1", "0.layernorm_mlp.fc2"]
    for layer in layers:
        for tensor in ("activation", "weight", "output", "gradient", "wgrad"):
            assert sink.find(layer, tensor, part=""), (layer, tensor)
        assert sink.find(layer, "dgrad", stage=BACKWARD) or (layer, "dgrad") in sink.blinds
    assert ("", "attention products") in sink.blinds
    assert not sink.errors
