"""Compiled regions and CUDA graphs on the GPU: graphs are really used, and nothing of a warm-up is recorded."""

from __future__ import annotations

import pytest
import torch
from sources_support import RecordingSink, Watch, assert_untouched
from torch import nn

from flightrec.records import Phase

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


class CapturingSink(RecordingSink):
    """Notes what is seen in a capture, where nothing may be copied."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.captured = []

    def capture(self, layer, tensor, **fields) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.captured.append((layer, tensor, fields["microbatch"], fields["phase"], fields["call"]))
        else:
            super().capture(layer, tensor, **fields)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.block(x))


def made() -> Net:
    torch.manual_seed(0)
    return Net().cuda()


def trained(model, call, sink: CapturingSink | None, steps: int = 5) -> list[torch.Tensor]:
    trace = []
    watch = Watch(model, sink) if sink is not None else None
    if watch is not None:
        watch.__enter__()
    for step in range(steps):
        torch.manual_seed(step)
        loss = call(torch.randn(16, 64, device="cuda")).square().mean()
        loss.backward()
        trace.append(loss.detach().clone())
        trace += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        if watch is not None:
            watch.step()
    torch.cuda.synchronize()
    if watch is not None:
        watch.__exit__()
    return trace


def test_reduce_overhead_uses_graphs_and_each_place_is_captured_once():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, sink = made(), CapturingSink()
    trained(model, torch.compile(model, mode="reduce-overhead", fullgraph=True), sink)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    captured = {(layer, tensor) for layer, tensor, *_ in sink.captured}
    assert {("block.fc1", "activation"), ("block.fc2", "output"), ("block.fc2", "gradient")} <= captured
    assert {(microbatch, phase, call) for _, _, microbatch, phase, call in sink.captured} == {(0, Phase.TRAIN, 0)}
    assert not sink.find("block.fc2", "output"), "its first run belongs to the graphs"
    assert ("", "first runs of regions under CUDA graphs") in sink.blinds
    assert not sink.errors
    assert_untouched(model)
    torch._dynamo.reset()


def test_a_compiled_region_has_the_same_numbers_as_without_us_where_no_fusion_ends():
    torch._dynamo.reset()
    plain = made()
    expected = trained(plain, torch.compile(plain, backend="aot_eager"), None)
    torch._dynamo.reset()
    model, sink = made(), RecordingSink()
    found = trained(model, torch.compile(model, backend="aot_eager"), sink)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(sink.find("block.fc2", "gradient")) == 5
    torch._dynamo.reset()


def test_torchs_graphed_callables_with_a_watched_module():
    model, sink = made(), CapturingSink()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    with Watch(model, sink) as watch:
        torch.cuda.make_graphed_callables(model.block, (x,))
        assert not sink.seen, "a warm-up records nothing"
        assert sink.microbatch_index == -1
        captured = {(layer, tensor) for layer, tensor, *_ in sink.captured}
        assert {("block.fc1", "activation"), ("block", "output"), ("block.fc2", "gradient")} <= captured
        assert {(microbatch, phase, call) for _, _, microbatch, phase, call in sink.captured} == {(0, Phase.TRAIN, 0)}
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        watch.step()
        replayed = {(s.key.layer, s.key.tensor) for s in sink.seen}
        assert ("head", "activation") in replayed
        assert ("block.fc1", "wgrad") in replayed, "which autograd adds outside of the graph"
        assert not {
            layer_tensor
            for layer_tensor in replayed
            if layer_tensor[0].startswith("block") and layer_tensor[1] != "wgrad"
        }, "the graph records them"
        model.block.eval()
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        watch.step()
    assert sink.one("block.fc2", "output", 1), "in the other mode the original forward runs"
    assert sink.one("block", "output", 1)
    assert not sink.errors
    assert_untouched(model)


def test_what_was_captured_before_attach_is_named():
    model, sink = made(), CapturingSink()
    torch.cuda.make_graphed_callables(model.block, (torch.randn(16, 64, device="cuda", requires_grad=True),))
    with Watch(model, sink) as watch:
        reason = sink.blinds["block", "inside of a CUDA graph"]
        assert "fc1, fc2" in reason
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        watch.step()
    assert sink.one("block", "input")
    assert sink.one("block", "output")
    assert not sink.find("block.fc1", "output")


def test_transformer_engines_graphed_callables_with_a_watched_module():
    te = pytest.importorskip("transformer_engine.pytorch")
    recipe = pytest.importorskip("transformer_engine.common.recipe")
    model = nn.Sequential(
        te.LayerNormMLP(128, 256, params_dtype=torch.bfloat16), te.Linear(128, 128, params_dtype=torch.bfloat16)
    ).cuda()
    sink = CapturingSink()
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scaling = recipe.DelayedScaling()
    with Watch(model, sink) as watch:
        graphed = te.make_graphed_callables(model, (x,), enabled=True, recipe=scaling)
        assert not sink.seen
        captured = {(layer, tensor) for layer, tensor, *_ in sink.captured}
        assert {("0.fc1", "activation"), ("0.fc2", "weight"), ("1", "gradient")} <= captured, captured
        assert {entry[3] for entry in sink.captured} == {Phase.TRAIN}
        with te.autocast(enabled=True, recipe=scaling):
            out = graphed(x.detach().clone().requires_grad_())
        out.float().sum().backward()
        watch.step()
    assert {s.key.tensor for s in sink.seen} <= {"wgrad", "dgrad"}
    assert not sink.errors, sink.errors
    assert_untouched(model)
