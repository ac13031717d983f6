from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
from sources_support import (
    BACKWARD,
    FORWARD,
    RecordingSink,
    Watch,
    assert_same_bits,
    assert_untouched,
    bits,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from flightrec.records import Phase
from flightrec.sources import torchao_patch

torchao_float8 = pytest.importorskip("torchao.float8")
from torchao.float8 import Float8LinearConfig, float8_linear  # noqa: E402

ORIGINALS = (
    float8_linear.hp_tensor_to_float8_dynamic,
    float8_linear.matmul_with_hp_or_float8_args.forward,
    float8_linear.matmul_with_hp_or_float8_args.backward,
)


@pytest.fixture(autouse=True)
def torchao_is_left_as_it_was():
    yield
    patched = float8_linear.matmul_with_hp_or_float8_args
    assert (float8_linear.hp_tensor_to_float8_dynamic, patched.forward, patched.backward) == ORIGINALS
    assert not torchao_patch._sources
    assert not torchao_patch._originals


def config(recipe: str) -> Float8LinearConfig:
    made = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(made, "emulate", True)
    return made


class Net(nn.Module):
    """Two Float8 products of which the second has no bias, and a plain one."""

    def __init__(self, recipe: str = "tensorwise", mode: str = "none") -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))
        self.head = nn.Linear(16, 4)
        self.mode = mode
        torchao_float8.convert_to_float8_training(
            self, config=config(recipe), module_filter_fn=lambda module, name: name not in ("embed", "head")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = self.inner(x) if self.mode == "none" else checkpoint(self.inner, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 16, generator=generator) for _ in range(count)]


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def once(recipe: str, sink: RecordingSink) -> Net:
    torch.manual_seed(0)
    model = Net(recipe)
    with Watch(model, sink) as watch:
        square(model, batches(1)[0]).backward()
        watch.step()
    return model


def encoded(seen, prefix: str = "") -> torch.Tensor:
    """The codes that the record's own high precision and scale should give."""
    parts = seen.quantized
    scale, codes = parts.components[f"{prefix}scale"], parts.components[f"{prefix}data"]
    top = torch.finfo(codes.dtype).max
    return (seen.tensor.float() * scale).clamp(-top, top).to(codes.dtype)


# -- what is recorded


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_come_with_the_codes_that_the_product_read(recipe):
    sink = RecordingSink()
    model = once(recipe, sink)
    for layer, out in (("inner.0", 32), ("inner.2", 16)):
        activation, weight = (sink.one(layer, name, call=0, stage=FORWARD) for name in ("activation", "weight"))
        gradient = sink.one(layer, "gradient", call=0, stage=BACKWARD)
        assert gradient.tensor.shape == (12, out)
        assert torch.equal(weight.tensor, model.get_submodule(layer).weight)
        for seen in (activation, weight, gradient):
            parts = seen.quantized
            assert parts.components["data"].shape == seen.tensor.shape
            assert parts.info.scale_direction == "multiply_to_encode"
            assert parts.info.class_name.endswith("Float8TrainingTensor")
            assert parts.pair_codes == "data"
            assert torch.equal(bits(encoded(seen)), bits(parts.components["data"]))
    assert torch.equal(sink.one("inner.0", "activation", stage=FORWARD).tensor, sink.one("embed", "output").tensor)
    assert sink.one("inner.0", "gradient").quantized.info.metadata["gemm_input_role"] == "grad_output"


def test_scales_and_block_shapes_tell_the_granularity():
    tensorwise, rowwise = RecordingSink(), RecordingSink()
    once("tensorwise", tensorwise)
    once("rowwise", rowwise)
    parts = tensorwise.one("inner.0", "activation").quantized
    assert parts.components["scale"].numel() == 1
    assert parts.info.block_shape == ()
    assert parts.info.metadata["granularity"] == "tensorwise"
    parts = rowwise.one("inner.0", "activation", stage=FORWARD).quantized
    assert parts.components["scale"].shape == (4, 3, 1)
    assert parts.info.block_shape == (1, 1, 16)
    parts = rowwise.one("inner.0", "weight", stage=FORWARD).quantized
    assert parts.components["scale"].shape == (32, 1)
    assert parts.info.block_shape == (1, 16)
    assert parts.info.metadata["axiswise_dim"] == -1


def test_rowwise_keeps_the_codes_of_the_other_direction_too():
    sink = RecordingSink()
    once("rowwise", sink)
    gradient = sink.one("inner.0", "gradient")
    columnwise = gradient.quantized.components["columnwise_data"]
    assert torch.equal(bits(encoded(gradient, "columnwise_")), bits(columnwise))
    assert gradient.quantized.components["columnwise_scale"].shape == (1, 32)
    assert gradient.quantized.info.metadata["columnwise"]["axiswise_dim"] == 0
    for tensor, shape in (("activation", (1, 16)), ("weight", (1, 16))):
        other = sink.one("inner.0", tensor, stage=BACKWARD)
        assert other.tensor is None
        assert set(other.quantized.components) == {"columnwise_data", "columnwise_scale"}
        assert other.quantized.components["columnwise_scale"].shape == shape, tensor
    sink = RecordingSink()
    once("tensorwise", sink)
    assert set(sink.one("inner.0", "gradient").quantized.components) == {"data", "scale"}
    assert not sink.find("inner.0", "activation", stage=BACKWARD), "the same codes as in the forward"


