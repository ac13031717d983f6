"""Captured CUDA graphs, really captured: every replay is recorded in its own place, counted, judged and blamed."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from models import RECORD_ALL, WIDTH, batches, loss_of, make
from torch import nn

import flightrec
from flightrec.records import Severity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
ROWS = 64


def config(**more: Any) -> dict[str, Any]:
    ring = {"iterations": 2, "memory": "1 GiB", "graph_replays": 4} | more.pop("ring", {})
    return {**RECORD_ALL, "select": [{"tensors": "*"}], "ring": ring, "incident": {"after": 1}, **more}


class Graphed:
    """Forward, loss and backward of a microbatch as one graph; the gradients are those of the latest replay."""

    def __init__(self, net: nn.Module, recorder: flightrec.Recorder | None, *, warmups: int = 2) -> None:
        self.net, self.recorder = net, recorder
        self.x = torch.zeros(ROWS, WIDTH, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmups):
                self._run(batches(1, rows=ROWS, device="cuda")[0][0])
                if recorder is not None:
                    recorder.step()
        torch.cuda.current_stream().wait_stream(side)
        net.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._run(self.x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.net, x)
        if self.recorder is not None:
            self.recorder.loss(loss)
        loss.backward()
        return loss

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.loss


def train(graphed: Graphed, data: list[list[torch.Tensor]], *, before_step: Any = None) -> list[torch.Tensor]:
    """SGD by the last microbatch's gradients; all losses and gradients, and the parameters."""
    seen = []
    for iteration, microbatches in enumerate(data):
        seen += [graphed.replay(x).detach().clone() for x in microbatches]
        with torch.no_grad():
            for parameter in graphed.net.parameters():
                seen.append(parameter.grad.clone())
                parameter -= 0.01 * parameter.grad
        if before_step is not None:
            before_step(iteration)
        if graphed.recorder is not None:
            graphed.recorder.step()
    return seen + [parameter.detach().clone() for parameter in graphed.net.parameters()]


def incidents(directory: Any) -> list[Any]:
    return [flightrec.open(folder) for folder in sorted(directory.iterdir())]


def named(incident: Any, iteration: int) -> dict[tuple[Any, ...], Any]:
    """Records of an iteration by what they are of."""
    return {
        (r.key.layer, r.key.tensor, r.key.part, r.key.microbatch, r.key.call, r.key.stage.value): r
        for r in incident.records(iteration=iteration)
        if r.key.phase.value == "train"
    }


def test_a_replay_of_a_whole_iteration_holds_the_bytes_of_an_eager_one(tmp_path):
    data = batches(4, rows=ROWS, device="cuda")
    net = make().cuda()
    twin = copy.deepcopy(net)
    with flightrec.Recorder(config(), directory=tmp_path / "graphed") as recorder:
        recorder.attach(net)
        graphed = Graphed(net, recorder)
        with torch.no_grad():  # the eager iterations before changed nothing
            train(graphed, data, before_step=lambda i: recorder.trigger("look") if i == 3 else None)
        assert not recorder._capture._dead_parts
    with flightrec.Recorder(config(), directory=tmp_path / "eager") as recorder:
        recorder.attach(twin)
        for iteration, (x,) in enumerate(data):
            loss = loss_of(twin, x)
            recorder.loss(loss)
            loss.backward()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter -= 0.01 * parameter.grad
            twin.zero_grad()
            if iteration == 3:
                recorder.trigger("look")
            recorder.step()
    (one,), (two,) = incidents(tmp_path / "graphed"), incidents(tmp_path / "eager")
    names = set()
    for iteration in (2, 3):
        replayed, eager = named(one, iteration + 2), named(two, iteration)
        assert replayed.keys() >= {name for name in eager if name[1] != "parameter"}
        for name, record in eager.items():
            if name in replayed and name[1] != "parameter":
                assert np.array_equal(replayed[name].high_precision, record.high_precision, equal_nan=True), name
                assert replayed[name].statistics["amax"] == record.statistics["amax"]
                names.add(name[1])
    assert names >= {"input", "output", "gradient", "loss", "weight"}
    assert one.iterations[-1].loss == two.iterations[-1].loss


