"""Which old iterations the host tier keeps, so that there is always one of about each age to compare with.

Host arithmetic only; owns a few numbers. For an age of A iterations a candidate is kept every A / 2: the oldest one is
from A to 1.5 A old, and when the next one has reached A it goes. So three iterations are kept for each age, whatever
the length of the run, and nothing is random. An iteration that is not there, or in which a rule fired, is no candidate:
the next one is.
"""

from __future__ import annotations

AGES = (100, 1_000, 10_000)
"""Ages in iterations of which a landmark is kept, if the tier has room."""

CANDIDATES_PER_AGE = 3


class Landmarks:
    """See the module; ticks are counted here, one an iteration."""

    def __init__(self) -> None:
        self._candidates: dict[int, list[int]] = {age: [] for age in AGES}  # by age, oldest first
        self._num_ages = len(AGES)

    def limit(self, num_iterations: int) -> None:
        """Keep landmarks of so many ages that they take half of ``num_iterations`` at most, the small ages first."""
        self._num_ages = min(len(AGES), num_iterations // 2 // CANDIDATES_PER_AGE)

    def add(self, tick: int) -> None:
        """The tier holds this tick now; ticks come in order."""
        for age in AGES[: self._num_ages]:
            candidates = self._candidates[age]
            if not candidates or tick - candidates[-1] >= age // 2:
                candidates.append(tick)

    def forget(self, tick: int) -> None:
        """The tier had to give it up."""
        for candidates in self._candidates.values():
            if tick in candidates:
                candidates.remove(tick)

    def kept(self, now: int) -> set[int]:
        """Ticks that must stay at tick ``now``; what is too old for its age is forgotten."""
        found: set[int] = set()
        for position, (age, candidates) in enumerate(self._candidates.items()):
            if position >= self._num_ages:
                candidates.clear()
            while len(candidates) > 1 and now - candidates[1] >= age:
                candidates.pop(0)
            found.update(candidates)
        return found

    def at(self, now: int) -> dict[int, int]:
        """Tick to age: the landmark of each age that has one at tick ``now``; one tick may serve several."""
        found: dict[int, int] = {}
        for age, candidates in self._candidates.items():
            old = [tick for tick in candidates if now - tick >= age]
            if old:
                found[old[-1]] = age
        return found
