"""Placeholders that fused weight-gradient accumulation leaves, and buffers that gradients share."""

from __future__ import annotations

import math

import pytest
import torch
from sources_support import RecordingSink, assert_same_bits, run_once, square
from torch import nn

import flightrec
from flightrec.sources.accumulated import MAIN_GRAD, gradient_of


def parameter(**attributes):
    made = nn.Parameter(torch.zeros(2, 3))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_an_ordinary_gradient_is_grad_itself():
    grad = torch.ones(2, 3)
    for attributes in ({}, {"main_grad": torch.zeros(2, 3)}, {"grad_added_to_main_grad": False, "main_grad": grad}):
        found = gradient_of(parameter(grad=grad, **attributes))
        assert found.tensor is grad
        assert found.place == ""


@pytest.mark.parametrize(
    "attributes",
    [
        {"grad_added_to_main_grad": True},
        {"zero_out_wgrad": True},
        {"grad": torch.empty(1).expand(2, 3)},
        {"grad": None, "grad_added_to_main_grad": True},
    ],
)
def test_a_placeholder_gives_main_grad(attributes):
    main = torch.full((2, 3), 2.0)
    found = gradient_of(parameter(main_grad=main, **{"grad": torch.full((2, 3), math.nan), **attributes}))
    assert found.tensor is main
    assert found.place == MAIN_GRAD


def test_a_placeholder_without_main_grad_is_told():
    found = gradient_of(parameter(grad=torch.empty(1).expand(2, 3)))
    assert found.tensor is None
    assert "placeholder" in found.reason
    assert "removed" in gradient_of(parameter(grad=None)).reason
    assert "delay_wgrad_compute" in gradient_of(parameter(grad=None)).reason


class Fused(torch.autograd.Function):
    """A product that adds its weight gradient to ``main_grad`` and returns uninitialised memory, as Megatron's does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.main_grad.add_(gradient.t() @ x)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, math.nan)  # what uninitialised memory may hold


class FusedLinear(nn.Linear):
    def forward(self, x):
        return Fused.apply(x, self.weight)


def test_the_dummy_of_a_fused_accumulation_is_never_judged_and_main_grad_is(tmp_path):
    net = FusedLinear(4, 3, bias=False)
    net.weight.main_grad = torch.zeros(3, 4)
    expected = []
    with flightrec.Recorder({"select": [{"tensors": "*"}]}, directory=tmp_path) as recorder:
        recorder.attach(net)
        for iteration in range(4):
            net.weight.main_grad.zero_()
            for index in range(2):
                square(net, torch.full((2, 4), iteration + index + 1.0)).backward()
                expected.append(net.weight.main_grad.clone())
            net.weight.grad = None
            if iteration == 3:
                recorder.trigger("look")
            recorder.step()
    (folder,) = tmp_path.iterdir()
    incident = flightrec.open(folder)
    assert {firing.kind for firing in incident.firings} == {"manual"}
    records = [r for r in incident.records(tensor="wgrad") if r.iteration == 3]
    assert [r.key.part for r in records] == [MAIN_GRAD, MAIN_GRAD]
    for record, running_sum in zip(records, expected[-2:], strict=True):
        assert (record.high_precision == running_sum.numpy()).all()


def test_a_nan_in_main_grad_fires(tmp_path):
    net = FusedLinear(4, 3, bias=False)
    net.weight.main_grad = torch.full((3, 4), math.nan)
    with flightrec.Recorder({"select": [{"tensors": ["wgrad"]}]}, directory=tmp_path) as recorder:
        recorder.attach(net)
        square(net, torch.ones(2, 4)).backward()
        recorder.step()
        recorder.step()
    (folder,) = tmp_path.iterdir()
    trigger = flightrec.open(folder).trigger
    assert (trigger.kind, trigger.key.tensor, trigger.key.part) == ("nonfinite", "wgrad", MAIN_GRAD)


def test_one_buffer_used_for_several_gradients_in_turn_is_held_as_it_was_each_time():
    class Shared(torch.autograd.Function):
        buffer = torch.empty(3, 3)

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            torch.mm(gradient.t(), x, out=Shared.buffer)
            return torch.mm(gradient, weight), Shared.buffer.view(3, 3)

    class Linear(nn.Linear):
        def forward(self, x):
            return Shared.apply(x, self.weight)

    torch.manual_seed(0)
    net = nn.Sequential(*(Linear(3, 3, bias=False) for _ in range(3)))
    seen = {}
    for name, weight in net.named_parameters():

        def keep(parameter, name=name):
            seen[name] = parameter.grad.clone()

        weight.register_post_accumulate_grad_hook(keep)
    sink = RecordingSink(tensors=("wgrad",))
    run_once(net, sink, square, torch.ones(2, 3))
    assert len(seen) == 3
    for name, gradient in seen.items():
        assert_same_bits([sink.one(name.removesuffix(".weight"), "wgrad").tensor], [gradient])


def test_a_gradient_in_a_bucket_is_held_as_it_was_before_communication():
    """As with ``gradient_as_bucket_view``: the bucket is overwritten as soon as its last gradient is there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    bucket = torch.zeros(sum(p.numel() for p in net.parameters()))
    start = 0
    for p in net.parameters():
        p.grad = bucket[start : start + p.numel()].view_as(p)
        start += p.numel()
    sink = RecordingSink(tensors=("wgrad",))
    run_once(net, sink, square, torch.ones(2, 3))
    before = [p.grad.clone() for p in net.parameters()]
    bucket.fill_(math.nan)  # what communication wrote
    held = [sink.one(layer, "wgrad", part=part).tensor for layer in "01" for part in ("", "bias")]
    assert_same_bits(held, before)


def test_freed_parameters_and_gradients_are_told_and_seen_again_when_they_are_back():
    net = nn.Linear(3, 3, bias=False)
    sink = RecordingSink(tensors=("parameter", "weight"))
    weight = net.weight.detach().clone()
    watch = run_once(net, sink, lambda model, x: model(x).sum(), torch.ones(1, 3))
    with watch:
        net.weight.untyped_storage().resize_(0)
        watch.step()
        assert "freed" in sink.blinds["", "parameter"]
        net.weight.untyped_storage().resize_(36)
        with torch.no_grad():
            net.weight.copy_(weight)
        watch.step()
    assert torch.equal(sink.find("", "parameter")[-1].tensor, weight)
    assert len(sink.find("", "parameter", 1)) == 0
