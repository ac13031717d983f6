"""Which layers are recorded in which iteration, so that recording keeps to its budget.

``Capture`` asks ``skips`` for every sighting, on any thread; everything else is the training thread's. The first
iteration is recorded whole: that gives every tensor its place in the ring and its statistics row, which the ring fixes
at the end of it, and tells every layer's size. From then on the block boundaries are recorded always and the other
layers in turns. A layer that is seen for the first time later is recorded at once and takes its turns from then on.
Nothing here waits for the device, except ``measure`` before training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.budget import turns
from flightrec.budget.blocks import BOUNDARY_TENSORS, find_blocks
from flightrec.budget.clock import StepClock, StreamTimer
from flightrec.budget.cost import FALLBACK, Costs, calibrate
from flightrec.budget.coverage import Coverage
from flightrec.budget.replayed import ReplayTurns
from flightrec.budget.story import Story, tell
from flightrec.config.model import Config
from flightrec.config.sizes import Share
from flightrec.records import Firing, RecordLayout
from flightrec.ring.ring import Ring
from flightrec.ring.turns import Turn

logger = logging.getLogger("flightrec")

MIN_PLAN_TICKS = 16
"""A plan lives at least so long, and at least one whole round."""

LOUD_FACTOR = 2.0
"""What is recorded always may cost so many times the budget before it is said loudly."""


@dataclass(slots=True)
class _Load:
    """What one layer's rotating tensors come to in an iteration of its turn."""

    num_records: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    layers: tuple[str, ...]
    starts: tuple[int, ...]
    turn_of: dict[str, int]
    first_tick: int
    measured: bool  # against an observed step

    @property
    def num_turns(self) -> int:
        return len(self.starts)

    def of_turn(self, turn: int) -> Sequence[str]:
        """Layers of a turn."""
        stop = self.starts[turn + 1] if turn + 1 < len(self.starts) else len(self.layers)
        return self.layers[self.starts[turn] : stop]


