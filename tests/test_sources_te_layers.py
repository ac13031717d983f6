from __future__ import annotations

import pytest
import te_cpu_modules
import torch
from torch import nn

from flightrec.sources.te_layers import Kind, find_layers, loaded_class, unseen_parts

BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
OP = {"dtype": torch.bfloat16, "device": "cpu"}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch):
    with te_cpu_modules.running(monkeypatch) as modules:
        yield modules


def test_every_kind_of_layer_is_found_with_its_products_and_weights(te):
    model = nn.ModuleDict(
        {
            "linear": te.Linear(16, 16, **BF16),
            "split": te.Linear(16, 48, parameters_split=("query", "key", "value"), **BF16),
            "norm": te.LayerNormLinear(16, 16, **BF16),
            "mlp": te.LayerNormMLP(16, 32, **BF16),
            "experts": te.GroupedLinear(2, 16, 16, **BF16),
            "ops": te.ops.Sequential(te.ops.Linear(16, 16, **OP), te.ops.BasicLinear(16, 16, **OP)),
            "op_experts": te.ops.GroupedLinear(2, 16, 16, **OP),
            "plain": nn.Linear(16, 16),
        }
    )
    found = {layer.layer: (layer.kind, layer.products, layer.weights) for layer in find_layers(model)}
    assert found == {
        "linear": (Kind.LINEAR, ("linear",), (("weight",),)),
        "split": (Kind.LINEAR, ("split",), (("query_weight", "key_weight", "value_weight"),)),
        "norm": (Kind.LAYERNORM_LINEAR, ("norm",), (("weight",),)),
        "mlp": (Kind.LAYERNORM_MLP, ("mlp.fc1", "mlp.fc2"), (("fc1_weight",), ("fc2_weight",))),
        "experts": (Kind.GROUPED, ("experts.gemm_0", "experts.gemm_1"), (("weight0",), ("weight1",))),
        "ops.0": (Kind.OP_LINEAR, ("ops.0",), (("weight",),)),
        "ops.1": (Kind.OP_LINEAR, ("ops.1",), (("weight",),)),
        "op_experts": (Kind.OP_GROUPED, ("op_experts.gemm_0", "op_experts.gemm_1"), (("weight0",), ("weight1",))),
    }
    for layer in find_layers(model):
        for names in layer.weights:
            assert all(isinstance(getattr(layer.module, name), nn.Parameter) for name in names)


def test_a_layer_that_is_the_whole_model_has_products_without_a_leading_dot(te):
    (layer,) = find_layers(te.LayerNormMLP(16, 32, **BF16))
    assert layer.products == ("fc1", "fc2")
    (layer,) = find_layers(te.Linear(16, 16, **BF16))
    assert layer.products == ("",)


def test_a_subclass_counts_as_what_it_derives_from(te):
    class Column(te.Linear):
        pass

    (layer,) = find_layers(Column(16, 16, **BF16))
    assert layer.kind is Kind.LINEAR


def test_claims_leave_to_the_modules_source_what_is_not_recorded_here(te):
    linear, mlp = find_layers(nn.Sequential(te.LayerNormLinear(16, 16, **BF16), te.LayerNormMLP(16, 32, **BF16)))
    assert linear.claims() == {"activation", "weight", "gradient", "output", "dgrad", "wgrad.weight"}
    assert mlp.claims() == {"activation", "weight", "wgrad.fc1_weight", "wgrad.fc2_weight"}


@pytest.mark.parametrize(("mode", "gathered"), [("column", {"activation"}), ("row", {"gradient"}), (None, set())])
def test_under_sequence_parallelism_some_operands_are_gathered(te, mode, gathered):
    linear, mlp = te.Linear(16, 16, **BF16), te.LayerNormMLP(16, 32, **BF16)
    for module in (linear, mlp):
        module.sequence_parallel = True
    linear.parallel_mode = mode
    mlp.set_parallel_mode = True
    first, second = find_layers(nn.Sequential(linear, mlp))
    assert first.gathered == (frozenset(gathered),)
    assert second.gathered == (frozenset({"activation"}), frozenset({"gradient"}))


def test_what_multiplies_elsewhere_is_named(te):
    attention = type("DotProductAttention", (nn.Module,), {"__module__": "transformer_engine.pytorch.attention"})
    model = nn.ModuleDict({"attention": attention(), "ops": te.ops.Sequential(te.ops.Linear(16, 16, **OP))})
    found = unseen_parts(model)
    assert "first 'attention'" in found["attention products"]
    assert set(found) == {"attention products", "operations of te.ops.Sequential"}
    assert not unseen_parts(nn.Linear(2, 2))


def test_a_class_that_is_not_loaded_is_none():
    assert loaded_class("module.nothing.Nothing") is None
    assert loaded_class("quantized_tensor.Nothing") is None
