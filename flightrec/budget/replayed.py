"""Turns inside captured CUDA graphs: which units their records belong to, and what their replays cost.

``Rotation`` decides, in every ``step``, for the next iteration's replays; the ring tells it to the device. ``of`` is
called on the threads that capture; the rest on the training thread, as host arithmetic on arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from flightrec.budget.cost import source_bytes
from flightrec.ring.captured import CapturedGraph
from flightrec.ring.turns import ALWAYS, Turn

Unit = tuple[str | None, int]
"""A layer and the ``every`` of its entry of ``select``. No layer: by the number of the iteration alone."""


class ReplayTurns:
    """See the module."""

    def __init__(self) -> None:
        self._numbers: dict[Unit, int] = {}
        self._lock = threading.Lock()
        self._turns: tuple[dict[str, int] | None, NDArray[np.int64]] = None, np.empty(0, np.int64)
        self._in_turn = np.empty(0, bool)
        self._sizes: dict[CapturedGraph, int] = {}  # records that are counted in
        self._records: NDArray[np.int64] = np.empty((0, 3), np.int64)  # graph, unit and bytes of each
        self._graphs: list[CapturedGraph] = []

    def of(self, unit: Unit | None, num_units: int, *, is_in: bool) -> Turn:
        """What a record of a graph takes turns with.

        Args:
            unit: None for what is recorded in every iteration.
            num_units: that there may be.
            is_in: whether it would be recorded now.
        """
        if unit is None:
            return Turn(ALWAYS, True, num_units)
        with self._lock:
            return Turn(self._numbers.setdefault(unit, len(self._numbers)), is_in, num_units)

    def choose(
        self, turn: int | None, turn_of: dict[str, int], has_turn: Callable[[str | None, int], bool]
    ) -> NDArray[np.bool_]:
        """Which units are recorded in the iteration that begins.

        Args:
            turn: whose turn it is; None: everybody's.
            turn_of: of a layer; one that is not in it is recorded. Never changed in place.
            has_turn: decides of a unit that is not recorded in every one of its turns.

        Returns:
            bool [units].
        """
        units = list(self._numbers)
        if self._turns[0] is not turn_of or len(self._turns[1]) != len(units):
            self._turns = turn_of, np.array([-1 if name is None else turn_of.get(name, -1) for name, _ in units], int)
        turns = self._turns[1]
        in_turn = np.ones(len(units), bool) if turn is None else (turns == turn) | (turns < 0)
        for number, (layer, every) in enumerate(units):
            if every > 1:
                in_turn[number] = has_turn(layer, every)
        self._in_turn = in_turn
        return in_turn

    def load(self, replayed: Mapping[CapturedGraph, int]) -> tuple[int, int]:
        """Records and bytes of the iteration that ends.

        Args:
            replayed: its replays.
        """
        if not replayed:
            return 0, 0
        if any(self._sizes.get(graph) != len(graph.records) for graph in replayed):
            self._learn(replayed)
        counts = np.array([replayed.get(graph, 0) for graph in self._graphs], np.int64)
        late = len(self._numbers) - len(self._in_turn)  # seen for the first time in this iteration
        in_turn = np.concatenate([self._in_turn, np.ones(late + 1, bool)])  # the last one: of ``ALWAYS``
        graph, unit, num_bytes = self._records.T
        times = counts[graph] * in_turn[unit]
        return int(times.sum()), int(times @ num_bytes)

    def _learn(self, replayed: Mapping[CapturedGraph, int]) -> None:
        for graph in replayed:
            self._sizes[graph] = len(graph.records)
        self._graphs = list(self._sizes)
        self._records = np.array(
            [
                (number, record.unit, source_bytes(record.templates[0]))
                for number, graph in enumerate(self._graphs)
                for record in graph.records
                if record.destination is not None
            ],
            np.int64,
        ).reshape(-1, 3)
