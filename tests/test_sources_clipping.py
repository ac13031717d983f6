from __future__ import annotations

import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as imported_early

from flightrec.sources import clipping

NAMES = [(module, name) for module, name in clipping._NAMES if hasattr(module, name)]


class Heard:
    def __init__(self) -> None:
        self.calls: list[list[torch.Tensor]] = []
        self.values: list[torch.Tensor] = []

    def before_clipping(self, parameters) -> None:
        self.calls.append(list(parameters))
        self.values.append(parameters[0].grad.clone() if parameters else torch.empty(0))

    def __enter__(self) -> Heard:
        clipping.listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        clipping.stop_listening(self)


def parameters(count: int = 2) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(3)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.full((3,), 5.0)
    return made


CLIPS = {
    "norm": lambda p: utils.clip_grad_norm_(p, 1.0),
    "norm by its module": lambda p: clip_grad.clip_grad_norm_(p, 1.0),
    "norm imported early": lambda p: imported_early(p, 1.0),
    "norm by keyword": lambda p: utils.clip_grad_norm_(parameters=p, max_norm=1.0),
    "value": lambda p: utils.clip_grad_value_(p, 1.0),
    "value by keyword": lambda p: utils.clip_grad_value_(parameters=p, clip_value=1.0),
}
GIVEN = {
    "list": list,
    "tuple": tuple,
    "generator": lambda p: (x for x in p),
    "iterator": iter,
    "view": lambda p: dict(enumerate(p)).values(),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("clip", CLIPS)
def test_it_is_told_before_and_the_result_is_the_same(clip, given):
    plain, seen = parameters(), parameters()
    expected = CLIPS[clip](GIVEN[given](plain))
    with Heard() as heard:
        result = CLIPS[clip](GIVEN[given](seen))
    assert (result is None and expected is None) or torch.equal(result, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, seen, strict=True))
    assert not torch.equal(seen[0].grad, torch.full((3,), 5.0))
    assert [id(p) for p in heard.calls[0]] == [id(p) for p in seen]
    assert torch.equal(heard.values[0], torch.full((3,), 5.0))


def test_a_single_tensor_and_a_given_norm():
    (parameter,) = parameters(1)
    with Heard() as heard:
        utils.clip_grad_norm_(parameter, 1.0)
        if hasattr(utils, "clip_grads_with_norm_"):
            utils.clip_grads_with_norm_(parameter, 0.5, torch.tensor(1.0))
    assert all(call[0] is parameter for call in heard.calls)
    assert len(heard.calls) >= 2


def test_the_norm_is_told_even_if_it_raises():
    (parameter,) = parameters(1)
    parameter.grad[0] = float("nan")
    with Heard() as heard, pytest.raises(RuntimeError, match="non-finite"):
        utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert len(heard.calls) == 1


def test_errors_and_warnings_are_the_originals():
    with Heard() as heard, pytest.raises(TypeError) as ours:
        utils.clip_grad_value_(3, 1.0)
    with pytest.raises(TypeError) as theirs:
        utils.clip_grad_value_(3, 1.0)
    assert str(ours.value) == str(theirs.value)
    assert not heard.calls

    def empty_warnings() -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            utils.clip_grad_norm_((p for p in ()), 1.0)
        return len(caught)

    expected = empty_warnings()
    with Heard():
        assert empty_warnings() == expected


def test_the_last_listener_leaves_nothing_behind():
    before = [getattr(module, name) for module, name in NAMES]
    with Heard() as outer, Heard() as inner:
        assert all(getattr(m, n) is not original for (m, n), original in zip(NAMES, before, strict=True))
        utils.clip_grad_value_(parameters(), 1.0)
    assert len(outer.calls) == len(inner.calls) == 1
    assert [getattr(module, name) for module, name in NAMES] == before


def test_what_lies_over_ours_stays_and_passes_through():
    original = utils.clip_grad_value_
    heard = Heard()
    clipping.listen(heard)
    ours = utils.clip_grad_value_
    utils.clip_grad_value_ = theirs = functools.partial(ours)
    try:
        clipping.stop_listening(heard)
        assert utils.clip_grad_value_ is theirs
        (parameter,) = parameters(1)
        utils.clip_grad_value_(parameter, 1.0)
        assert parameter.grad.max() == 1
        assert not heard.calls
    finally:
        utils.clip_grad_value_ = original


def test_a_listener_that_was_dropped_is_forgotten():
    heard = Heard()
    clipping.listen(heard)
    gone = weakref.ref(heard)
    del heard
    gc.collect()
    assert gone() is None
    (parameter,) = parameters(1)
    utils.clip_grad_value_(parameter, 1.0)
    assert parameter.grad.max() == 1
    with Heard():
        pass
    assert utils.clip_grad_value_.__module__ == "torch.nn.utils.clip_grad"
    assert utils.clip_grad_value_ is clip_grad.clip_grad_value_


def test_nothing_is_told_while_torch_traces():
    with Heard() as heard, torch._subclasses.fake_tensor.FakeTensorMode():
        fake = nn.Parameter(torch.ones(3))
        fake.grad = torch.ones(3)
        utils.clip_grad_value_([fake], 0.5)
    assert not heard.calls
