"""Turns inside captured graphs beside the same records in eager: the same rotation records the same."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make
from test_ring_replays import Graph, end, layouts
from test_ring_ring import key

from flightrec.budget.cost import CostModel, Costs
from flightrec.budget.rotation import Rotation
from flightrec.config.load import load
from flightrec.records import Firing, Severity
from flightrec.ring.ring import Ring

BOUNDARY = ("blocks.0", "output")
TENSORS = ("output", "gradient", "weight")


class Run:
    """One rotation over one ring, its records in graphs or not; what ``Capture`` and ``Engine`` do with them."""

    def __init__(self, config, sizes, *, graphed, captured_at=0):
        self.config = load(config)
        self.rotation = Rotation(self.config)
        self.rotation.watch(make())
        self.ring = Ring("cpu", iterations=2, graph_replays=2, memory_bytes=64 << 20)
        self.ring.begin(0)
        self.sizes, self.graphed, self.captured_at = sizes, graphed, captured_at
        self.graphs = []
        self.tick = 0

    def run(self, firings=()):
        """An iteration: which (layer, tensor, microbatch) it recorded, and which of them are said to be left out."""
        is_graph = self.graphed and self.tick >= self.captured_at
        if is_graph and not self.graphs:
            self._capture()
        for microbatch in range(2):
            if is_graph:
                for graph in self.graphs:
                    graph.replay(microbatch)
            else:
                self._eager(microbatch)
        left_out = self.rotation.left_out(self.ring._registry.statistics.num_allocated_rows)
        end(self.ring, self.tick)
        here = layouts(self.ring, self.tick)
        seen = sorted(_name(one) for one in here)
        out = None
        if left_out is not None:
            assert not any(left_out[one.row] for one in here)
            out = {_name(one) for one in self.ring.layouts if left_out[one.row]}
        if firings:
            self.rotation.on_verdict(firings, -1)
        self.rotation.end_iteration(self.ring)
        self.rotation.choose_replayed(self.ring, self.tick + 1)
        self.tick += 1
        return seen, out

    def _every(self, layer, tensor):
        return self.config.selects(layer, tensor, key(layer, tensor).phase).every

    def _is_in(self, layer, tensor):
        return not self.rotation.skips(layer, tensor, self._every(layer, tensor), self.tick, rotates=True)

    def _eager(self, microbatch):
        for (layer, tensor), size in self.sizes.items():
            if self._is_in(layer, tensor):
                self.ring.record(key(layer, tensor, microbatch=microbatch), high_precision=torch.ones(size))

    def _capture(self):
        for (layer, tensor), size in self.sizes.items():
            every, is_in = self._every(layer, tensor), self._is_in(layer, tensor)
            turn = self.rotation.turn_of(layer, tensor, every, is_in=is_in, rotates=True)
            keys = {layer: key(layer, tensor, microbatch=0)}
            self.graphs.append(Graph(self.ring, [layer], shape=(size,), turns={layer: turn}, keys=keys))


def _name(layout):
    return layout.key.layer, layout.key.tensor, layout.key.microbatch


def sizes_of(choose):
    names = [*choose.sample([name for name, _ in make().named_modules() if name != BOUNDARY[0]], 4), BOUNDARY[0]]
    return {
        (layer, tensor): choose.choice((16, 64, 4096))
        for layer in names
        for tensor in TENSORS
        if choose.random() < 0.5 or tensor == "output"
    }


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["0.001%", "none"]))
def test_replays_record_what_eager_records(seed, budget):
    choose = random.Random(seed)
    every = choose.choice((1, 3, 4))
    select = [{"tensors": ["output", "gradient"]}, {"tensors": ["weight"], "every": every}]
    config = {"budget": budget, "select": select, "watch_iterations": 3}
    sizes = sizes_of(choose)
    captured_at = choose.choice((0, 1, 5))
    eager, graphed = Run(config, sizes, graphed=False), Run(config, sizes, graphed=True, captured_at=captured_at)
    layers = {layer for layer, _ in sizes}
    seen = []
    watch = Firing("w", "amax_spike", Severity.WATCH, 0, 0, None, -1, 1.0, 1.0, "")
    for tick in range(24):
        firings = [watch] if tick == 16 else []
        (one, out_one), (two, out_two) = eager.run(firings), graphed.run(firings)
        assert one == two, tick
        if tick > captured_at + 1:  # rows of a graph are known from the end of its first iteration
            assert out_one == out_two, tick
        seen.append({layer for layer, tensor, _ in one if tensor == "output"})
    if budget == "none":
        assert all(tick == layers for tick in seen)
        return
    assert seen[0] == layers
    for start in range(1, 17 - len(layers)):
        assert set.union(*seen[start : start + len(layers)]) == layers, "every layer within a round"
    raised = [tick for tick in range(1, 24) if seen[tick] == layers]
    assert raised == [17, 18, 19], "a watch raises the coverage"


def test_replays_count_to_the_cost_of_an_iteration():
    costs = Costs(torch.device("cpu"), CostModel(1e-3, 1e-9))
    costs.add_replayed(4, 1000)
    assert costs.end_iteration() == pytest.approx(4e-3 + 1e-6)
    assert costs.end_iteration() == 0


def test_the_load_is_that_of_what_had_its_turn():
    sizes = {("blocks.0.fc1", "gradient"): 1024, ("blocks.1.fc1", "gradient"): 32, BOUNDARY: 256}
    run = Run({"budget": "0.001%"}, sizes, graphed=True)
    loads = []
    taken = run.rotation.costs.add_replayed
    run.rotation.costs.add_replayed = lambda *load: (loads.append(load), taken(*load))
    for _ in range(5):
        run.run()
    always, first, second = 2 * 1024, 2 * 4096, 2 * 128
    whole = (6, always + first + second)
    assert loads[0] == whole
    assert sorted(loads[1:3]) == sorted(loads[3:5]) == [(4, always + second), (4, always + first)]


def test_what_is_recorded_always_has_no_unit():
    select = [{"tensors": ["wgrad"], "every": 2}, {"tensors": "*"}]
    rotation = Run({"budget": "1%", "select": select}, {}, graphed=False).rotation
    always = [
        rotation.turn_of(*BOUNDARY, 1, is_in=True, rotates=True),
        rotation.turn_of("blocks.0.fc1", "weight", 1, is_in=True, rotates=False),
        rotation.turn_of("", "loss", 1, is_in=True, rotates=False),
    ]
    assert {turn.unit for turn in always} == {-1}
    asked = [("blocks.0.fc1", "weight", 1), ("blocks.0.fc1", "output", 1), ("blocks.0.fc2", "output", 1)]
    asked += [("not.there", "wgrad", 2), ("blocks.0.fc1", "wgrad", 2), ("nor.this", "wgrad", 2)]
    units = [rotation.turn_of(*names, is_in=True, rotates=True).unit for names in asked]
    assert units == [0, 0, 1, 2, 3, 2]
    assert all(turn.num_units >= len(set(units)) for turn in always)
