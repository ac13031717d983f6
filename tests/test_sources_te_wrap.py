"""Kernels that the CPU cannot run, through the wrappers that stand in for them: what is read when, and what is told."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import te_cpu
import te_cpu_modules
import torch
from sources_support import BACKWARD, FORWARD, RecordingSink, Watch, bits
from te_layer_support import Layer, batch, loss_of, recipe_of, run, sink_of
from torch import nn

from flightrec.records import Phase
from flightrec.sources import te_wrap
from flightrec.sources.te import TeSource
from flightrec.sources.te_run import Run, swap_run

BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch):
    with te_cpu_modules.running(monkeypatch) as modules:
        yield modules


class Inside:
    """A run of a model's only layer, as if its forward or backward ran now."""

    def __init__(self, model: nn.Module, *, backward: bool = False) -> None:
        self.sink = RecordingSink(phases=(Phase.TRAIN,))
        self.watch = Watch(model, self.sink)
        self.backward = backward

    def __enter__(self) -> Inside:
        self.watch.__enter__()
        source = next(source for source in self.watch.sources if isinstance(source, TeSource))
        layer = next(iter(source._layers.values()))
        source.stamps.enter(layer.module, layer.layer)
        self.run = Run(layer.kind, (source.listen(layer.kind),))
        if self.backward:
            self.run = self.run.begin_backward()
        swap_run(self.run)
        return self

    def __exit__(self, *_: object) -> None:
        swap_run(None)
        self.watch.__exit__()
        assert not self.sink.errors


def gemm(kernel: Any, a: Any, transa: bool, b: Any, transb: bool, **kwargs: Any) -> Any:
    """Call a product kernel through the wrapper, with the arguments that ``general_gemm`` passes."""
    rest = (None, None, None, None, None, False, None, False, None, 0, False, False)
    return te_wrap.product(kernel)(a, transa, b, transb, *rest, **kwargs)


def test_an_operand_that_the_kernel_gathers_is_read_after_it(te):
    a, b = torch.ones(4, 8), torch.zeros(6, 8)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args[2].fill_(3)
        return args[2] @ args[0].t(), None, None, None

    gathers = types.SimpleNamespace(name="AG")
    with Inside(te.Linear(8, 4, **BF16)) as inside:
        gemm(kernel, a, True, b, False, comm_overlap=object(), comm_type=gathers)
    assert inside.sink.one("", "activation").tensor.eq(3).all()
    assert inside.sink.one("", "output").tensor.eq(24).all()


def test_an_operand_that_the_kernel_gathers_and_does_not_keep_is_told(te):
    gathers, communicator = types.SimpleNamespace(name="AG"), types.SimpleNamespace(with_cublasmp=lambda: True)
    with Inside(te.Linear(8, 4, **BF16)) as inside:
        gemm(lambda *_, **__: (torch.ones(6, 4), None, None, None), torch.ones(4, 8), True, torch.ones(3, 8), False,
             comm_overlap=communicator, comm_type=gathers)  # fmt: skip
    assert "cuBLASMp" in inside.sink.blinds["", "activation"]
    assert not inside.sink.find("", "activation")
    assert inside.sink.one("", "output")


def test_an_operand_of_a_kernel_that_gathers_something_else_is_read_before_it(te):
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args[2].fill_(3)
        return args[2] @ args[0].t(), None, None, None

    with Inside(te.Linear(8, 4, **BF16)) as inside:
        kind = types.SimpleNamespace(name="AG")
        gemm(
            kernel, torch.ones(4, 8), True, torch.zeros(6, 8), False, comm_overlap=1, comm_type=kind, bulk_overlap=True
        )
    assert inside.sink.one("", "activation").tensor.eq(0).all()


def test_a_result_that_the_kernel_reduces_over_ranks_is_told_not_recorded(te):
    kind = types.SimpleNamespace(name="RS")
    with Inside(te.Linear(8, 4, **BF16)) as inside:
        gemm(lambda *_, **__: (torch.ones(6, 4), None, None, None), torch.ones(4, 8), True, torch.ones(6, 8), False,
             comm_overlap=1, comm_type=kind)  # fmt: skip
    assert "Userbuffers" in inside.sink.blinds["", "output"]
    assert inside.sink.one("", "activation")
    assert not inside.sink.find("", "output")


