"""What paired blocks say: the median relative overhead, its interval, and the order in which blocks are run.

A pair is one block without and one block with what is measured, next to each other in time, so that what the machine
does to both (clocks, temperature, neighbours) leaves their ratio alone. Pure numpy, no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the interval that holds the true one with a probability of 95%.

    Attributes:
        median: of the values.
        low, high: the interval's ends; NaN with fewer than two values.
    """

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval; NaN if there is none."""
        return (self.high - self.low) / 2


def median_interval(values: Sequence[float] | NDArray[np.float64], *, seed: int = 0) -> Interval:
    """The median with a bootstrap percentile interval.

    Args:
        values: independent samples, one a pair.
        seed: of the resampling; the same values and seed give the same interval.

    Raises:
        ValueError: there is no value.
    """
    samples = np.asarray(values, np.float64)
    if not samples.size:
        raise ValueError("expected at least one value, got none")
    middle = float(np.median(samples))
    if samples.size < 2:
        return Interval(middle, float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(0, samples.size, (NUM_RESAMPLES, samples.size))
    medians = np.median(samples[drawn], axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Interval(middle, float(low), float(high))


def relative_overhead(off_s: Sequence[float], on_s: Sequence[float], *, seed: int = 0) -> Interval:
    """By which share the blocks with are longer than those without, pair by pair: 0.01 for 1%.

    Args:
        off_s: seconds of a step in each block without.
        on_s: in each block with; blocks of one position belong together.
        seed: see ``median_interval``.

    Raises:
        ValueError: there is no pair, or a block has no partner.
    """
    off, on = np.asarray(off_s, np.float64), np.asarray(on_s, np.float64)
    if off.shape != on.shape:
        raise ValueError(f"expected as many blocks with as without, got {on.size} and {off.size}")
    return median_interval(on / off - 1, seed=seed)


def orders(num_pairs: int, *, seed: int = 0) -> Iterator[bool]:
    """Whether the block without comes first, for each pair: both orders equally often, mixed by a fixed seed.

    Of each two pairs one has either order, so that a drift that one direction favours cancels.
    """
    draw = np.random.default_rng(seed)
    for number in range(num_pairs):
        if number % 2 == 0:
            first = bool(draw.integers(2))
        yield first if number % 2 == 0 else not first
