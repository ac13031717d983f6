from __future__ import annotations

import copy
import gc
import pickle
import weakref

import torch
from sources_support import (
    Net,
    RecordingSink,
    Watch,
    assert_same_bits,
    assert_untouched,
    batches,
    run_once,
    square,
    train,
)
from torch import nn

from flightrec.sources.hooks import inert


def test_the_outer_of_two_modules_that_return_one_tensor_sees_its_gradient_first():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    sink = RecordingSink(tensors={"gradient"})
    user: list[str] = []
    model[0][0].register_forward_hook(lambda m, a, o: o.register_hook(lambda g: user.append("user")) and None)
    run_once(model, sink, square, torch.randn(1, 4))
    assert [k.layer for k in sink.recorded()] == ["", "0", "0.0"]
    assert user == ["user"]


def test_attention_shared_input_and_leaf_inputs_do_not_gather_hooks():
    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, 2, 8))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(self.query, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model = Query()
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        for _ in range(5):
            square(model, torch.randn(1, 3, 8)).backward()
            assert len(model.query._backward_hooks) == 1
            watch.step()
            assert not model.query._backward_hooks
    assert torch.equal(
        sink.one("attention", "dgrad", 0, part="0").tensor, sink.one("", "wgrad", 0, part="query").tensor
    )


def test_no_tensor_outlives_the_iteration_and_nothing_grows():
    torch.manual_seed(0)
    model = Net("nonreentrant")
    sink = RecordingSink(tensors={"output", "gradient", "dgrad", "activation", "wgrad"})
    sink.capture = lambda *a, **k: None
    alive: list[weakref.ref] = []
    counts = []
    with Watch(model, sink) as watch:
        gc.collect()
        gc.disable()
        try:
            for iteration in range(50):
                out = model(torch.randn(4, 8))
                loss = out.square().mean()
                loss.backward()
                model.zero_grad()
                alive += [weakref.ref(out), weakref.ref(loss)]
                del out, loss
                with torch.no_grad():
                    model(torch.randn(4, 8))
                watch.step()
                if iteration in (10, 49):
                    gc.collect()
                    counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            assert not any(reference() is not None for reference in alive)
        finally:
            gc.enable()
    assert counts[0] == counts[1]


def test_a_forgotten_output_is_freed_without_the_garbage_collector():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sink = RecordingSink()
    sink.capture = lambda *a, **k: None
    with Watch(model, sink):
        gc.collect()
        gc.disable()
        try:
            out = model(torch.randn(2, 4, requires_grad=True))
            reference = weakref.ref(out)
            del out
            assert reference() is None
        finally:
            gc.enable()


def test_copies_and_pickles_of_a_watched_model_are_not_watched():
    model = nn.Sequential(nn.Linear(2, 2))
    sink = RecordingSink()
    with Watch(model, sink):
        averaged = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert b"flightrec." not in pickle.dumps(model), "it can be loaded without us"
        square(averaged, torch.ones(1, 2)).backward()
        square(loaded, torch.ones(1, 2)).backward()
        assert not sink.seen
        square(model, torch.ones(1, 2)).backward()
        assert sink.seen


def test_copies_of_a_module_with_hooks_of_its_own_carry_hooks_that_do_nothing():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_pre_hook(_double)
    sink = RecordingSink()
    with Watch(model, sink):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert set(other[0]._forward_hooks.values()) == {inert}
            assert list(other[0]._forward_pre_hooks.values()) == [_double, inert]
            square(other, torch.ones(1, 2)).backward()
        assert not sink.seen


def _double(_module, args):
    return (args[0] * 2,)


def test_a_second_attach_starts_clean_and_detach_is_final():
    model = nn.Linear(2, 2)
    first, second = RecordingSink(), RecordingSink()
    watch = Watch(model, first)
    with watch:
        loss = square(model, torch.ones(1, 2))
    seen = len(first.seen)
    loss.backward()
    assert len(first.seen) == seen, "hooks on a graph that is still alive do nothing"
    for source in watch.sources:
        source.detach()
    assert_untouched(model)
    run_once(model, second, square, torch.ones(1, 2))
    assert second.one("", "gradient")
    assert len(first.seen) == seen


def test_double_backward_and_retained_graphs_work():
    def loss_of(model, x):
        x = x.clone().requires_grad_(True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()

    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    sink = RecordingSink()
    assert_same_bits(train(make, loss_of, batches()), train(make, loss_of, batches(), sink))
    assert not sink.errors