def test_a_kernel_called_in_an_unknown_way_is_told_and_called(te):
    with Inside(te.Linear(8, 4, **BF16)) as inside:
        result = gemm(lambda *_, **__: "made", torch.ones(4, 8), True, torch.ones(6, 8), True)
    assert result == "made"
    assert "not known" in inside.sink.blinds["", "products of ''"]
    assert not inside.sink.seen


def test_a_custom_product_is_read_by_its_layout(te):
    a, b, made = torch.full((4, 8), 2.0), torch.ones(6, 8), torch.ones(6, 4)
    with Inside(te.Linear(8, 4, **BF16)) as inside:
        wrapped = te_wrap.custom_gemm(lambda *args: (made, None, None, None))
        wrapped(a, b, None, None, None, False, None, False, "TN", None, None, False, False)
    assert torch.equal(inside.sink.one("", "weight").tensor, a)
    assert torch.equal(inside.sink.one("", "activation").tensor, b)
    assert torch.equal(inside.sink.one("", "output").tensor, made)


def test_row_scaled_nvfp4_is_read_before_its_amax_is_replaced(te):
    storages = importlib.import_module(f"{te_cpu._PACKAGE}.tensor.storage.nvfp4_tensor_storage")

    def operand(rows: int) -> Any:
        return storages.NVFP4TensorStorage(
            rowwise_data=torch.zeros(rows, 32, dtype=torch.uint8),
            rowwise_scale_inv=torch.zeros(128, 4, dtype=torch.uint8),
            columnwise_data=None,
            columnwise_scale_inv=None,
            amax_rowwise=torch.arange(rows, dtype=torch.float32) + 2,
            amax_columnwise=None,
            fp4_dtype=importlib.import_module(f"{te_cpu._PACKAGE}.constants").DType.kFloat4E2M1,
            quantizer=None,
            with_gemm_swizzled_scales=False,
            fake_dtype=torch.bfloat16,
            row_scaled_nvfp4=True,
        )

    a, b = operand(16), operand(32)
    with Inside(te.Linear(64, 16, **BF16)) as inside:
        one, other, *_ = te.gemm._nvfp4_row_scaled_gemm_inputs(a, b, transa=True, transb=False)
        assert other._amax_rowwise.shape == (1,)
        gemm(lambda *_, **__: (torch.ones(32, 16), None, None, None), one, True, other, False)
    components = inside.sink.one("", "activation").quantized.components
    assert any(torch.equal(value.flatten(), b._amax_rowwise) for value in components.values())
    assert "row-scaled NVFP4" in inside.sink.blinds["", "output"]


def grouped_buffer(rows: torch.Tensor, splits: torch.Tensor) -> Any:
    storages = importlib.import_module(f"{te_cpu._PACKAGE}.tensor.storage.grouped_tensor_storage")
    return storages.GroupedTensorStorage(
        shape=tuple(rows.shape), dtype=rows.dtype, num_tensors=splits.numel(), quantizer=None, data=rows.reshape(-1),
        first_dims=splits, tensor_offsets=torch.cumsum(splits * rows.shape[1], 0),
    )  # fmt: skip


class SplitSink(RecordingSink):
    """Also keeps the splits."""

    splits: dict[Any, torch.Tensor]

    def capture(self, layer, tensor, *, splits=None, **named) -> None:
        super().capture(layer, tensor, splits=splits, **named)
        if splits is not None:
            self.__dict__.setdefault("splits", {})[self.seen[-1].key.tensor] = splits.clone()


def test_buffers_for_all_experts_are_recorded_whole_with_their_splits(te):
    model = te.GroupedLinear(2, 8, 4, **BF16)
    splits, x, dy = torch.tensor([2, 4]), torch.randn(6, 8), torch.randn(6, 4)
    weights, made, wgrads = [torch.ones(4, 8), torch.zeros(4, 8)], torch.empty(6, 4), [torch.zeros(4, 8)] * 2
    inside = Inside(model)
    inside.sink = SplitSink()
    inside.watch = Watch(model, inside.sink)
    zeros, ones = te.gemm._get_fp32_zeros_tensor(1, torch.device("cpu")), torch.ones(1)

    def kernel(*args: Any) -> Any:
        outs = args[4] if isinstance(args[4], list) else [args[4].rowwise_data]
        for out in outs:
            out.fill_(7)
        return args[4]

    with inside:
        wrapped = te_wrap.grouped_buffer_product(kernel, te.gemm)
        rest = (None, None, None)
        wrapped(weights, True, grouped_buffer(x, splits), False, grouped_buffer(made, splits), *rest, zeros)
        inside.run = inside.run.begin_backward()
        swap_run(inside.run)
        dx = grouped_buffer(torch.empty(6, 8), splits)
        wrapped(weights, False, grouped_buffer(dy, splits), False, dx, *rest, zeros)
        wrapped(grouped_buffer(x, splits), False, grouped_buffer(dy, splits), True, wgrads, *rest, ones)
    sink = inside.sink
    assert torch.equal(sink.one("gemm", "activation", stage=FORWARD).tensor, x)
    assert torch.equal(sink.one("gemm", "gradient", stage=BACKWARD).tensor, dy)
    assert sink.one("gemm", "output").tensor.eq(7).all()
    assert sink.one("gemm", "dgrad").tensor.shape == (6, 8)
    assert set(sink.splits) == {"activation", "output", "gradient", "dgrad"}
    assert all(value.tolist() == [2, 4] for value in sink.splits.values())
    for i in range(2):
        assert torch.equal(sink.one(f"gemm_{i}", "weight").tensor, weights[i])
        assert sink.one(f"gemm_{i}", "wgrad", part="main_grad").tensor.eq(7).all()