@pytest.mark.parametrize("faulty", [0, 2, 3])
def test_a_nan_in_one_of_four_replays_is_blamed_on_it(faulty, tmp_path):
    data = batches(6, 4, rows=ROWS, device="cuda")
    data[4][faulty] = data[4][faulty].clone()
    data[4][faulty][5, 7] = math.nan
    inputs = [[x.clone() for x in microbatches] for microbatches in data]
    net = make().cuda()
    rules = [{"kind": "nonfinite"}]
    with flightrec.Recorder(config(triggers=rules, ring={"iterations": 1}), directory=tmp_path) as recorder:
        recorder.attach(net)
        graphed = Graphed(net, recorder, warmups=1)
        for microbatches in data:
            for x in microbatches:
                graphed.replay(x)
            recorder.step()
        assert not recorder._capture._dead_parts
        assert recorder._capture.engine.ring._replays.num_dropped == 0
    (incident,) = incidents(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 5)
    assert incident.trigger.key.microbatch == faulty
    first = incident.blame()[0]
    assert (first.key.microbatch, first.key.tensor, first.key.layer) == (faulty, "input", "")
    assert {f.key.microbatch for f in incident.firings if f.iteration == 5 and f.key is not None} == {faulty}
    for iteration in (5, 6):
        entering = incident.records(layer="", tensor="input", iteration=iteration)
        assert [record.key.microbatch for record in entering] == [0, 1, 2, 3]
        for record in entering:
            x = inputs[iteration - 1][record.key.microbatch].cpu().numpy()
            assert np.array_equal(record.high_precision, x, equal_nan=True)
    assert incident.iterations[-1].num_microbatches == 4


def test_a_replay_too_many_is_dropped_counted_and_told(tmp_path):
    net = make().cuda()
    with flightrec.Recorder(config(ring={"graph_replays": 2}), directory=tmp_path) as recorder:
        recorder.attach(net)
        graphed = Graphed(net, recorder, warmups=1)
        for iteration in range(4):
            for microbatch in range(3):
                graphed.replay(torch.full((ROWS, WIDTH), 10.0 * iteration + microbatch, device="cuda"))
            if iteration == 3:
                recorder.trigger("look")
            recorder.step()
        torch.cuda.synchronize()
        recorder.step()
        ring = recorder._capture.engine.ring
        assert ring._replays.num_dropped == 4
    (incident,) = incidents(tmp_path)
    entering = incident.records(layer="", tensor="input", iteration=4)
    assert [float(record.high_precision[0, 0]) for record in entering] == [30.0, 31.0]
    assert any("replayed 3 times in an iteration, and 2 have a place" in blind.reason for blind in incident.blind)


def test_slots_are_held_while_replays_go_on(tmp_path):
    """Two faults with ``after``: what is held is not overwritten, and each incident has its own iterations."""
    net = make().cuda()
    by_hand = [{"name": "by-hand", "kind": "manual"}]  # the inputs grow, and the loss with them
    made = config(ring={"iterations": 2}, incident={"after": 2, "cooldown": 0}, triggers=by_hand)
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        graphed = Graphed(net, recorder, warmups=1)
        faults: list[int] = []
        for iteration in range(1, 500):
            for microbatch in range(2):
                graphed.replay(torch.full((ROWS, WIDTH), 10.0 * iteration + microbatch, device="cuda"))
            idle = not recorder._capture.engine.flusher.busy  # all slots are free again
            if iteration in (6, 300) or (iteration > 20 and idle and len(faults) == 1):
                recorder.trigger("look")
                faults.append(iteration)
            recorder.step()
            if len(faults) == 2 and iteration > faults[1] + 10:
                break
    found = incidents(tmp_path)
    seen = [[entry.iteration for entry in one.iterations] for one in found]
    assert seen == [list(range(fault - 1, fault + 3)) for fault in faults]
    for one in found:
        for record in one.records(layer="", tensor="input"):
            assert np.all(record.high_precision == 10.0 * record.iteration + record.key.microbatch)
            assert record.statistics["amax"] == 10.0 * record.iteration + record.key.microbatch
        assert len(one.records(layer="", tensor="input")) == 8


def test_the_run_is_unchanged_and_replays_wait_for_nothing(tmp_path):
    data = batches(5, 3, rows=ROWS, device="cuda")
    net = make().cuda()
    plain = train(Graphed(copy.deepcopy(net), None), data)
    rules = [{"kind": "nonfinite"}, {"kind": "amax_spike"}]
    with flightrec.Recorder(config(triggers=rules), directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        graphed = Graphed(net, recorder)
        recorded = train(graphed, data)
        assert all(torch.equal(one, two) for one, two in zip(plain, recorded, strict=True))
        gc.collect()
        torch.cuda.synchronize()
        sizes = []
        torch.cuda.set_sync_debug_mode("error")
        try:
            for iteration in range(300):
                for x in data[0]:
                    graphed.replay(x)
                recorder.step()
                if iteration % 20 == 10:
                    sizes.append(torch.cuda.memory_allocated())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not recorder._capture.off
        assert not recorder._capture._dead_parts
        assert max(sizes) - min(sizes) < 256 << 10, sizes
        assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]), sizes
    assert not (tmp_path / "out").exists()


