"""Where in an iteration a feature's call stands, read off the calling thread and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flightrec.inspection.sighting import Counter, Moment, moment
from flightrec.records import Phase, Stage

FORWARD = Moment(Phase.TRAIN, Stage.FORWARD, None)


class Watched(torch.autograd.Function):
    """Notes its moments in a list, in forward and backward, as a module in debug mode would be seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Moment]) -> torch.Tensor:
        ctx.seen = seen
        seen.append(moment("activation"))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen += [moment("gradient"), moment("activation")]
        return gradient * 2, None


def run(seen: list[Moment], x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return Watched.apply(x, seen)
    seen.append(moment("activation"))  # forward without apply, as Transformer Engine's modules do
    return x * 2


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_training_and_evaluation() -> None:
    seen: list[Moment] = []
    run(seen, leaf()).sum().backward()
    assert [(m.phase, m.stage) for m in seen] == [
        (Phase.TRAIN, Stage.FORWARD), (Phase.TRAIN, Stage.BACKWARD), (Phase.TRAIN, Stage.BACKWARD),
    ]  # fmt: skip
    assert seen[1].node == seen[2].node is not None
    for context in (torch.no_grad(), torch.inference_mode()):
        seen.clear()
        with context:
            run(seen, leaf())
        assert [m.phase for m in seen] == [Phase.EVAL]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_training_then_a_recompute(reentrant: bool) -> None:
    seen: list[Moment] = []
    checkpoint(lambda x: run(seen, x), leaf(), use_reentrant=reentrant).sum().backward()
    phases = [(m.phase, m.stage) for m in seen]
    forward, backward = (Phase.TRAIN, Stage.FORWARD), (Phase.TRAIN, Stage.BACKWARD)
    recompute = [(Phase.RECOMPUTE, Stage.FORWARD)] if reentrant or len(phases) == 4 else []
    assert phases == [forward, *recompute, backward, backward]


def test_a_non_reentrant_recompute_starts_inside_the_node_that_wants_its_tensors() -> None:
    class Saving(Watched):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seen: list[Moment]) -> torch.Tensor:
            ctx.save_for_backward(x)
            return Watched.forward(ctx, x, seen)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.saved_tensors  # noqa: B018 - unpacking runs the forward again
            return Watched.backward(ctx, gradient)

    seen: list[Moment] = []
    checkpoint(lambda x: Saving.apply(x * 1, seen), leaf(), use_reentrant=False).sum().backward()
    assert [m.phase for m in seen] == [Phase.TRAIN, Phase.RECOMPUTE, Phase.TRAIN, Phase.TRAIN]


def test_sightings_of_one_node_are_calls_and_of_another_the_next_microbatch() -> None:
    counter = Counter()
    first, second = (Moment(Phase.TRAIN, Stage.BACKWARD, (1, node)) for node in (10, 20))
    places = [counter.place("l", "dgrad", "", seen, None) for seen in (first, first, second, second)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    again = Moment(Phase.TRAIN, Stage.BACKWARD, (2, 20))  # the same address in another backward
    assert counter.place("l", "dgrad", "", again, None) == (2, 0)


def test_forwards_count_microbatches_or_calls_of_a_named_one() -> None:
    counter = Counter()
    assert [counter.place("l", "weight", "", FORWARD, None) for _ in range(2)] == [(0, 0), (1, 0)]
    assert counter.place("other", "weight", "", FORWARD, None) == (0, 0)
    counter.begin()
    assert [counter.place("l", "weight", "", FORWARD, 3) for _ in range(2)] == [(3, 0), (3, 1)]
    recompute = Moment(Phase.RECOMPUTE, Stage.FORWARD, None)
    assert counter.place("l", "weight", "", recompute, 3) == (3, 0)


def test_named_backwards_follow_the_forwards_in_order() -> None:
    counter = Counter()
    for named in (4, 5):
        counter.place("l", "output", "", FORWARD, named)
    backwards = [Moment(Phase.TRAIN, Stage.BACKWARD, (1, node)) for node in (10, 20, 30)]
    assert [counter.place("l", "gradient", "", seen, 5)[0] for seen in backwards] == [4, 5, 5]
    assert counter.place("unknown", "gradient", "", backwards[0], 7)[0] == 7
