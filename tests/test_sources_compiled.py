from __future__ import annotations

import logging

import pytest
import torch
from sources_support import RecordingSink, Watch, alone, assert_same_bits, assert_untouched, batches
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flightrec.records import Phase
from flightrec.sources import compiled


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A product, an activation in place, and two results."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.checkpoints = checkpoints

    def forward(self, x, *, scale=None):
        y = checkpoint(self.fc, x, use_reentrant=False) if self.checkpoints else self.fc(x)
        y = self.relu(y)
        y = y + (x if scale is None else x * scale)
        return y, y.sum()


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.a, self.b = Block(checkpoints), Block(checkpoints)

    def forward(self, x):
        x, first = self.a(x, scale=torch.full((), 0.5))
        x, second = self.b(x)
        return x.square().mean() + 0.1 * (first + second)


def trained(sink: RecordingSink | None, backend: str, shapes=(), **options) -> tuple[list[torch.Tensor], list[int]]:
    """Losses and gradients of two iterations of two microbatches, and the graphs there were after each shape."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counter = Net(**options), CompileCounterWithBackend(backend)
    watch = Watch(model, sink) if sink is not None else None
    if watch is not None:
        watch.__enter__()
    call = torch.compile(model, backend=counter, fullgraph=not options)
    trace: list[torch.Tensor] = []
    graphs = []
    for x in batches(2):
        for half in x.chunk(2):
            loss = call(half)
            loss.backward()
            trace.append(loss.detach())
        trace += [p.grad.clone() for p in model.parameters()]
        graphs.append(counter.frame_count)
        if watch is not None:
            watch.step()
    for rows in shapes:
        call(torch.ones(rows, 8))
        graphs.append(counter.frame_count)
    if watch is not None:
        watch.__exit__()
        assert_untouched(model)
    return trace, graphs


def test_f26_arm_b_attach_first_compile_after():
    sink = RecordingSink()
    plain, graphs = trained(None, "aot_eager")
    watched, watched_graphs = trained(sink, "aot_eager")
    assert_same_bits(plain, watched)
    assert watched_graphs == graphs == [1, 1], "one graph for both iterations"
    for microbatch in (0, 1):
        where = {"microbatch": microbatch, "call": 0, "phase": Phase.TRAIN}
        for layer in ("a.fc", "b.fc"):
            for tensor in ("activation", "output", "gradient"):
                assert sink.one(layer, tensor, 1, **where), (layer, tensor)
        assert sink.one("a", "input", 1, part="scale", **where)
        assert sink.one("b", "output", 1, part="0", **where)
        assert sink.one("b", "gradient", 1, part="1", **where).tensor.item() == pytest.approx(0.1)
    assert len(sink.find("a.fc", "weight", 1)) == 1
    assert torch.equal(
        sink.one("a", "output", 0, part="0", microbatch=0).tensor, sink.one("b", "input", 0, microbatch=0).tensor
    )
    assert ("", "dgrad inside compiled regions") in sink.blinds
    assert not sink.errors


def test_f26_two_shapes_make_as_many_graphs_as_without_us():
    _, graphs = trained(None, "eager", shapes=(3, 5))
    _, watched_graphs = trained(RecordingSink(), "eager", shapes=(3, 5))
    assert watched_graphs == graphs == [1, 1, 2, 2]


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.fc(x)))


def test_f26_arm_a_compiled_and_run_before_attach_is_compiled_anew(caplog):
    model, sink = Straight(), RecordingSink()
    call = torch.compile(model, backend="eager")
    call(torch.ones(2, 4)).sum().backward()
    call(torch.ones(2, 4))
    x = torch.ones(2, 4)
    x[0, 0] = float("nan")
    with caplog.at_level(logging.INFO, "flightrec"), Watch(model, sink):
        call(x).sum().backward()
    assert "compiled anew" in caplog.text
    assert sink.one("fc", "activation").tensor.isnan().any()
    assert sink.first_nonfinite().key.layer == ""
    assert sink.one("fc", "gradient")
    seen = len(sink.seen)
    call(x).sum().backward()
    assert len(sink.seen) == seen, "detach is final"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of what enters a region
def test_limits_that_somebody_sets_meanwhile_are_raised_too_and_come_back():
    alone()
    config = torch._dynamo.config
    with config.patch(recompile_limit=4):
        with Watch(nn.Sequential(Straight(), Straight()), RecordingSink(tensors={"output"})):
            for wish in (4, 2):
                config.recompile_limit = wish
                compiled._raise_limits()
                assert config.recompile_limit > wish
        assert config.recompile_limit == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo
def test_layers_that_are_compiled_one_by_one_each_have_a_graph():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Straight() for _ in range(3))
            for block in self.blocks:
                block.head = nn.Identity()

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, sink = Deep(), RecordingSink(tensors={"output", "gradient"})
    counter = CompileCounterWithBackend("eager")
    alone()
    with torch._dynamo.config.patch(recompile_limit=2), Watch(model, sink) as watch:
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            watch.step()
        assert counter.frame_count == len(model.blocks)
        assert torch._dynamo.config.recompile_limit > 2
        watch.__exit__()
        assert torch._dynamo.config.recompile_limit == 2, "what stood there"
    for index in range(len(model.blocks)):
        assert sink.one(f"blocks.{index}.fc", "output", 1)
        assert sink.one(f"blocks.{index}.fc", "gradient", 1)


def test_what_the_compiler_keeps_apart_is_named_and_runs_as_without_us():
    plain, graphs = trained(None, "eager", checkpoints=True)
    sink = RecordingSink()
    watched, watched_graphs = trained(sink, "eager", checkpoints=True)
    assert_same_bits(plain, watched)
    assert watched_graphs == graphs
    assert "checkpointing" in sink.blinds["a.fc", ""]
    assert not sink.find("a.fc", "output")
    assert sink.find("a.relu", "output", 1)


def test_an_export_holds_nothing_of_ours_and_hides_nothing_of_the_run():
    model, sink = Net(), RecordingSink()
    x = torch.randn(4, 8)
    with Watch(model, sink):
        exported = torch.export.export(model, (x,), strict=False)
        assert not any("flightrec" in str(node.target) for node in exported.graph.nodes)
        assert not sink.blinds
        model(x)
    assert sink.find("a.fc", "activation")


def test_evaluation_in_a_compiled_region_is_evaluation():
    model, sink = Straight(), RecordingSink(tensors={"output"}, phases=(Phase.TRAIN, Phase.EVAL))
    call = torch.compile(model, backend="aot_eager")
    with Watch(model, sink):
        call(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            call(torch.ones(2, 4))
    assert [s.key.phase for s in sink.find("fc", "output")] == [Phase.TRAIN, Phase.EVAL]


def test_a_failing_sink_leaves_a_compiled_region_running():
    model, sink = Straight(), RecordingSink()
    sink.fail_on = lambda key: key.layer == "fc"
    call = torch.compile(model, backend="aot_eager")
    with Watch(model, sink):
        loss = call(torch.ones(2, 4)).sum()
        loss.backward()
    assert torch.equal(loss, model(torch.ones(2, 4)).sum())
    assert sink.errors
    assert sink.find("head", "output")


def test_nothing_of_a_model_is_held_when_nobody_watches():
    model, sink = Straight(), RecordingSink()
    call = torch.compile(model, backend="eager")
    with Watch(model, sink):
        call(torch.ones(2, 4))
        assert compiled._places
    assert not compiled._places
    assert not compiled._places_of