def test_a_graph_outlives_the_recorder_and_harms_nobody(tmp_path):
    net = make().cuda()
    with flightrec.Recorder(config(), directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        graphed = Graphed(net, recorder, warmups=1)
        graphed.replay(torch.ones(ROWS, WIDTH, device="cuda"))
        recorder.step()
    ring = recorder._capture.engine
    assert ring is None
    del recorder
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    others = [torch.full((1 << size,), 7.0, device="cuda") for size in range(10, 24) for _ in range(4)]
    for _ in range(8):
        graphed.replay(torch.ones(ROWS, WIDTH, device="cuda"))
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)
    del others
    graphed.graph.reset()
    del graphed
    net.zero_grad(set_to_none=True)
    gc.collect()
    assert torch.cuda.memory_allocated() < before, "the memory goes with the graph"


def test_streams_forked_inside_a_capture_and_replays_on_another_stream(tmp_path):
    made = config(ring={"iterations": 2}, incident={"after": 0})
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        x = torch.zeros(1 << 16, device="cuda")
        recorder.record("eager", "output", high_precision=x)
        recorder.step()
        graph, fork, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            fork.wait_stream(main)
            with torch.cuda.stream(fork):
                doubled = x * 2
                recorder.record("fork", "output", high_precision=doubled)
            recorder.record("main", "output", high_precision=x)
            main.wait_stream(fork)
        for iteration in range(1, 9):
            for replay in range(3):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    x.fill_(10.0 * iteration + replay)
                    graph.replay()
            if iteration == 8:
                recorder.trigger("look")
            recorder.step()
        assert not recorder._capture._dead_parts
    (incident,) = incidents(tmp_path)
    for iteration in (7, 8):
        for layer, factor in (("main", 1), ("fork", 2)):
            records = incident.records(layer=layer, tensor="output", iteration=iteration)
            assert [record.key.microbatch for record in records] == [0, 1, 2]
            for record in records:
                assert np.all(record.high_precision == factor * (10.0 * iteration + record.key.microbatch))


def test_what_a_graph_cannot_record_is_named_at_its_capture(tmp_path):
    made = config(ring={"memory": "4 MiB", "graph_replays": None})
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        x = torch.ones(1 << 20, device="cuda")
        recorder.record("small", "output", high_precision=x[:8])
        recorder.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorder.record("large", "output", high_precision=x)
        for _ in range(3):
            graph.replay()
            recorder.step()
        recorder.trigger("look")
        graph.replay()
        recorder.step()
    (incident,) = incidents(tmp_path)
    assert any("ring.memory does not hold it" in blind.reason for blind in incident.blind)
    (record,) = incident.records(layer="large", iteration=4)
    assert record.statistics["amax"] == 1
    assert record.high_precision is None


def test_memory_of_the_ring_is_in_no_pool_that_the_thread_fills(tmp_path):
    """As inductor warms up: it would find what is left in its pool, and raise."""
    pool = torch.cuda.MemPool()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        x = torch.ones(1 << 16, device="cuda")
        recorder.record("before", "output", high_precision=x)
        with torch.cuda.use_mem_pool(pool), torch.cuda.stream(torch.cuda.Stream()):
            in_pool = torch.ones(1 << 10, device="cuda")
            for number in range(300):
                recorder.record(f"within.{number}", "output", high_precision=x)
        blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
        active = [block["requested_size"] for block in blocks if block["state"].startswith("active_alloc")]
        assert active == [in_pool.nbytes]
        recorder.step()
        assert not recorder._capture._dead_parts
        del in_pool


def test_step_inside_a_capture_is_refused_and_harms_nothing(tmp_path):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        x = torch.ones(1 << 10, device="cuda")
        recorder.record("eager", "output", high_precision=x)
        recorder.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorder.record("graphed", "output", high_precision=x, splits=[512, 512])
            with recorder.microbatch(0, data={"ids": [1, 2, 3]}):
                x.add_(1)
            recorder.step()
        for _ in range(3):
            graph.replay()
            recorder.trigger("look")
            recorder.step()
        assert not recorder._capture._dead_parts
    incident = incidents(tmp_path)[0]
    assert any("step() was called inside a CUDA graph's capture" in blind.reason for blind in incident.blind)
    (record,) = incident.records(layer="graphed", iteration=incident.trigger.iteration)
    assert (record.high_precision == 1 + incident.trigger.iteration - 1).all()


