from __future__ import annotations

import threading

import pytest
import torch
from sources_support import (
    BACKWARD,
    Net,
    RecordingSink,
    Watch,
    assert_same_bits,
    batches,
    bits,
    run_once,
    square,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from flightrec.records import Phase
from flightrec.sources import stamps, warmup


def test_f21_evaluation_leaves_no_trace_and_gradients_of_eval_mode_modules_are_training():
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).eval().requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, 8), frozen, nn.Linear(8, 8))
    model[1].training = False
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        for iteration in range(6):
            square(model, torch.randn(2, 8)).backward()
            if iteration % 2:
                with torch.no_grad():
                    for _ in range(10):
                        model(10 * torch.randn(2, 8))
                model.eval()
                model(torch.randn(2, 8))
                model.train()
                model[1].eval()
            watch.step()
    per_iteration = [len(sink.recorded(i)) for i in range(6)]
    assert per_iteration == [per_iteration[0]] * 6
    assert {k.phase for k in sink.recorded()} == {Phase.TRAIN}
    assert len(sink.find("1", "gradient", phase=Phase.TRAIN)) == 6
    assert max(s.tensor.abs().max() for s in sink.find("", "input")) < 10
    assert all(s.key.microbatch == 0 for s in sink.seen)


def test_f21_evaluation_is_recorded_under_its_own_phase_when_selected():
    model = nn.Linear(4, 4)
    sink = RecordingSink(phases=(Phase.TRAIN, Phase.EVAL))
    with Watch(model, sink) as watch:
        with torch.inference_mode():
            model(torch.full((1, 4), torch.nan))
        model.eval()
        model(torch.ones(1, 4))
        watch.step()
    assert {k.phase for k in sink.recorded()} == {Phase.EVAL}
    assert {k.tensor for k in sink.recorded()} == {"activation", "output"}
    assert [k.call for k in sink.recorded() if k.tensor == "activation"] == [0, 1]
    assert sink.first_nonfinite().key.tensor == "activation"


