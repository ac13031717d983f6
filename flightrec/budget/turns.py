"""Who is recorded when: a round of turns over the layers, as pure functions.

A round has so many turns that no turn costs more than it may. Which layers a turn has depends on the layers' weights
and the number of turns alone, and which turn it is on the tick alone: ranks with the same layers and the same number of
turns agree without a word. The numbers of turns come from a coarse ladder, so that small differences between the ranks'
measurements do not change them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

SLACK = 0.8
"""A shorter round is taken up only if its turns cost at most this share of the allowance: no hopping to and fro."""


def ladder(num_layers: int) -> Iterator[int]:
    """Numbers of turns that a round may have: 1, 2, 3, 4, 6, 8, 12, ... and at last a turn a layer."""
    for rung in itertools.chain((1,), *((2 << power, 3 << power) for power in range(62))):
        if rung >= num_layers:
            break
        yield rung
    yield max(1, num_layers)


def cut(weights: Sequence[float], num_turns: int) -> list[int]:
    """Cut the layers into contiguous turns of about the same weight, none of them empty.

    Args:
        weights: of the layers in their order, not negative.
        num_turns: from 1 to the number of layers.

    Returns:
        Position of the first layer of each turn; the first is 0.
    """
    assert 1 <= num_turns <= len(weights)
    before = [0.0, *itertools.accumulate(weights)]
    starts = [0]
    for turn in range(1, num_turns):
        even = bisect_left(before, before[-1] * turn / num_turns)
        starts.append(min(max(even, starts[-1] + 1), len(weights) - (num_turns - turn)))
    return starts


def totals(values: Sequence[float], starts: Sequence[int]) -> list[float]:
    """What the layers of each turn come to."""
    return [sum(values[start:stop]) for start, stop in zip(starts, [*starts[1:], len(values)], strict=True)]


def fits(weights: Sequence[float], costs: Sequence[float], num_turns: int, allowance: float) -> bool:
    """Whether no turn of several layers costs more than ``allowance``; a single layer may."""
    starts = cut(weights, num_turns)
    stops = [*starts[1:], len(weights)]
    return all(
        stop - start == 1 or cost <= allowance
        for start, stop, cost in zip(starts, stops, totals(costs, starts), strict=True)
    )


def choose(weights: Sequence[float], costs: Sequence[float], allowance: float, current: int | None = None) -> int:
    """How many turns a round has: as few as fit, at most one a layer.

    Args:
        weights: of the layers in their order, by which they are cut into turns.
        costs: what each of them costs by this rank's own measurement.
        allowance: what a turn may cost.
        current: turns of the round so far; it is kept unless it no longer fits or a shorter one fits with room to
            spare.
    """
    rungs = list(ladder(len(weights)))
    if current in rungs and fits(weights, costs, current, allowance):
        shorter = (rung for rung in rungs if rung < current)
        return next((rung for rung in shorter if fits(weights, costs, rung, SLACK * allowance)), current)
    return next(rung for rung in rungs if rung == rungs[-1] or fits(weights, costs, rung, allowance))