# -- make_graphed_callables: needs process-wide hooks, which leave the modules as they are


def test_torch_make_graphed_callables_after_attach(tmp_path):
    """Warm-up, with gradients of uninitialised memory, feeds no rule; replays are those of eager modules."""
    data = batches(6, 4, rows=ROWS, device="cuda")
    data[4][2][3, 3] = math.nan
    net = make().cuda()
    rules = [{"kind": "nonfinite"}]
    with flightrec.Recorder(config(triggers=rules), directory=tmp_path) as recorder:
        recorder.attach(net)
        sample = torch.full((ROWS, WIDTH), math.nan, device="cuda", requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(net.blocks[1], (sample,))
        assert graphed is net.blocks[1]
        for microbatches in data:
            for x in microbatches:
                loss = loss_of(net, x)
                recorder.loss(loss)
                loss.backward()
            net.zero_grad()
            recorder.step()
        assert not recorder._capture._dead_parts
    (incident,) = incidents(tmp_path)
    assert (incident.trigger.iteration, incident.trigger.key.microbatch) == (4, 2)
    for tensor in ("output", "gradient"):
        records = incident.records(layer="blocks.1.fc1", tensor=tensor, iteration=3)
        assert [record.key.microbatch for record in records] == [0, 1, 2, 3]
        assert len({record.high_precision.tobytes() for record in records}) == 4
    hidden = incident.records(layer="blocks.1.fc1", tensor="output", iteration=4)
    assert [bool(np.isnan(record.high_precision).any()) for record in hidden] == [False, False, True, False]


@pytest.fixture
def te() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("transformer_engine.pytorch")
        except Exception as error:
            pytest.skip(f"the real Transformer Engine cannot be imported: {error}")


def te_net(te: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
    )  # fmt: skip


def te_data(iterations: int, microbatches: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(64, 256, generator=generator).to("cuda", torch.bfloat16) for _ in range(microbatches)]
        for _ in range(iterations)
    ]


def te_recipe() -> Any:
    return importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()


def te_eager(te: Any, data: list[list[torch.Tensor]], directory: Any) -> Any:
    net = te_net(te)
    with flightrec.Recorder(config(), directory=directory) as recorder:
        recorder.attach(net)
        for iteration, microbatches in enumerate(data):
            for x in microbatches:
                with te.autocast(enabled=True, recipe=te_recipe()):
                    y = net(x.requires_grad_())
                y.float().square().mean().backward()
            net.zero_grad()
            if iteration == len(data) - 1:
                recorder.trigger("look")
            recorder.step()
    (incident,) = incidents(directory)
    return incident


def assert_same_products(graphed: Any, eager: Any, iteration: int, num_microbatches: int) -> None:
    compared = 0
    for tensor in ("activation", "gradient"):
        for layer in ("0.fc1", "0.fc2", "1.fc1", "1.fc2"):
            one = graphed.records(layer=layer, tensor=tensor, iteration=iteration)
            two = eager.records(layer=layer, tensor=tensor, iteration=iteration)
            assert [record.key.microbatch for record in one] == list(range(num_microbatches)), (layer, tensor)
            assert len(one) == len(two)
            for replayed, plain in zip(one, two, strict=True):
                for name, codes in plain.quantized.components.items():
                    assert np.array_equal(replayed.quantized.components[name], codes), (replayed.key, name)
                compared += 1
    assert compared == 8 * num_microbatches


def test_te_make_graphed_callables_after_attach(te, tmp_path):
    data = te_data(4, 4)
    net = te_net(te)
    with flightrec.Recorder(config(), directory=tmp_path / "graphed") as recorder:
        recorder.attach(net)
        sample = torch.zeros_like(data[0][0]).requires_grad_()
        graphed = te.make_graphed_callables(net, (sample,), enabled=True, recipe=te_recipe())
        for iteration, microbatches in enumerate(data):
            for x in microbatches:
                with te.autocast(enabled=True, recipe=te_recipe()):
                    y = graphed(x.requires_grad_())
                y.float().square().mean().backward()
            net.zero_grad()
            if iteration == 3:
                recorder.trigger("look")
            recorder.step()
        assert not recorder._capture._dead_parts
    (incident,) = incidents(tmp_path / "graphed")
    assert_same_products(incident, te_eager(te, data, tmp_path / "eager"), 3, 4)


