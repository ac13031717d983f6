from __future__ import annotations

import copy

import pytest
import torch
from sources_support import RecordingSink, assert_same_bits, square
from torch import nn

from flightrec.records import NO_MICROBATCH, Phase, Stage
from flightrec.sources.gradients import GradientStages
from flightrec.sources.scaler import ScalerWatch

ALL = (Stage.BACKWARD, Stage.REDUCED, Stage.UNSCALED, Stage.CLIPPED)


class Watched:
    """Gradient stages and a scaler's watch, as an attachment puts them together."""

    def __init__(self, model, sink, optimizers=(), scaler=None) -> None:
        self.scaler = None if scaler is None else ScalerWatch(scaler, sink)
        has_scaler = self.scaler is not None and self.scaler.is_enabled
        self.source = GradientStages(model, sink, list(optimizers), has_scaler)
        if self.scaler is not None:
            self.scaler.listener = self.source

    def __enter__(self) -> GradientStages:
        self.source.attach()
        if self.scaler is not None:
            self.scaler.attach()
        return self.source

    def __exit__(self, *_: object) -> None:
        self.source.detach()
        if self.scaler is not None:
            self.scaler.detach()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))


def sink_of(*stages: Stage, **options) -> RecordingSink:
    return RecordingSink(tensors={"wgrad"}, stages=stages or ALL, **options)


def backward(model, scaler=None) -> None:
    loss = square(model, torch.ones(3, 4))
    (loss if scaler is None else scaler.scale(loss)).backward()


def stages(sink) -> list[str]:
    return [s.key.stage.value for s in sink.seen if s.key.layer == "1"]