@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant", "selective"])
@pytest.mark.parametrize("phases", [(Phase.TRAIN,), (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_bit_identical(mode, phases, autocast):
    def loss_of(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return square(model, x)

    sink = RecordingSink(phases=phases, tensors=(*RecordingSink().tensors, "parameter"))
    data = batches()
    plain = train(lambda: Net(mode), loss_of, data, microbatches=2, optimizer=torch.optim.Adam)
    watched = train(lambda: Net(mode), loss_of, data, sink, microbatches=2, optimizer=torch.optim.Adam)
    assert_same_bits(plain, watched)
    assert sink.seen
    assert not sink.errors
    assert len({(s.iteration, s.key) for s in sink.seen}) == len(sink.seen), "no key twice in an iteration"


@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant", "selective"])
def test_checkpointing_records_the_same_training_tensors(mode):
    def collect(mode):
        sink = RecordingSink()
        train(lambda: Net(mode), square, batches(), sink, microbatches=2)
        return {(s.iteration, s.key): s.tensor for s in sink.seen}

    expected, found = collect("none"), collect(mode)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(bits(tensor), bits(found[key])), key


@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_recompute_is_a_phase_with_the_microbatch_of_its_backward(mode):
    torch.manual_seed(0)
    model = Net(mode)
    sink = RecordingSink(phases=(Phase.TRAIN, Phase.RECOMPUTE))
    with Watch(model, sink) as watch:
        losses = [square(model, x) for x in batches(2)]
        for loss in losses:  # both forwards first, as a pipeline does
            loss.backward()
        watch.step()
    for microbatch in (0, 1):
        first = sink.one("blocks.0.fc1", "activation", microbatch=microbatch, phase=Phase.TRAIN)
        again = sink.one("blocks.0.fc1", "activation", microbatch=microbatch, phase=Phase.RECOMPUTE)
        assert torch.equal(first.tensor, again.tensor)
        assert sink.one("blocks.0.fc1", "gradient", microbatch=microbatch)
        assert sink.one("blocks.0.fc1", "wgrad", microbatch=microbatch, part="")
    assert {k.phase for k in sink.recorded() if k.stage is BACKWARD} == {Phase.TRAIN}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_checkpointed_as_a_whole_trains(reentrant):
    torch.manual_seed(0)
    model, sink = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), RecordingSink(phases=tuple(Phase))
    with Watch(model, sink) as watch:
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(2, 8, requires_grad=True)
                checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
            with torch.no_grad():
                model(torch.randn(2, 8))
            watch.step()
    for iteration in range(2):
        for phase in (Phase.TRAIN, Phase.RECOMPUTE):
            found = sink.find("1", "activation", iteration, phase=phase)
            assert [seen.key.microbatch for seen in found] == [0, 1]
        assert [seen.key.microbatch for seen in sink.find("1", "gradient", iteration)] == [0, 1]
        assert len(sink.find("1", "activation", iteration, phase=Phase.EVAL)) == 1
        assert len(sink.find("1", "weight", iteration, phase=Phase.TRAIN)) == 1
    assert not sink.blinds


def test_an_exception_in_the_model_is_raised_unchanged_and_the_next_forward_counts_right():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.error = None

        def forward(self, x):
            y = self.fc(x)
            if self.error is not None:
                raise self.error
            return y

    model = nn.Sequential(Bad(), nn.Linear(2, 2))
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        for error in (ValueError("the model's own"), KeyboardInterrupt()):
            model[0].error = error
            with pytest.raises(type(error)) as caught:
                model(torch.ones(1, 2))
            assert caught.value is error
            model[0].error = None
            sink.step()
        square(model, torch.ones(1, 2)).backward()
        watch.step()
    last = sink.recorded(2)
    assert {k.microbatch for k in last} == {0}
    assert {k.phase for k in last} == {Phase.TRAIN}
    assert not sink.find("0", "output", 0)


def test_transforms_and_fake_tensors_are_not_recorded():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(3, 3)
    sink = RecordingSink()
    with Watch(model, sink):
        torch.func.vmap(model)(torch.ones(2, 3))
        parameters = dict(model.named_parameters())
        torch.func.grad(lambda p: torch.func.functional_call(model, p, torch.ones(2, 3)).sum())(parameters)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(2, 3))
    assert not sink.seen
    assert not sink.errors


@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant"])
def test_backward_on_another_thread_records_the_same(mode):
    def collect(elsewhere):
        torch.manual_seed(0)
        model = Net(mode)
        sink = RecordingSink(phases=(Phase.TRAIN, Phase.RECOMPUTE))
        with Watch(model, sink) as watch:
            for _ in range(2):
                losses = [square(model, x) for x in batches(2)]
                for loss in losses:
                    if elsewhere:
                        thread = threading.Thread(target=loss.backward)
                        thread.start()
                        thread.join()
                    else:
                        loss.backward()
                watch.step()
        return [(s.iteration, s.key, s.tensor) for s in sink.seen]

    here, there = collect(False), collect(True)
    assert [x[:2] for x in here] == [x[:2] for x in there]
    for (_, key, left), (_, _, right) in zip(here, there, strict=True):
        assert torch.equal(bits(left), bits(right)), key


def test_call_counts_runs_within_a_microbatch_and_starts_again_with_the_next():
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(model[0])
    sink = RecordingSink(tensors={"activation", "gradient"}, layers={"0"})
    run_once(model, sink, square, torch.ones(1, 2), torch.ones(1, 2))
    found = [(k.microbatch, k.call) for k in sink.recorded() if k.tensor == "activation"]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [(k.microbatch, k.call) for k in sink.recorded() if k.tensor == "gradient"]
    assert found == [(0, 1), (0, 0), (1, 1), (1, 0)]


def test_a_cuda_build_of_torch_without_a_gpu_records(monkeypatch):
    """There the question whether a stream captures raises; nobody asks it before CUDA is in use."""

    def no_device() -> bool:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(warmup, "_HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(warmup, "_is_cuda_used", False)
    monkeypatch.setattr(warmup, "_is_stream_capturing", no_device)
    assert not warmup.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(warmup, "_is_stream_capturing", lambda: True)
    assert warmup.is_capturing()
    assert not stamps.must_not_record(), "what is captured is recorded"
    warmup._forget_cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not warmup.is_capturing(), "as in a forked child"


class Blocks(nn.Module):
    """Checkpointed blocks of several layers; the last one may raise."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.reentrant = reentrant
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.raises and number == 2:
                block[0](x)
                raise ValueError("the model's own")
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def in_turns(reentrant: bool | None, turn, num_iterations: int = 5) -> RecordingSink:
    torch.manual_seed(0)
    model, sink = Blocks(reentrant), RecordingSink(phases=(Phase.TRAIN, Phase.RECOMPUTE))
    sink.turn = lambda layer: turn(sink.iteration, layer)
    with Watch(model, sink) as watch:
        for iteration in range(num_iterations):
            for microbatch in range(2):
                model.raises = iteration == 3 and microbatch == 0
                x = torch.full((2, 4), 1.0 + microbatch + iteration, requires_grad=True)
                try:
                    model(x).sum().backward()
                except ValueError:
                    continue
            watch.step()
    assert not sink.errors
    return sink


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("awake", ["blocks.1", "blocks.1.0", "blocks.2.2"])
def test_layers_that_sleep_change_nothing_of_what_the_others_show(reentrant, awake):
    def is_turn(iteration: int, layer: str) -> bool:
        return layer in ("", awake) or iteration == 0

    whole = in_turns(reentrant, lambda iteration, layer: True)
    turns = in_turns(reentrant, is_turn)
    expected = [seen for seen in whole.seen if is_turn(seen.iteration, seen.key.layer)]
    assert len(turns.seen) == len(expected) > 60
    for one, two in zip(turns.seen, expected, strict=True):
        assert (one.iteration, one.key) == (two.iteration, two.key)
        assert torch.equal(bits(one.tensor), bits(two.tensor)), one.key


def test_a_module_sleeps_only_inside_another_and_is_woken_only_by_itself():
    found = stamps.Stamps(nn.Identity(), RecordingSink())
    assert not found.doze(), "as the outermost one it begins a microbatch"
    found.enter(found._root, "")
    assert found.doze()
    assert found.current() is stamps.ASLEEP
    inner = found.enter(nn.Identity(), "inner")
    assert not found.wake(), "the innermost one is awake"
    assert (inner.phase, inner.microbatch) == (Phase.TRAIN, 0)
    assert found.leave("inner") == inner
    assert found.wake()
    assert not found.wake()
    assert found.depth == 1