@pytest.mark.parametrize("recipe", RECIPES)
def test_dgrad_and_wgrad_are_what_autograd_gets(recipe):
    sink = RecordingSink()
    model = once(recipe, sink)
    assert torch.equal(sink.one("inner.2", "dgrad").tensor, sink.one("inner.1", "gradient").tensor)
    assert torch.equal(sink.one("inner.0", "dgrad").tensor, sink.one("embed", "gradient").tensor)
    assert torch.equal(sink.one("inner.2", "wgrad").tensor, model.inner[2].weight.grad)
    assert sink.one("inner.0", "output", stage=FORWARD)
    assert sink.one("head", "activation").quantized is None
    assert len({s.key for s in sink.seen}) == len(sink.seen)
    assert {s.key.microbatch for s in sink.seen} == {0}
    assert not sink.errors
    assert not sink.blinds


def test_a_dgrad_that_nobody_needs_is_not_recorded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    torchao_float8.convert_to_float8_training(model, config=config("tensorwise"))
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        square(model, batches(1)[0]).backward()
        watch.step()
    assert sink.one("0", "gradient")
    assert not sink.find("0", "dgrad")


def test_records_come_in_causal_order():
    sink = RecordingSink(layers={"inner.2"})
    once("rowwise", sink)
    assert [k.tensor for k in sink.recorded()] == [
        "activation", "weight", "output", "weight", "activation", "gradient", "dgrad", "wgrad",
    ]  # fmt: skip


def test_weight_comes_once_an_iteration_and_a_tied_one_by_its_first_owner():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    torchao_float8.convert_to_float8_training(model, config=config("tensorwise"))
    sink = RecordingSink(tensors={"weight", "activation"})
    with Watch(model, sink) as watch:
        for _ in range(2):
            for x in batches(2):
                square(model, x).backward()
            watch.step()
    for iteration in range(2):
        assert sink.one("0", "weight", iteration).key.microbatch == 0
        assert [s.key.microbatch for s in sink.find("0", "activation", iteration)] == [0, 1]
    assert not sink.find("1", "weight")


def test_only_what_is_selected_is_touched():
    torch.manual_seed(0)
    model = Net()
    sink = RecordingSink(tensors={"gradient"}, layers={"inner.0", "head"})
    with Watch(model, sink) as watch:
        square(model, batches(1)[0]).backward()
        watch.step()
    assert {(k.layer, k.tensor) for k in sink.recorded()} == {("inner.0", "gradient"), ("head", "gradient")}
    sink = RecordingSink(layers={"head"})
    with Watch(model, sink):
        assert float8_linear.hp_tensor_to_float8_dynamic is ORIGINALS[0]


def test_evaluation_is_apart():
    model = Net()
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        with torch.no_grad():
            model(batches(1)[0])
        assert not sink.seen
        square(model, batches(1)[0]).backward()
        watch.step()
    assert {k.phase for k in sink.recorded()} == {Phase.TRAIN}
    sink = RecordingSink(phases=(Phase.EVAL,))
    with Watch(model, sink):
        model.eval()
        model(batches(1)[0])
    assert sink.one("inner.0", "activation").quantized is not None
    assert not sink.find("inner.0", "weight")


# -- the run is not changed


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant"])
def test_training_is_bit_identical(recipe, mode):
    def check(dtype):
        def loss_of(model, x):
            return square(model, x.to(dtype))

        def make():
            return Net(recipe, mode).to(dtype)

        sink = RecordingSink(phases=(Phase.TRAIN, Phase.RECOMPUTE))
        plain = train(make, loss_of, batches(), microbatches=2)
        watched = train(make, loss_of, batches(), sink, microbatches=2)
        assert_same_bits(plain, watched)
        assert sink.find("inner.0", "activation")
        assert not sink.errors
        assert len({(s.iteration, s.key) for s in sink.seen}) == len(sink.seen)

    check(torch.float32)
    check(torch.bfloat16)


@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_checkpointing_records_the_same_training_tensors(mode):
    def collect(mode):
        sink = RecordingSink()
        train(lambda: Net("rowwise", mode), square, batches(), sink, microbatches=2)
        return {(s.iteration, s.key): s for s in sink.seen}

    expected, found = collect("none"), collect(mode)
    assert found.keys() == expected.keys()
    for key, seen in expected.items():
        other = found[key]
        if seen.tensor is not None:
            assert torch.equal(bits(seen.tensor), bits(other.tensor)), key
        for name, component in (seen.quantized.components if seen.quantized else {}).items():
            assert torch.equal(bits(component), bits(other.quantized.components[name])), (key, name)


