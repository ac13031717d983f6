from __future__ import annotations

import copy
import pickle

import pytest
import torch
from rules_support import DEVICES
from sources_support import RecordingSink

from flightrec.sources.scaler import ScalerWatch

METHODS = ("unscale_", "step", "update")


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def before_unscale(self, optimizer):
        self.calls.append(("before unscale", optimizer))

    def after_unscale(self, optimizer):
        self.calls.append(("after unscale", optimizer))

    def before_step(self, optimizer):
        self.calls.append(("before step", optimizer))


def make(device="cpu", enabled=True, scale=1024.0):
    return torch.amp.GradScaler(device, init_scale=scale, enabled=enabled)


def optimizer_of(device="cpu", gradient=1.0, **options):
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    parameter.grad = torch.full((2,), gradient, device=device)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def begin(scaler, device="cpu"):
    scaler.scale(torch.ones((), device=device))


def watching(scaler, listener=None):
    sink = RecordingSink()
    watch = ScalerWatch(scaler, sink)
    watch.listener = listener
    watch.attach()
    return watch, sink


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "gradients, skipped", [([1.0], 0), ([float("inf")], 1), ([1.0, float("nan")], 1), ([1.0, 1.0], 0)]
)
def test_scale_and_skips_are_those_of_the_iteration(device, gradients, skipped):
    scaler = make(device)
    watch, sink = watching(scaler)
    optimizers = [optimizer_of(device, gradient) for gradient in gradients]
    begin(scaler, device)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    taken = {name: value.item() for name, value in watch.take().items()}
    assert taken == {"loss_scale": 1024.0, "skipped_step": skipped}
    assert scaler.get_scale() == (512 if skipped else 1024)
    assert watch.take() == {}
    assert not sink.errors
    assert not sink.blinds


def test_an_update_after_the_iteration_is_over_counts_for_that_iteration():
    scaler, optimizer = make(), optimizer_of(gradient=float("inf"))
    watch, _ = watching(scaler)
    begin(scaler)
    for iteration in range(3):
        scaler.step(optimizer)
        taken = {name: value.item() for name, value in watch.take().items()}
        assert taken == {"loss_scale": 1024.0 / 2**iteration, "skipped_step": 1}
        scaler.update()
        assert watch.take() == {}


def test_an_iteration_without_a_step_gives_nothing_and_several_updates_add_up():
    scaler = make()
    watch, _ = watching(scaler)
    assert watch.take() == {}
    begin(scaler)
    assert watch.take() == {}
    for gradient in (float("inf"), 1.0):
        scaler.step(optimizer_of(gradient=gradient))
        scaler.update()
    assert {name: value.item() for name, value in watch.take().items()} == {"loss_scale": 512, "skipped_step": 1}


def test_a_scale_set_by_hand_and_a_fused_optimizer():
    scaler, optimizer = make(), optimizer_of(gradient=float("inf"), fused=True)
    watch, _ = watching(scaler)
    begin(scaler)
    scaler.step(optimizer)
    scaler.update(8.0)
    assert {name: value.item() for name, value in watch.take().items()} == {"loss_scale": 1024, "skipped_step": 1}
    assert scaler.get_scale() == 8


def test_the_listener_is_told_in_order():
    scaler, told = make(), Told()
    watching(scaler, told)
    first, second = optimizer_of(), optimizer_of()
    begin(scaler)
    scaler.unscale_(first)
    scaler.step(first)
    scaler.step(optimizer=second)
    assert told.calls == [
        ("before unscale", first),
        ("after unscale", first),
        ("before step", first),
        ("before step", second),
        ("before unscale", second),
        ("after unscale", second),
    ]


def test_errors_of_the_scaler_are_its_own():
    scaler, told = make(), Told()
    _, sink = watching(scaler, told)
    optimizer = optimizer_of()
    begin(scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    assert [name for name, _ in told.calls] == ["before unscale", "after unscale", "before unscale"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'optimizer'"):
        scaler.step()
    assert len(sink.errors) == 1  # ours was called without an optimizer too


def test_an_error_of_the_listener_does_not_reach_the_loop():
    class Fails(Told):
        def before_unscale(self, optimizer):
            raise RuntimeError("on purpose")

    scaler, optimizer = make(), optimizer_of()
    _, sink = watching(scaler, Fails())
    begin(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].tolist() != [1, 1]
    assert [str(error) for error in sink.errors] == ["on purpose"]


def test_a_disabled_scaler_is_left_alone():
    scaler = make(enabled=False)
    watch, sink = watching(scaler)
    assert not watch.is_enabled
    assert not set(METHODS) & set(vars(scaler))
    optimizer = optimizer_of(gradient=float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert watch.take() == {}
    assert not sink.blinds


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_detaching_leaves_no_trace_in_whatever_order(order):
    scaler = make()
    watches = [watching(scaler)[0] for _ in range(2)]
    assert set(METHODS) <= set(vars(scaler))
    for number in order:
        watches[number].detach()
        watches[number].detach()
    assert not set(METHODS) & set(vars(scaler))
    assert watches[0].take() == {}


def test_a_wrapper_that_was_there_before_comes_back():
    scaler = make()
    calls = []
    scaler.update = theirs = lambda *args: (calls.append(1), torch.amp.GradScaler.update(scaler, *args))
    watch, _ = watching(scaler)
    begin(scaler)
    scaler.step(optimizer_of())
    scaler.update()
    assert calls == [1]
    watch.detach()
    assert scaler.update is theirs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_of_the_scaler_is_a_plain_one(copied):
    scaler = make(scale=64.0)
    watch, _ = watching(scaler)
    other = copied(scaler)
    begin(other)
    optimizer = optimizer_of(gradient=float("inf"))
    other.step(optimizer)
    other.update()
    assert other.get_scale() == 32
    assert scaler.get_scale() == 64
    assert watch.take() == {}


def test_a_subclass_with_words_of_one_element_and_several_devices_works():
    class Sharded(torch.amp.GradScaler):  # as FSDP's
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            state = self._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = {d: w.reshape(1) for d, w in state["found_inf_per_device"].items()}

    scaler = Sharded("cpu", init_scale=4.0)
    watch, _ = watching(scaler)
    begin(scaler)
    scaler.step(optimizer_of(gradient=float("inf")))
    scaler.update()
    assert {name: value.item() for name, value in watch.take().items()} == {"loss_scale": 4, "skipped_step": 1}


def test_what_a_strange_scaler_lacks_is_told_once():
    class NoMethods:
        pass

    class NoState:
        def unscale_(self, optimizer):
            pass

        def step(self, optimizer):
            optimizer.step()

        def update(self):
            pass

    watch, sink = watching(NoMethods())
    assert "no unscale_, step, update" in sink.blinds["", "skipped_step"]
    assert watch.take() == {}

    scaler, optimizer, told = NoState(), optimizer_of(), Told()
    watch, sink = watching(scaler, told)
    assert "cannot be told" in sink.blinds["", "skipped_step"]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert watch.take() == {}
    assert len(told.calls) == 3
    assert not sink.errors
