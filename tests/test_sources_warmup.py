from __future__ import annotations

import torch
from sources_support import RecordingSink, Watch, square
from torch import nn

from flightrec.records import Phase
from flightrec.sources import warmup

PHASES = (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)


def graphs(function, x):
    """Stands for what warms up; it is known by its code."""
    for _ in range(3):
        out = function(x)
        torch.autograd.backward(out, torch.empty_like(out).fill_(float("nan")))  # as Transformer Engine does


def test_a_warm_up_is_a_phase_of_its_own_and_counts_no_microbatch(monkeypatch):
    monkeypatch.setattr(warmup, "_MAKERS", ((__name__, "graphs"),))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sink = RecordingSink(phases=PHASES)
    with Watch(model, sink) as watch:
        assert not warmup.is_warming_up()
        graphs(model, torch.ones(1, 3, requires_grad=True))
        assert not sink.seen, "neither what ran nor its gradients mean anything"
        assert sink.microbatch_index == -1
        model.zero_grad()
        square(model, torch.ones(1, 3)).backward()
        watch.step()
    output = sink.one("1", "output", 0)
    assert (output.key.microbatch, output.key.call, output.key.phase) == (0, 0, Phase.TRAIN)
    assert sink.one("1", "gradient", 0)


class Graphed:
    """A module's forward as ``make_graphed_callables`` leaves it, with a replay that only counts."""

    def __init__(self, module: nn.Module) -> None:
        self.replays = 0

        def make_graphed_callables(func):
            def make_graphed_forward(func, graph_training_state, orig_fwd):
                def new_fwd(*args):
                    if func.training == graph_training_state:
                        self.replays += 1
                        return args[0] + 1
                    return orig_fwd(*args)

                return new_fwd

            func.forward = make_graphed_forward(func, func.training, func.forward)

        make_graphed_callables.__qualname__ = "make_graphed_callables"
        make_graphed_callables(module)
        module.forward.__qualname__ = "make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"


def test_what_a_graph_hides_that_was_captured_before_attach_is_named_once():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    assert warmup.graphed_for(model[0]) is None
    Graphed(model[0])
    assert warmup.graphed_for(model[0]) is True
    assert warmup.replays(model[0])
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        assert "0, 1" in sink.blinds["0", "inside of a CUDA graph"]
        square(model, torch.ones(1, 3)).backward()
        watch.step()
        assert sink.one("0", "input", 0)
        assert sink.one("0", "output", 0)
        assert not sink.find("0.0", "output", 0)
        model[0].eval()
        assert not warmup.replays(model[0])
        square(model, torch.ones(1, 3)).backward()
        watch.step()
    assert sink.one("0.0", "output", 1), "in the other mode the original forward runs"