def test_backward_records_carry_their_forwards_microbatch():
    torch.manual_seed(0)
    model = Net()
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        losses = [square(model, x * (i + 1)) for i, x in enumerate(batches(2))]
        gradients = []
        for number in (1, 0):  # a schedule that goes backward in another order
            losses[number].backward()
            gradients.append(model.inner[2].weight.grad.clone())
        watch.step()
    assert [k.microbatch for k in sink.recorded() if (k.layer, k.tensor) == ("inner.0", "gradient")] == [1, 0]
    assert torch.equal(sink.one("inner.2", "wgrad", microbatch=1).tensor, gradients[0])
    assert torch.equal(sink.one("inner.2", "wgrad", microbatch=0).tensor, gradients[1])


def test_no_operand_outlives_its_product():
    torch.manual_seed(0)
    model = Net("rowwise")
    sink = RecordingSink()
    alive: list[weakref.ref] = []
    sink.capture = lambda *a, high_precision=None, quantized=None, **k: alive.extend(
        weakref.ref(t) for t in (high_precision, quantized) if t is not None
    )
    with Watch(model, sink) as watch:
        gc.collect()
        gc.disable()
        try:
            loss = square(model, batches(1)[0])
            loss.backward()
            model.zero_grad()
            del loss
            watch.step()
            assert len(alive) > 10
            assert not any(reference() is not None for reference in alive)
        finally:
            gc.enable()


# -- robustness


def test_two_models_and_an_unwatched_one_do_not_mix():
    torch.manual_seed(0)
    one, two, other = Net(), Net(), Net()
    first, second = RecordingSink(), RecordingSink()
    with Watch(one, first):
        with Watch(two, second):
            square(two, batches(1)[0]).backward()
            square(other, batches(1)[0]).backward()
            square(copy.deepcopy(two), batches(1)[0]).backward()
            assert not first.seen
        seen = len(second.seen)
        square(one, batches(1)[0]).backward()
        assert len(second.seen) == seen
        assert len(first.seen) == seen


def test_threads_do_not_mix():
    torch.manual_seed(0)
    models = [Net(), Net()]
    sinks = [RecordingSink(), RecordingSink()]

    def work(model):
        for x in batches(5):
            square(model, x).backward()

    with Watch(models[0], sinks[0]), Watch(models[1], sinks[1]):
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for sink in sinks:
        assert not sink.errors
        assert [s.key.microbatch for s in sink.find("inner.0", "activation")] == [0, 1, 2, 3, 4]
        assert len(sink.find("inner.0", "gradient")) == 5


def test_a_failing_sink_never_reaches_the_run():
    sink = RecordingSink()
    sink.fail_on = lambda key: key.layer == "inner.0" and key.tensor in ("activation", "gradient")
    assert_same_bits(train(Net, square, batches()), train(Net, square, batches(), sink))
    assert sink.errors
    assert sink.find("inner.2", "gradient")


def test_a_torchao_that_looks_different_is_left_alone_and_told(monkeypatch):
    def other(tensor, dtype):
        raise AssertionError("never called")

    model = Net()
    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", other)
    sink = RecordingSink()
    watch = Watch(model, sink)
    assert "expected" in sink.blinds["inner.0", ""]
    with watch:
        assert float8_linear.hp_tensor_to_float8_dynamic is other
        monkeypatch.undo()
        square(model, batches(1)[0]).backward()
    assert sink.one("inner.0", "activation").quantized is None, "the modules source takes over"


def test_a_later_patch_of_somebody_else_survives_detach():
    model = Net()
    sink = RecordingSink()
    watch = Watch(model, sink)
    with watch:
        ours = float8_linear.hp_tensor_to_float8_dynamic
        float8_linear.hp_tensor_to_float8_dynamic = functools.partial(ours)
        theirs = float8_linear.hp_tensor_to_float8_dynamic
    try:
        assert float8_linear.hp_tensor_to_float8_dynamic is theirs
        seen = len(sink.seen)
        square(model, batches(1)[0]).backward()
        assert len(sink.seen) == seen
    finally:
        float8_linear.hp_tensor_to_float8_dynamic = ORIGINALS[0]


def test_detach_between_forward_and_backward_is_harmless():
    model = Net()
    sink = RecordingSink()
    with Watch(model, sink):
        loss = square(model, batches(1)[0])
    loss.backward()
    assert not sink.find("inner.0", "gradient")
    assert_untouched(model)


def test_an_exception_inside_the_product_is_raised_unchanged():
    model = Net()
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model.inner(torch.randn(2, 17))
        watch.step()
        square(model, batches(1)[0]).backward()
        watch.step()
    assert {k.microbatch for k in sink.recorded(1)} == {0}
    assert sink.one("inner.0", "gradient", 1)


def test_compiled_model_runs_as_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    expected = torch.compile(plain, backend="aot_eager", fullgraph=True)(batches(1)[0])
    torch._dynamo.reset()
    sink = RecordingSink()
    with Watch(model, sink):
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(batches(1)[0])
        out.square().mean().backward()
    assert torch.equal(out, expected)
    assert not sink.errors
    torch._dynamo.reset()