def test_te_make_graphed_callables_before_attach_is_named(te, tmp_path):
    """Graphs that were captured before there was a recorder hide what runs in them; around them is recorded."""
    data = te_data(3, 2)
    net = te_net(te)
    sample = torch.zeros_like(data[0][0]).requires_grad_()
    net[0] = te.make_graphed_callables(net[0], (sample,), enabled=True, recipe=te_recipe())
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        for microbatches in data:
            for x in microbatches:
                with te.autocast(enabled=True, recipe=te_recipe()):
                    y = net(x.requires_grad_())
                y.float().square().mean().backward()
            net.zero_grad()
            recorder.trigger("look")
            recorder.step()
    incident = incidents(tmp_path)[-1]
    assert len(incident.records(layer="1.fc1", tensor="activation", iteration=incident.trigger.iteration)) == 2
    assert any("graph" in blind.reason for blind in incident.blind)


def test_te_graphs_in_1f1b_order(te, tmp_path):
    """A graph for each microbatch, captured and replayed as a pipeline's last stage but one runs them."""
    order = [1, 1, -1, 1, -1, 1, -1, -1]
    data = te_data(4, 4)
    net = te_net(te)
    with flightrec.Recorder(config(ring={"graph_replays": 1}), directory=tmp_path / "graphed") as recorder:
        recorder.attach(net)
        samples = tuple((torch.zeros_like(x).requires_grad_(),) for x in data[0] for _ in net)
        layers = te.make_graphed_callables(
            tuple(net), samples, enabled=True, recipe=te_recipe(), _order=order,
        )  # fmt: skip
        per_microbatch = [layers[at * len(net) : (at + 1) * len(net)] for at in range(4)]
        for iteration, microbatches in enumerate(data):
            outputs: list[torch.Tensor] = []
            forwards = backwards = 0
            for chunk in order:
                if chunk > 0:
                    y = microbatches[forwards].requires_grad_()
                    with te.autocast(enabled=True, recipe=te_recipe()):
                        for layer in per_microbatch[forwards]:
                            y = layer(y)
                    outputs.append(y)
                    forwards += 1
                else:
                    outputs[backwards].float().square().mean().backward()
                    backwards += 1
            net.zero_grad()
            if iteration == 3:
                recorder.trigger("look")
            recorder.step()
        assert not recorder._capture._dead_parts
        assert recorder._capture.engine.ring._replays.num_dropped == 0
    (incident,) = incidents(tmp_path / "graphed")
    assert_same_products(incident, te_eager(te, data, tmp_path / "eager"), 3, 4)
    assert incident.trigger.severity is Severity.FAULT


# -- turns under a budget

SPENT = {"budget": "0.001%", "incident": {"after": 1}}
"""Always spent: one layer an iteration beside the block boundaries, whatever a step takes."""

BOUNDARIES = {(f"blocks.{number}", tensor) for number in (0, 1) for tensor in ("output", "gradient")}
IN_GRAPH = ("input", "output", "gradient", "weight")


def spent(**more: Any) -> dict[str, Any]:
    return {**config(**more), **SPENT}


def train_in_turns(recorder: flightrec.Recorder, net: nn.Module, data: Any, step: Any, *, graphed: bool) -> None:
    """Two eager iterations, then ``data``, of whose microbatches the last one's gradients count."""
    recorder.attach(net)
    made = None
    if graphed:
        made = Graphed(net, recorder)  # captured in an iteration in which one layer has its turn
    else:
        for _ in range(2):
            loss = loss_of(net, batches(1, rows=ROWS, device="cuda")[0][0])
            recorder.loss(loss)
            loss.backward()
            recorder.step()
    for iteration, microbatches in enumerate(data, start=2):
        for x in microbatches:
            if made is not None:
                made.replay(x)
            else:
                net.zero_grad(set_to_none=True)
                loss = loss_of(net, x)
                recorder.loss(loss)
                loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad
        step(iteration)
        torch.cuda.synchronize()  # so that a verdict is known in the next step