class Rotation:
    """See the module.

    Args:
        config: the recorder's.

    Attributes:
        share: part of a step that recording may take; None records everything always.
        always: (layer, tensor) that are recorded in every iteration.
        records_all: nothing takes turns in this iteration, so that ``skips`` need not be asked where ``every`` is 1.
        note: what an incident says of the current iteration if it was not recorded whole, else empty.
    """

    def __init__(self, config: Config) -> None:
        self.share = config.budget.fraction if isinstance(config.budget, Share) else None
        self.always: frozenset[tuple[str, str]] = frozenset()
        self.note = ""
        self.records_all = True
        self._config = config
        self._coverage = Coverage(config.watch_iterations)
        self._order: dict[str, int] = {}
        self._modules: dict[str, str | None] = {}
        self._with_boundary: set[str] = set()
        self._turn: int | None = None  # None: everything
        self._turn_of: dict[str, int] = {}
        self._tick = 0
        self._last: dict[tuple[str, int], int] = {}
        self._plan: _Plan | None = None
        self._loads: dict[str, _Load] = {}
        self._always_load = _Load()
        self._sizes: dict[object, int] = {}
        self._num_layouts = 0
        self._units: dict[tuple[str, int], int] = {}  # (layer, every): what is left out together
        self._unit_of_row: list[int] = []  # -1: takes no turns
        self._unit_array = np.empty(0, np.int64)
        self._unit_turns: tuple[dict[str, int], NDArray[np.int64]] = ({}, np.empty(0, np.int64))
        self._costs: Costs | None = None
        self._clock: StepClock | None = None
        self._judging: StreamTimer | None = None
        self._told = False
        self._replayed = ReplayTurns()
        everies = {entry.every for entry in config.select}
        self._num_everies = len(everies | {1})

    # -- before training

    def watch(self, model: torch.nn.Module) -> None:
        """Learn a model's layers and blocks; call it when the model is attached."""
        self._order = {name: number for number, (name, _) in enumerate(model.named_modules())}
        self._modules = {}
        self.always = frozenset(
            (layer, tensor)
            for layer in find_blocks(model)
            for tensor in BOUNDARY_TENSORS
            if self._config.selects(layer, tensor) is not None
        )
        self._with_boundary = {layer for layer, _ in self.always}

    def measure(self, device: torch.device) -> None:
        """Measure what a record costs. Waits for the device."""
        self._costs = Costs(device, calibrate(device))
        self._clock = StepClock(device)
        self._judging = StreamTimer(device)

    @property
    def costs(self) -> Costs:
        """Observes every record."""
        if self._costs is None:
            self._costs = Costs(torch.device("cpu"), FALLBACK["cpu"])
        return self._costs

    # -- every record, any thread

    def skips(self, layer: str, tensor: str, every: int, iteration: int, *, rotates: bool) -> bool:
        """Whether this sighting is left out of the current iteration: not its turn, or not its n-th iteration.

        Args:
            layer: its layer.
            tensor: which of its tensors.
            every: of its entry of ``select``. Under a budget a turn that comes sooner passes without the tensor.
            iteration: the user's number of the iteration.
            rotates: False for what the user records by hand.
        """
        turn = self._turn
        module = self._module(layer) if rotates and self.share is not None else None
        if module is not None and turn is not None and self._turn_of.get(module, turn) != turn:
            if (layer, tensor) not in self.always:
                return True
            module = None
        if every == 1:
            return False
        if module is None or (layer, tensor) in self.always:
            return bool(iteration % every)
        if self._waits(module, every):
            return True
        self._last[module, every] = self._tick
        return False

    def _module(self, layer: str) -> str | None:
        """The module whose turns a layer takes: itself, or, of a module's several products, that module; else None."""
        if layer not in self._modules:
            name = layer
            while name not in self._order and "." in name:
                name = name.rpartition(".")[0]
            self._modules[layer] = name if name in self._order else None
        return self._modules[layer]

    def sleeps(self, layer: str) -> bool:
        """Whether nothing of a layer is recorded in this iteration for want of its turn; a no says nothing."""
        turn = self._turn
        if turn is None or self.share is None or layer in self._with_boundary:
            return False
        module = self._module(layer)
        return module is not None and self._turn_of.get(module, turn) != turn

    def _waits(self, layer: str, every: int) -> bool:
        """Whether it is too early for the tensors of an entry with ``every``."""
        last = self._last.get((layer, every))
        return last is not None and 0 < self._tick - last < every

    def turn_of(self, layer: str, tensor: str, every: int, *, is_in: bool, rotates: bool) -> Turn:
        """What a record of a captured CUDA graph takes turns with, whose replays ask nobody.

        Args:
            layer: as of ``skips``, and so the following.
            tensor: which of its tensors.
            every: of its entry of ``select``.
            is_in: what ``skips`` did not say.
            rotates: as there.
        """
        takes_turns = rotates and self.share is not None and (layer, tensor) not in self.always
        module = self._module(layer) if takes_turns else None
        unit = (module, every) if module is not None or every > 1 else None
        return self._replayed.of(unit, (len(self._order) + 1) * self._num_everies, is_in=is_in)

    # -- in step()

    def choose_replayed(self, ring: Ring, iteration: int) -> None:
        """After ``end_iteration``: tell the device what replays record in the iteration that begins. Does not wait.

        Args:
            ring: holds the graphs.
            iteration: the user's number of it.
        """
        if ring.graphs.graphs:
            in_turn = self._replayed.choose(
                self._turn, self._turn_of, lambda layer, every: self._has_turn(layer, every, iteration)
            )
            ring.choose_turns(in_turn.tolist())

    def _has_turn(self, layer: str | None, every: int, iteration: int) -> bool:
        """As ``skips``, of what a replay would record."""
        if layer is None:
            return iteration % every == 0
        turn = self._turn
        if (turn is not None and self._turn_of.get(layer, turn) != turn) or self._waits(layer, every):
            return False
        self._last[layer, every] = self._tick
        return True

    def left_out(self, num_rows: int) -> NDArray[np.bool_] | None:
        """Rows of the statistics matrix that rotation left out of the current tick, bool [num_rows]; None for none."""
        if self.share is None:
            return None
        out = np.zeros(num_rows, bool)
        turn, rows = self._turn, self._units_of_rows()[:num_rows]
        waits = np.zeros(len(self._units) + 1, bool)  # the last one, -1: a row that takes no turns
        if turn is not None:
            turns_of_units = self._turns_of_units()
            waits[:-1] = (turns_of_units >= 0) & (turns_of_units != turn)
        if self._num_everies > 1:
            for number, (layer, every) in enumerate(self._units):
                waits[number] |= every > 1 and self._waits(layer, every)
        out[: len(rows)] = waits[rows]
        return out

    def _units_of_rows(self) -> NDArray[np.int64]:
        """``_unit_of_row`` as an array, made again when layouts came."""
        if len(self._unit_array) != len(self._unit_of_row):
            self._unit_array = np.array(self._unit_of_row, np.int64)
        return self._unit_array

    def _turns_of_units(self) -> NDArray[np.int64]:
        """The turn of each unit, -1 for one that is in every turn; made again when the plan or the units changed."""
        plan, turns_of_units = self._unit_turns
        if plan is not self._turn_of or len(turns_of_units) != len(self._units):
            turns_of_units = np.array([self._turn_of.get(layer, -1) for layer, _ in self._units], np.int64)
            self._unit_turns = self._turn_of, turns_of_units
        return turns_of_units

    def learn(self, layouts: Sequence[RecordLayout]) -> None:
        """See the ring's layouts; those known already cost nothing."""
        costs = self.costs
        if len(layouts) != self._num_layouts:
            self._unit_array = np.empty(0, np.int64)
        for layout in layouts[self._num_layouts :]:
            key = layout.key
            module = None if (key.layer, key.tensor) in self.always else self._module(key.layer)
            load = self._always_load if module is None else self._loads.setdefault(module, _Load())
            num_bytes = costs.bytes_of(layout)
            if key not in self._sizes:
                load.num_records += 1
            load.num_bytes += num_bytes - self._sizes.get(key, 0)
            self._sizes[key] = num_bytes
            self._unit_of_row += [-1] * (layout.row + 1 - len(self._unit_of_row))
            if module is not None:
                selection = self._config.selects(key.layer, key.tensor, key.phase)
                unit = (module, 1 if selection is None else selection.every)
                self._unit_of_row[layout.row] = self._units.setdefault(unit, len(self._units))
        self._num_layouts = len(layouts)

    def on_verdict(self, firings: Iterable[Firing], recording_until: int) -> None:
        """Raise the coverage for what fired; see ``Coverage.see``."""
        if self.share is None:
            return
        told = self._coverage.see(firings, self._tick + 1, recording_until)
        if told:
            logger.warning("flightrec: %s", told)

    def begin_judging(self) -> None:
        """The iteration is over and is judged now, until ``end_iteration``."""
        if self._judging is not None:
            self._judging.begin()

    def end_iteration(self, ring: Ring | None, judging_s: float = 0.0) -> None:
        """The iteration is over and judged: choose what the next one records.

        If this raises, everything is recorded from now on.

        Args:
            ring: holds the records; None while there is none.
            judging_s: host time of the judgement.
        """
        try:
            self._end_iteration(ring, judging_s)
        except Exception:
            self.share, self._turn, self.note, self.records_all = None, None, "", True
            raise

    def _end_iteration(self, ring: Ring | None, judging_s: float) -> None:
        if self._judging is not None:
            self._judging.end()
            if self._judging.median_s is not None:
                judging_s = self._judging.median_s  # of the stream, which may be ahead of the host or behind it
        if ring is not None:
            self.costs.add_replayed(*self._replayed.load(ring.graphs.replayed))
        own_s = self.costs.end_iteration()
        if self._clock is not None:
            self._clock.tick(own_s + judging_s)
        self._tick += 1
        if ring is None:
            return
        self.learn(ring.layouts)
        if self.share is not None:
            self._next_turn()
            self.records_all = self._turn is None
        if not self._told and self._clock is not None and self._clock.step_s is not None:
            self._told = True
            logger.info("flightrec: %s", "; ".join(self.describe(ring)))
            self._warn()

    def _next_turn(self) -> None:
        self._replan()
        plan = self._plan
        if plan is None or plan.num_turns == 1 or self._coverage.everything(self._tick):
            self._turn, self.note = None, ""
            return
        self._turn_of, self._turn = plan.turn_of, self._tick % plan.num_turns
        layers = plan.of_turn(self._turn)
        names = [layer or "the model" for layer in (layers[0], layers[-1])]
        seen = names[0] if len(layers) == 1 else f"{names[0]} to {names[1]}"
        self.note = (
            f"not in turn under the budget of {100 * (self.share or 0):g}% (turn {self._turn + 1} of "
            f"{plan.num_turns}); beside the block boundaries {len(layers)} of {len(plan.layers)} layers were "
            f"recorded: {seen}"
        )

    def _replan(self) -> None:
        plan, step_s = self._plan, None if self._clock is None else self._clock.step_s
        if not self._loads:
            return
        if plan is not None and plan.measured >= (step_s is not None) and not self._is_old(plan):
            return  # but a measured plan replaces a guess at once
        layers = sorted(self._loads, key=self._order.__getitem__)
        record_bytes = self._record_bytes()
        loads = [self._loads[layer] for layer in layers]
        weights = [load.num_records * record_bytes + load.num_bytes for load in loads]
        if step_s is None or self.share is None:
            num_turns = len(layers)  # as little as possible until the budget is known
        else:
            allowance_s = self.share * step_s - self._seconds(self._always_load) - self._judging_s
            current = plan.num_turns if plan is not None and plan.measured else None
            num_turns = turns.choose(weights, [self._seconds(load) for load in loads], allowance_s, current)
        starts = turns.cut(weights, num_turns)
        turn_of = {}
        for turn, start in enumerate(starts):
            stop = starts[turn + 1] if turn + 1 < len(starts) else len(layers)
            turn_of.update(dict.fromkeys(layers[start:stop], turn))
        self._plan = _Plan(tuple(layers), tuple(starts), turn_of, self._tick, step_s is not None)

    def _is_old(self, plan: _Plan) -> bool:
        return self._tick - plan.first_tick >= max(MIN_PLAN_TICKS, plan.num_turns)

    def _record_bytes(self) -> float:
        """Bytes that take as long as a record does at least; a power of two, so that ranks agree."""
        model = self.costs.model
        ratio = model.record_s / model.byte_s if model.byte_s > 0 else math.inf
        return 2.0 ** round(math.log2(min(max(ratio, 2.0**6), 2.0**40)))

    @property
    def _judging_s(self) -> float:
        """What judging takes of an iteration; 0 while nobody knows."""
        return (None if self._judging is None else self._judging.median_s) or 0.0

    def _seconds(self, load: _Load) -> float:
        return self.costs.seconds(load.num_records, load.num_bytes)

    # -- telling

    def describe(self, ring: Ring | None = None) -> list[str]:
        """What is seen in every iteration, what rotates, what it costs; as sentences. Empty before the first step."""
        return [] if not self._num_layouts else tell(self.story(), ring)

    def story(self) -> Story:
        """The figures behind ``describe``."""
        plan, rotating = self._plan, _Load()
        for load in self._loads.values():
            rotating.num_records += load.num_records
            rotating.num_bytes += load.num_bytes
        num_turns = 1 if self.share is None or plan is None else plan.num_turns
        return Story(
            share=self.share,
            blocks=tuple(dict.fromkeys(layer for layer, _ in sorted(self.always, key=self._position))),
            always_records=self._always_load.num_records,
            always_bytes=self._always_load.num_bytes,
            always_s=self._seconds(self._always_load),
            num_layers=len(self._loads),
            rotating_records=rotating.num_records,
            rotating_bytes=rotating.num_bytes,
            rotating_s=self._seconds(rotating),
            num_turns=num_turns,
            is_measured=plan is not None and plan.measured,
            step_s=None if self._clock is None else self._clock.step_s,
            judging_s=self._judging_s,
        )

    def _position(self, boundary: tuple[str, str]) -> int:
        return self._order[boundary[0]]

    def _warn(self) -> None:
        step_s = None if self._clock is None else self._clock.step_s
        if self.share is None or step_s is None:
            return
        always_s = self._seconds(self._always_load)
        if always_s > LOUD_FACTOR * self.share * step_s:
            logger.warning(
                "flightrec: budget: what is recorded in every iteration is predicted to take %.3g ms, %.2g%% of a step "
                "of %.3g ms, more than the budget of %g%%. It is recorded all the same, since evidence goes before "
                "speed, and of the other layers one an iteration. Raise budget, or select fewer block boundaries "
                "(tensors output and gradient) or with keep: statistics.",
                1e3 * always_s,
                100 * always_s / step_s,
                1e3 * step_s,
                100 * self.share,
            )