def test_several_products_in_one_fused_kernel_are_told(te):
    class GroupedMLP(te.ops.op.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_, [() for _ in self.basic_ops]

    inner = [te.ops.BasicLinear(8, 8, dtype=torch.bfloat16, device="cpu") for _ in range(2)]
    model = nn.ModuleList(inner)
    sink = RecordingSink()
    fused = GroupedMLP(inner)
    contexts = [te.ops.op.OperationContext() for _ in inner]
    with Watch(model, sink):
        fused.fuser_forward(contexts, torch.ones(2, 8))
    assert "one fused kernel" in sink.blinds["", "products of '0'"]
    assert "one fused kernel" in sink.blinds["", "products of '1'"]
    assert not sink.errors


class Pair(nn.Module):
    """Two layers of one kind."""

    def __init__(self, te: Any, kind: str) -> None:
        super().__init__()
        self.a, self.b = Layer(te, kind), Layer(te, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x), self.b(x)], -1)


def record_pair(te: Any, kind: str, turn: Callable[[RecordingSink, str], bool]) -> RecordingSink:
    te.state.reset()
    torch.manual_seed(0)
    model, recipe, sink = Pair(te, kind), recipe_of(te, "delayed"), sink_of()
    sink.turn = lambda layer: turn(sink, layer)
    with Watch(model, sink) as watch:
        for iteration in range(4):
            for microbatch in range(2):
                y = run(te, model, batch(2 * iteration + microbatch), recipe)
                sink.is_backward = True
                loss_of(y).backward()
                sink.is_backward = False
            watch.step()
    assert not sink.errors
    return sink


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP checkpoint", "GroupedLinear", "ops"])
def test_layers_in_turn_are_recorded_as_if_all_were_and_no_others(te, kind):
    def is_turn(iteration: int, layer: str) -> bool:
        return layer.startswith("ab"[iteration % 2]) or iteration == 0

    whole = record_pair(te, kind, lambda sink, layer: True)
    turns = record_pair(te, kind, lambda sink, layer: is_turn(sink.iteration, layer))
    expected = [seen for seen in whole.seen if is_turn(seen.iteration, seen.key.layer)]
    assert {seen.key.tensor for seen in turns.seen} >= {"activation", "weight", "gradient", "dgrad", "output"}
    assert [(seen.iteration, seen.key) for seen in turns.seen] == [(seen.iteration, seen.key) for seen in expected]
    for one, two in zip(turns.seen, expected, strict=True):
        for mine, other in zip(tensors_of(one), tensors_of(two), strict=True):
            assert torch.equal(bits(mine), bits(other)), one.key


def test_a_turn_that_ends_between_a_forward_and_its_backward_ends_there(te):
    sink = record_pair(te, "LayerNormLinear", lambda sink, layer: not getattr(sink, "is_backward", False))
    seen = {(s.key.tensor, s.key.microbatch) for s in sink.seen if s.key.layer == "a.layer" and s.iteration == 1}
    assert {("activation", 0), ("activation", 1), ("output", 0), ("output", 1)} <= seen
    assert not {tensor for tensor, _ in seen} & {"gradient", "dgrad", "wgrad"}


def tensors_of(seen: Any) -> list[torch.Tensor]:
    components = [] if seen.quantized is None else list(seen.quantized.components.values())
    return components if seen.tensor is None else [seen.tensor, *components]
