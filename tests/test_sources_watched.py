from __future__ import annotations

import gc
import weakref

import pytest
import torch
from sources_support import RecordingSink, Watch, alone, assert_untouched, square
from torch import nn
from torch.nn.modules import module as torch_module

from flightrec.sources import watched


def carries_hooks(module: nn.Module) -> bool:
    """What torch's and Transformer Engine's make_graphed_callables ask before they refuse."""
    return bool(
        len(module._backward_hooks)
        or len(module._backward_pre_hooks)
        or len(module._forward_hooks)
        or len(module._forward_pre_hooks)
    )


def test_no_module_carries_a_hook_of_ours_and_all_is_recorded():
    model, sink = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), RecordingSink()
    alone()
    with Watch(model, sink):
        assert not any(carries_hooks(module) for module in model.modules())
        square(model, torch.ones(2, 3)).backward()
    assert sink.one("1", "gradient")
    assert_untouched(model)
    assert not watched.num_watched()
    assert watched.KEY not in torch_module._global_forward_hooks
    assert watched.KEY not in torch_module._global_forward_pre_hooks


def test_other_models_are_none_of_our_business_even_with_a_dead_ones_identity():
    model, sink = nn.Sequential(nn.Linear(3, 3)), RecordingSink()
    with Watch(model, sink):
        nn.Linear(3, 3)(torch.ones(1, 3))
        assert not sink.seen
        inner = weakref.ref(model[0])
        model[0] = nn.Identity()
        gc.collect()
        assert inner() is not None, "what is watched keeps its identity until nobody does"
    gc.collect()
    assert inner() is None


def test_several_recorders_see_one_model_and_leave_it_one_by_one():
    model, first, second = nn.Sequential(nn.Linear(3, 3)), RecordingSink(), RecordingSink()
    with Watch(model, first):
        with Watch(model, second):
            square(model, torch.ones(1, 3)).backward()
        assert first.one("0", "output")
        assert second.one("0", "output")
        square(model, torch.ones(1, 3)).backward()
    assert len(first.find("0", "output")) == 2
    assert len(second.find("0", "output")) == 1
    assert_untouched(model)


def test_hooks_of_the_users_come_first_and_give_what_is_seen():
    model, sink = nn.Sequential(nn.Linear(3, 3)), RecordingSink()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    with Watch(model, sink):
        out = model(torch.ones(1, 3))
        assert torch.equal(sink.one("0", "output").tensor, out)
    assert len(model[0]._forward_hooks) == 1


@pytest.mark.filterwarnings("error")
def test_a_compiled_module_does_not_warn_of_our_hooks_and_does_of_others():
    model, sink = nn.Linear(2, 2), RecordingSink()
    call = torch.compile(model, backend="eager")
    handle = None
    try:
        with Watch(model, sink):
            call(torch.ones(1, 2))
            handle = torch_module.register_module_forward_hook(lambda *_: None)
            with pytest.warns(UserWarning, match="global hooks"):
                call(torch.ones(1, 2))
    finally:
        if handle is not None:
            handle.remove()
        torch._dynamo.reset()
    assert not torch_module._has_any_global_hook()
