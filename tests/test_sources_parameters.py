from __future__ import annotations

import torch
from sources_support import (
    RecordingSink,
    Watch,
    run_once,
    square,
)
from torch import nn

from flightrec.records import NO_MICROBATCH, Stage


def test_wgrad_is_cumulative_over_microbatches_and_weight_comes_once():
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    sink = RecordingSink()
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    run_once(model, sink, square, first, second)
    each = [torch.autograd.grad(square(model, x), model.weight)[0] for x in (first, second)]
    assert torch.equal(sink.one("", "wgrad", microbatch=0).tensor, each[0])
    assert torch.allclose(sink.one("", "wgrad", microbatch=1).tensor, each[0] + each[1])
    assert sink.one("", "weight").key.microbatch == 0
    assert [s.key.call for s in sink.find("", "activation")] == [0, 0]


def test_parameters_come_at_the_start_and_after_each_step():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    sink = RecordingSink(tensors={"parameter"})
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sink) as watch:
        for _ in range(2):
            square(model, torch.ones(1, 3)).backward()
            optimizer.step()
            watch.step()
    start = sink.one("", "parameter", 0, stage=Stage.START, part="weight")
    assert torch.equal(start.tensor, before)
    assert start.key.microbatch == NO_MICROBATCH
    assert not sink.find("", "parameter", 1, stage=Stage.START)
    assert torch.equal(sink.one("", "parameter", 1, stage=Stage.AFTER_STEP, part="weight").tensor, model.weight)
    assert torch.equal(sink.one("", "parameter", 1, stage=Stage.AFTER_STEP, part="bias").tensor, model.bias)


def test_lazy_and_later_unfrozen_parameters_are_hooked_when_they_can_be():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4).requires_grad_(False))
    sink = RecordingSink(tensors={"wgrad", "activation", "parameter"})
    with Watch(model, sink) as watch:
        square(model, torch.ones(1, 3)).backward()
        watch.step()
        model[1].requires_grad_(True)
        watch.step()
        square(model, torch.ones(1, 3)).backward()
        watch.step()
    assert sink.find("0", "wgrad", 2)
    assert sink.find("1", "wgrad", 2)
    assert sink.find("0", "parameter", 0, stage=Stage.AFTER_STEP)
    assert not sink.errors
    assert "lazy" in sink.blinds["0", "parameter"]


def test_a_replaced_parameter_is_followed():
    model = nn.Linear(2, 2)
    sink = RecordingSink(tensors={"wgrad"})
    with Watch(model, sink) as watch:
        watch.step()
        old = model.weight
        model.weight = nn.Parameter(torch.ones(2, 2))
        watch.step()
        square(model, torch.ones(1, 2)).backward()
        watch.step()
        assert not old._post_accumulate_grad_hooks
    assert sink.one("", "wgrad", part="")


def test_shared_modules_and_tied_parameters_go_by_their_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.same = self.a
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.same(self.a(x)))

    sink = RecordingSink(tensors={"activation", "weight", "wgrad", "parameter"})
    run_once(Tied(), sink, square, torch.randn(2, 4))
    assert [s.key.call for s in sink.find("a", "activation")] == [0, 1]
    assert not sink.find("same", "activation")
    assert sink.one("a", "weight")
    assert not sink.find("b", "weight")
    assert "a.weight" in sink.blinds["b", "weight"]
    assert [(k.layer, k.tensor) for k in sink.recorded() if k.tensor == "wgrad"] == [("a", "wgrad")]
    assert {k.layer for k in sink.recorded() if k.tensor == "parameter"} == {"a"}


def test_swapping_tensors_works_and_is_told():
    model = nn.Linear(2, 2)
    sink = RecordingSink(tensors={"wgrad"})
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Watch(model, sink) as watch:
            model.to(torch.float64)
            watch.step()
            square(model, torch.ones(1, 2, dtype=torch.float64)).backward()
            watch.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert "swapped" in sink.blinds["", "wgrad"]
    assert model.weight.dtype == torch.float64


def test_training_in_eval_mode_is_told():
    model = nn.Linear(2, 2).eval()
    sink = RecordingSink()
    run_once(model, sink, square, torch.ones(1, 2))
    assert "eval mode" in sink.blinds["", ""]
    model.train()
    sink = RecordingSink()
    run_once(model, sink, square, torch.ones(1, 2))
    assert not sink.blinds