def recorded_by_iteration(recorder: flightrec.Recorder, num_iterations: int) -> list[set[tuple[str, str, int]]]:
    engine = recorder._capture.engine
    engine._take_what_comes()
    ring = engine.ring
    seen = []
    for iteration in range(num_iterations):
        keys = [ring.layouts[number].key for number in ring.index(iteration).layout_ids]
        seen.append(
            {
                (key.layer, key.tensor, 0 if key.tensor == "weight" else key.microbatch)  # eager has it once
                for key in keys
                if key.tensor in IN_GRAPH
            }
        )
    return seen


def rotating(names: set[tuple[str, str, int]]) -> set[str]:
    return {layer for layer, tensor, _ in names if (layer, tensor) not in BOUNDARIES}


def test_replays_take_the_turns_of_eager(tmp_path):
    data = batches(34, 2, rows=ROWS, device="cuda")
    net = make().cuda()
    found = {}
    for name in ("eager", "graphed"):
        with flightrec.Recorder(spent(), directory=tmp_path / name) as recorder:

            def step(iteration: int, recorder: flightrec.Recorder = recorder) -> None:
                if iteration == 34:
                    recorder.trigger("look")
                recorder.step()

            train_in_turns(recorder, copy.deepcopy(net), data, step, graphed=name == "graphed")
            found[name] = recorded_by_iteration(recorder, 35)
            assert not recorder._capture._dead_parts
            assert not any("CUDA graph" in reason for reason in recorder._capture._notes.values())
    layers = rotating(found["eager"][0])
    assert len(layers) > 8
    for iteration in range(3, 35):
        assert found["graphed"][iteration] == found["eager"][iteration], iteration
        assert len(rotating(found["graphed"][iteration])) == 1
        assert {name[:2] for name in found["graphed"][iteration]} >= BOUNDARIES
    assert set.union(*map(rotating, found["graphed"][3 : 3 + len(layers)])) == layers, "every layer within a round"
    (one,), (two,) = incidents(tmp_path / "graphed"), incidents(tmp_path / "eager")
    compared = 0
    for iteration in (33, 34):
        replayed, eager = named(one, iteration), named(two, iteration)
        for name, record in eager.items():
            if name[1] in IN_GRAPH:
                assert np.array_equal(replayed[name].high_precision, record.high_precision), name
                assert replayed[name].statistics["amax"] == record.statistics["amax"]
                compared += 1
    assert compared >= 2 * 2 * (len(BOUNDARIES) + 1)


def test_a_watch_raises_the_coverage_of_replays(tmp_path):
    rules = [{"name": "sign", "kind": "metric_threshold", "above": 1.0, "severity": "watch"}]
    with flightrec.Recorder({**spent(triggers=rules), "watch_iterations": 5}, directory=tmp_path / "out") as recorder:

        def step(iteration: int) -> None:
            recorder.step(metrics={"sign": 2.0 if iteration == 20 else 0.5})

        train_in_turns(recorder, make().cuda(), batches(34, 2, rows=ROWS, device="cuda"), step, graphed=True)
        seen = [rotating(names) for names in recorded_by_iteration(recorder, 36)]
        assert not recorder._capture._dead_parts
    whole = [iteration for iteration in range(3, 36) if seen[iteration] == seen[0]]
    assert whole == list(range(whole[0], whole[0] + 5))
    assert 21 <= whole[0] <= 23, "as soon as the verdict is known"
    assert not (tmp_path / "out").exists()


def test_every_nth_iteration_is_left_to_replays_and_waits_for_nothing(tmp_path):
    """``every`` in a graph that was captured in an iteration without it; the table is changed in every step."""
    made = config(select=[{"tensors": "weight", "every": 3}, {"tensors": "*"}])
    with flightrec.Recorder(made, directory=tmp_path / "out") as recorder:
        net = make().cuda()
        recorder.attach(net)
        graphed = Graphed(net, recorder, warmups=2)
        x = batches(1, rows=ROWS, device="cuda")[0][0]
        torch.cuda.synchronize()
        for iteration in range(2, 40):
            if iteration == 10:
                torch.cuda.set_sync_debug_mode("error")
            try:
                graphed.replay(x)
                recorder.step()
            finally:
                if iteration == 39:
                    torch.cuda.set_sync_debug_mode("default")
        seen = recorded_by_iteration(recorder, 40)
        assert not recorder._capture._dead_parts
    with_weights = [number for number in range(2, 40) if any(tensor == "weight" for _, tensor, _ in seen[number])]
    assert with_weights == list(range(3, 40, 3))
    assert all(any(tensor == "output" for _, tensor, _ in names) for names in seen)