def test_with_a_scaler_and_clipping_every_stage_has_its_values():
    model, sink = net(), sink_of()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    with Watched(model, sink, [optimizer], scaler):
        backward(model, scaler)
        scaled = model[1].weight.grad.clone()
        scaler.unscale_(optimizer)
        unscaled = model[1].weight.grad.clone()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = model[1].weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(unscaled, scaled / 64)
    assert not torch.equal(clipped, unscaled)
    for stage, expected in ((Stage.REDUCED, scaled), (Stage.UNSCALED, unscaled), (Stage.CLIPPED, clipped)):
        seen = sink.one("1", "wgrad", stage=stage)
        assert torch.equal(seen.tensor, expected), stage
        assert (seen.key.part, seen.key.microbatch, seen.key.phase) == ("", NO_MICROBATCH, Phase.TRAIN)
        assert {s.key.part for s in sink.find("0", "wgrad", stage=stage)} == {"", "bias"}
    assert not sink.errors
    assert not sink.blinds


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_without_a_scaler_reduced_is_what_came_before_the_clipping(clip):
    model, sink = net(), sink_of(Stage.REDUCED, Stage.CLIPPED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watched(model, sink, [optimizer]):
        backward(model)
        whole = model[1].weight.grad.clone()
        getattr(nn.utils, clip)(model.parameters(), 1e-3)
        optimizer.step()
    assert torch.equal(sink.one("1", "wgrad", stage=Stage.REDUCED).tensor, whole)
    assert sink.one("1", "wgrad", stage=Stage.CLIPPED).tensor.abs().max() <= 1e-3
    assert not sink.blinds


def test_without_clipping_both_are_taken_when_the_optimizer_steps():
    model, sink = net(), sink_of(Stage.REDUCED, Stage.CLIPPED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watched(model, sink, [optimizer]) as source:
        for _ in range(2):
            backward(model)
            assert not sink.find("1", "wgrad", sink.iteration)
            optimizer.step()
            optimizer.zero_grad()
            source.after_step()
            sink.step()
    assert stages(sink) == ["reduced", "clipped"] * 2
    assert torch.equal(sink.seen[0].tensor, sink.find("0", "wgrad", 0, stage=Stage.CLIPPED)[0].tensor)


def test_a_skipped_step_has_no_clipped_gradient():
    model, sink = net(), sink_of()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with Watched(model, sink, [optimizer], scaler) as source:
        square(model, torch.full((3, 4), 1e9)).backward(torch.tensor(3e38))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        source.after_step()
    assert stages(sink) == ["reduced", "unscaled"]
    assert not sink.blinds


def test_two_steps_in_an_iteration_are_two_sightings():
    model, sink = net(), sink_of(Stage.REDUCED, Stage.CLIPPED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watched(model, sink, [optimizer]):
        for _ in range(2):
            backward(model)
            nn.utils.clip_grad_value_(model.parameters(), 10.0)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
    assert stages(sink) == ["reduced", "clipped"] * 2


def test_several_optimizers_take_their_own_parameters():
    model, sink = net(), sink_of(Stage.REDUCED, Stage.CLIPPED)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[1].parameters(), lr=0.1)
    with Watched(model, sink, [first, second]):
        backward(model)
        nn.utils.clip_grad_norm_(model[1].parameters(), 1.0)
        assert [(s.key.layer, s.key.stage) for s in sink.seen] == [("1", Stage.REDUCED)]
        second.step()
        assert stages(sink) == ["reduced", "clipped"]
        first.step()
    assert [s.key.stage for s in sink.find("0", "wgrad", part="bias")] == [Stage.REDUCED, Stage.CLIPPED]


def test_an_optimizer_that_only_the_scaler_knows_is_hooked():
    model, sink = net(), sink_of()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with Watched(model, sink, [], scaler):
        for _ in range(2):
            backward(model, scaler)
            scaler.step(optimizer)
            scaler.update()
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert stages(sink) == ["reduced", "unscaled", "clipped"] * 2
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_is_seen_after_its_first_call(kind, by_keyword):
    traces, model = [], None
    for sink in (None, sink_of(Stage.REDUCED, Stage.CLIPPED)):
        model = net()
        optimizer, losses, gradients = kind(model.parameters(), lr=0.1), [], []

        def closure(model=model, optimizer=optimizer, losses=losses, gradients=gradients):
            optimizer.zero_grad()
            loss = square(model, torch.ones(3, 4))
            loss.backward()
            losses.append(loss.detach().clone())
            gradients.append(model[1].weight.grad.clone())
            return loss

        with Watched(model, sink or sink_of(), [optimizer] if sink else []):
            for _ in range(2):
                result = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        traces.append([*losses, result.detach(), *(p.detach().clone() for p in model.parameters())])
    assert_same_bits(*traces)
    assert stages(sink) == ["reduced", "clipped"] * 2
    assert torch.equal(sink.find("1", "wgrad", stage=Stage.CLIPPED)[0].tensor, gradients[0])


def test_an_error_in_a_closure_goes_on():
    model, sink = net(), sink_of(Stage.CLIPPED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        raise KeyError("theirs")

    with Watched(model, sink, [optimizer]), pytest.raises(KeyError, match="theirs"):
        optimizer.step(closure)
    assert not sink.errors
    assert not sink.seen


def test_a_fused_optimizer_under_a_scaler_is_told():
    model, sink = net(), sink_of()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    with Watched(model, sink, [optimizer], scaler):
        backward(model, scaler)
        scaler.step(optimizer)
        scaler.update()
        assert stages(sink) == ["reduced"]
        backward(model, scaler)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert stages(sink) == ["reduced", "reduced", "unscaled", "clipped"]
    assert "fused optimizer" in sink.blinds["", "wgrad at clipped"]
    assert "fused optimizer" in sink.blinds["", "wgrad at unscaled"]


def test_what_cannot_be_seen_is_told_once():
    model, sink = net(), sink_of()
    with Watched(model, sink):
        pass
    assert "optimizer=optimizer" in sink.blinds["", "wgrad at clipped"]
    assert "clipping" in sink.blinds["", "wgrad at reduced"]
    assert "scaler" in sink.blinds["", "wgrad at unscaled"]

    sink = sink_of(Stage.CLIPPED)
    with Watched(model, sink, [object()]):
        pass
    assert "object cannot be hooked" in sink.blinds["", "wgrad at clipped"]

    sink = sink_of(Stage.CLIPPED)
    copies = torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in model.parameters()], lr=0.1)
    with Watched(model, sink, [copies]):
        pass
    assert "holds none of the model's parameters" in sink.blinds["", "wgrad at clipped"]

    sink = sink_of(Stage.CLIPPED)
    with Watched(model, sink, [torch.optim.SGD(model.parameters(), lr=0.1)]) as source:
        source.after_step()
        source.after_step()
    assert "no step of the optimizer was seen" in sink.blinds["", "wgrad at clipped"]


def test_only_what_is_selected_is_hooked():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = nn.utils.clip_grad_norm_
    with Watched(model, sink_of(Stage.BACKWARD), [optimizer]) as source:
        assert not source.has_work
        assert not optimizer._optimizer_step_pre_hooks
        assert nn.utils.clip_grad_norm_ is original
    with Watched(model, sink_of(Stage.CLIPPED, layers={"1"}), [optimizer]) as source:
        assert source.has_work
        assert source.describe() == "gradients clipped"
        assert nn.utils.clip_grad_norm_ is original
    with Watched(model, sink_of(Stage.REDUCED), [optimizer]):
        assert nn.utils.clip_grad_norm_ is not original
    assert nn.utils.clip_grad_norm_ is original
    assert not optimizer._optimizer_step_pre_hooks


def test_frozen_replaced_and_tied_parameters():
    model, sink = net(), sink_of(Stage.CLIPPED)
    model.append(nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    model.append(nn.Linear(2, 2, bias=False))
    model[3].weight = model[2].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watched(model, sink, [optimizer]) as source:
        backward(model)
        optimizer.step()
        source.after_step()
        sink.step()
        model[1].weight = nn.Parameter(torch.ones(2, 4))
        optimizer.add_param_group({"params": [model[1].weight]})
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    for iteration in (0, 1):
        seen = [s for s in sink.seen if s.iteration == iteration]
        assert sorted(s.key.layer for s in seen) == ["1", "2"]
    assert torch.equal(sink.find("1", "wgrad", 1)[0].tensor, model[1].weight.grad)


def test_a_failing_sink_does_not_reach_the_loop_and_others_go_on():
    model, sink = net(), sink_of(Stage.REDUCED, Stage.CLIPPED)
    sink.fail_on = lambda key: key.layer == "0"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watched(model, sink, [optimizer]):
        backward(model)
        optimizer.step()
    assert stages(sink) == ["reduced", "clipped"]
    assert len(sink.errors) == 1
    assert "failed here" in sink.blinds["0", ""]


def test_copies_of_an_optimizer_record_nothing():
    model, sink = net(), sink_of(Stage.CLIPPED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watched(model, sink, [optimizer]):
        other = copy.deepcopy(optimizer)
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()
    assert not sink.seen
