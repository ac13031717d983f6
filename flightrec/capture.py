"""The recorder's sink: what sources and ``Recorder.record`` call for each tensor they see.

Owns the position within the iteration (microbatches), what is blind and what is disarmed. ``capture`` is called from
the training thread and from autograd's threads, on their current CUDA stream, and never raises. Nothing here waits for
the device.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flightrec.boundary import last_word, shown
from flightrec.budget.rotation import Rotation
from flightrec.config.model import Config
from flightrec.config.selection import Keep, Selection
from flightrec.engine import Engine
from flightrec.graphed import record_captured
from flightrec.hosthooks import describe
from flightrec.records import NO_MICROBATCH, TENSORS, Key, Phase, RecordLayout, Stage
from flightrec.ring.layout import QuantizedParts
from flightrec.ring.registry import MAX_CALLS, MAX_KEYS
from flightrec.sources.extract import extract
from flightrec.sources.observe import Observed, observe
from flightrec.sources.sink import Sightings, quiet
from flightrec.sources.splits import splits_on
from flightrec.sources.warmup import is_capturing

logger = logging.getLogger("flightrec")

MAX_DEAD_PARTS = 16
"""After failures of so many parts the cause is none of them (a dead device): recording ends."""


_STAGE_OF = {
    "gradient": Stage.BACKWARD,
    "dgrad": Stage.BACKWARD,
    "wgrad": Stage.BACKWARD,
    "loss": Stage.LOSS,
    "parameter": Stage.AFTER_STEP,
    "metric": Stage.AFTER_STEP,
}
"""Where in an iteration a tensor that is recorded by hand stands; the others in the forward pass."""


class _Site:
    """What is the same at every record of one key.

    Attributes:
        name: of the part that is disarmed when such a record fails.
        key: whose.
        selection: what of it is kept; None: it is not selected.
        every: of its selection.
    """

    __slots__ = ("every", "key", "name", "selection")

    def __init__(self, key: Key, selection: Selection | None) -> None:
        self.name = _name(key.layer, key.tensor)
        self.key, self.selection = key, selection
        self.every = 1 if selection is None else selection.every


class Capture:
    """See the module; implements ``flightrec.sources.sink.Sink``.

    Attributes:
        engine: where records go; None until a device is known.
        iteration: the current iteration, for ``every``.
        off: nothing is recorded any more.
        num_microbatches: seen in this iteration.
        valid_rows: rows that count, by layer, in this iteration.
        on_first_microbatch: called when the first microbatch of an iteration begins.
        rotation: whose turn it is under a budget.
    """

    def __init__(self, config: Config) -> None:
        self.engine: Engine | None = None
        self.iteration = 0
        self.off = False
        self.num_microbatches = 0
        self.valid_rows: dict[str, int | torch.Tensor] = {}
        self.on_first_microbatch: Callable[[], None] | None = None
        self.rotation = Rotation(config)
        self._config = config
        self._has_no_every = all(entry.every == 1 for entry in config.select)
        self._microbatch = NO_MICROBATCH
        self._is_explicit = False
        self._dead_parts: set[str] = set()
        self._notes: dict[tuple[str, str], str] = {}
        self._sites: dict[tuple[str, str, str, int, Phase, int, Stage], _Site] = {}
        self.epoch: object = object()
        """Another one in each iteration, since the user may give two the same number."""

    # -- Sink --------------------------------------------------------------------------------------------------------

    @property
    def microbatch_index(self) -> int:
        """The current microbatch, ``NO_MICROBATCH`` before the first one of an iteration."""
        return self._microbatch

    def selects(self, layer: str, tensor: str, phase: Phase, stage: Stage | None = None) -> Selection | None:
        """What of this tensor is kept, or None."""
        return self._config.selects(layer, tensor, phase, stage)

    def wants(self, layer: str, tensor: str, phase: Phase, stage: Stage) -> bool:
        """Whether ``capture`` would keep a sighting that rotates in this iteration: see the protocol."""
        rotation = self.rotation
        if self.off or (self._has_no_every and rotation.records_all):
            return not self.off
        selection = self._config.selects(layer, tensor, phase, stage)
        return selection is not None and (
            not rotation.skips(layer, tensor, selection.every, self.iteration, rotates=True)
            or is_capturing()  # what is captured takes its turns in the replays
        )

    def sleeps(self, layer: str) -> bool:
        """Whether it is not this layer's turn: see the protocol."""
        return self.rotation.sleeps(layer)

    def wants_any(self, sightings: Sightings) -> bool:
        """Whether ``wants`` says yes to any of several sightings: see the protocol."""
        epoch, iteration, answer = sightings.known
        if epoch is self.epoch and iteration == self.iteration and (answer or not is_capturing()):
            return answer
        if self._has_no_every and self.rotation.records_all:
            return not self.off
        if is_capturing():  # what is captured is for replays in other iterations
            return any(self.wants(*sighting) for sighting in sightings.of)
        epoch, iteration = self.epoch, self.iteration
        answer = False
        if not all(map(self.rotation.sleeps, sightings.layers)):
            answer = any(self.wants(*sighting) for sighting in sightings.of)
        sightings.known = (epoch, iteration, answer)
        return answer

    def capture(
        self,
        layer: str,
        tensor: str,
        *,
        part: str = "",
        microbatch: int,
        phase: Phase,
        call: int,
        stage: Stage,
        high_precision: torch.Tensor | None = None,
        quantized: object | None = None,
        columnwise: object | None = None,
        valid_rows: int | torch.Tensor | None = None,
        rotates: bool = True,
        splits: torch.Tensor | Sequence[int] | None = None,
        keep: frozenset[Keep] | None = None,
    ) -> None:
        """Keep one sighting of a tensor; see the protocol. Never raises: what fails is disarmed and told once.

        Without ``rotates`` a budget does not matter: an explicit wish takes no turns. ``keep`` overrules the selection.
        """
        engine = self.engine
        if self.off or engine is None:
            return
        try:
            site = self._sites.get((layer, tensor, part, microbatch, phase, call, stage))
            if site is None:
                site = self._new_site(Key(layer, tensor, part, microbatch, phase, call, stage))
            if self._dead_parts and site.name in self._dead_parts:
                return
            selection, rotation = site.selection, self.rotation
            if selection is None:
                return
            is_in = (site.every == 1 and rotation.records_all) or not rotation.skips(
                layer, tensor, site.every, self.iteration, rotates=rotates
            )
            captured = engine.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not (is_in or captured):
                return
            costs = rotation.costs
            begun = None if captured else costs.begin()
            parts: QuantizedParts | None = None
            if columnwise is None and type(quantized) is QuantizedParts:
                parts = quantized
            elif quantized is not None or columnwise is not None:
                parts, reason = extract(quantized, columnwise)
                if parts is None:
                    self.blind(layer, tensor, reason)
                    if high_precision is None:
                        return
            if parts is not None and not parts.has_rows:
                valid_rows = None
            elif valid_rows is None:
                valid_rows = self.valid_rows.get(layer)
            if keep is None:
                keep = selection.keep
            if captured:
                turn = rotation.turn_of(layer, tensor, site.every, is_in=is_in, rotates=rotates)
                record_captured(engine, site.key, high_precision, parts, valid_rows, splits, keep, self.blind, turn)
                return
            counts = None if splits is None else splits_on(engine.device, splits, high_precision, parts)
            layout = engine.ring.record(
                site.key, high_precision=high_precision, quantized=parts, keep=keep, valid_rows=valid_rows,
                splits=counts,
            )  # fmt: skip
            costs.end(begun, layout)
            if layout is None or counts is not None:
                self._after(site.key, layout, counts, engine)
        except Exception as error:
            self.disarm(_name(layer, tensor), error)

    def _after(self, key: Key, layout: RecordLayout | None, counts: torch.Tensor | None, engine: Engine) -> None:
        """Tell that there was no place, or record the splits of what was recorded by expert."""
        layer, tensor = key.layer, key.tensor
        if layout is None:
            what = f"{MAX_CALLS} calls in a microbatch, or {MAX_KEYS} different tensors"
            self.blind(layer, tensor, f"beyond {what} further ones are left out")
        elif counts is not None:
            if (layer, tensor) in engine.ring.without_experts:
                why = "the number of splits is another than before, or a part `expert.<i>` was recorded beside them"
                self.blind(layer, f"{tensor} by expert", why)
            part = ".".join(filter(None, (tensor, key.part, "splits")))
            self.capture(
                layer, "metric", part=part, microbatch=key.microbatch, phase=key.phase, call=key.call, stage=key.stage,
                high_precision=counts,
            )  # fmt: skip

    def _new_site(self, key: Key) -> _Site:
        """Remembered, up to a number that only a key that never comes again can pass."""
        site = _Site(key, self._config.selects(key.layer, key.tensor, key.phase, key.stage))
        if len(self._sites) < MAX_KEYS:
            self._sites[key.layer, key.tensor, key.part, key.microbatch, key.phase, key.call, key.stage] = site
        return site

    def blind(self, layer: str, tensor: str, reason: str) -> None:
        """Note that a selected tensor is not recorded, and why; logged once, told in every incident."""
        if (layer, tensor) in self._notes:
            return
        self._notes[layer, tensor] = reason
        if self.engine is not None:
            self.engine.flusher.note_blind(layer, tensor, reason)
        logger.warning("flightrec: %s of %r is not recorded: %s", tensor or "anything", layer, reason)

    def is_captured(self, what: str) -> bool:
        """Whether a CUDA graph is being captured, in which ``what`` has no place: told once."""
        captured = is_capturing()
        if captured:
            self.blind("", what, f"{what} was called inside a CUDA graph's capture, whose replays call nothing")
        return captured

    def begin_microbatch_implicit(self) -> None:
        """A training forward of the attached model begins."""
        if not self._is_explicit:
            self._set_microbatch(self._microbatch + 1)

    @property
    def names_microbatches(self) -> bool:
        """Whether the user names the microbatches of this iteration."""
        return self._is_explicit

    def saw_microbatch(self, index: int) -> None:
        """A source that counts microbatches itself saw a tensor of this one."""
        if not self._is_explicit and index >= self.num_microbatches:
            self._set_microbatch(index)

    def guard(self, part: str) -> Guard:
        """Context that swallows an ``Exception`` of ours, logs it once, and counts ``part`` as disarmed."""
        return Guard(self, part)

    # -- for the recorder --------------------------------------------------------------------------------------------

    def set_engine(self, engine: Engine) -> None:
        """Records go to ``engine`` from now on; what was noted before is told to it."""
        self.engine = engine
        for (layer, tensor), reason in self._notes.items():
            engine.flusher.note_blind(layer, tensor, reason)

    def begin_microbatch(self, index: int) -> tuple[int, bool]:
        """The user names the current microbatch; returns what was there before, for ``end_microbatch``."""
        outer = (self._microbatch, self._is_explicit)
        self._is_explicit = True
        self._set_microbatch(index)
        return outer

    def end_microbatch(self, outer: tuple[int, bool]) -> None:
        """Leave a microbatch that the user named. An outer one comes back; else the loss may still follow this one."""
        microbatch, is_explicit = outer
        if is_explicit:
            self._microbatch = microbatch

    def end_iteration(self, next_iteration: int, judging_s: float = 0.0) -> None:
        """Begin the next iteration; ``judging_s`` is what judging the last one took on the host."""
        with self.guard("the budget"):
            self.rotation.end_iteration(None if self.engine is None else self.engine.ring, judging_s)
        if self.engine is not None:
            with self.guard("turns of captured CUDA graphs"):
                self.rotation.choose_replayed(self.engine.ring, next_iteration)
        self.iteration, self.epoch = next_iteration, object()
        self._microbatch = NO_MICROBATCH
        self.num_microbatches = 0
        self._is_explicit = False
        self.valid_rows.clear()

    def keep(
        self,
        layer: str,
        tensor: str,
        high_precision: object | None,
        *,
        part: str,
        microbatch: int,
        stage: Stage,
        quantized: object | None = None,
        columnwise: object | None = None,
        valid_rows: int | torch.Tensor | None = None,
        splits: torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """Record a user's tensor of any kind, or note why not."""
        if high_precision is not None and not isinstance(high_precision, torch.Tensor):
            self.blind(layer, tensor, f"expected a tensor, got {type(high_precision).__qualname__}")
            return
        observed = observe(high_precision) if high_precision is not None else Observed()
        if observed.plain is None and observed.quantized is None and quantized is None and columnwise is None:
            self.blind(layer, tensor, observed.reason or "it has no data")
            return
        self.capture(
            layer,
            tensor,
            part=part,
            microbatch=microbatch,
            phase=Phase.TRAIN,
            call=0,
            stage=stage,
            high_precision=observed.plain,
            quantized=observed.quantized if quantized is None else quantized,
            columnwise=columnwise,
            valid_rows=valid_rows,
            rotates=False,
            splits=splits,
        )

    def keep_by_hand(
        self,
        layer: str,
        tensor: str,
        high_precision: torch.Tensor | None,
        part: str,
        quantized: object | None,
        columnwise: object | None,
        valid_rows: int | torch.Tensor | None,
        splits: torch.Tensor | Sequence[int] | None,
    ) -> None:
        """Record what ``Recorder.record`` was given, if ``select`` names it."""
        if tensor not in TENSORS:
            self.blind(layer, tensor, f"expected one of {', '.join(TENSORS)} as the tensor's name")
        elif self.selects(layer, tensor, Phase.TRAIN) is not None:
            self.keep(
                layer,
                tensor,
                high_precision,
                part=part,
                microbatch=max(self._microbatch, 0),
                stage=_STAGE_OF.get(tensor, Stage.FORWARD),
                quantized=quantized,
                columnwise=columnwise,
                valid_rows=valid_rows,
                splits=splits,
            )

    def keep_scalar(self, tensor: str, part: str, value: torch.Tensor | float, microbatch: int, stage: Stage) -> None:
        """Record a loss or a metric; a Python number becomes a tensor on the device, without synchronisation."""
        if self.off or self.engine is None:
            return
        with self.guard(f"{tensor} {part}".rstrip()), quiet():
            if (
                hasattr(value, "__len__")
                and not isinstance(value, torch.Tensor)
                and self.is_captured(f"{tensor} {part}")
            ):
                return  # the copy from the host would be a part of every replay
            made = value if isinstance(value, torch.Tensor) else _as_tensor(value, self.engine.device)
            self.keep("", tensor, made, part=part, microbatch=microbatch, stage=stage)

    def disarm(self, part: str, error: Exception) -> None:
        """Something of ours failed: log it once, never use that part again, say so in incidents."""
        if part in self._dead_parts:
            return
        self._dead_parts.add(part)
        try:
            what = describe(error)
            self._notes["", part] = f"failed and was disarmed: {what}"
            if self.engine is not None:
                self.engine.flusher.note_blind("", part, self._notes["", part])
            logger.error("flightrec: %s failed and is disarmed; training goes on: %s", part, what, exc_info=error)
        except Exception:  # of a log's handler, or of the note
            last_word(part, error)
        if len(self._dead_parts) == MAX_DEAD_PARTS:
            self.off = True
            self.disarm(f"the recorder, after {MAX_DEAD_PARTS} of its parts,", error)

    def _set_microbatch(self, index: int) -> None:
        if self.num_microbatches == 0 and self.on_first_microbatch is not None:
            self.on_first_microbatch()
        self._microbatch = index
        self.num_microbatches = max(self.num_microbatches, index + 1)


def _name(layer: str, tensor: str) -> str:
    return f"{tensor} of {layer!r}"


class Guard:
    """What ``Capture.guard`` returns."""

    __slots__ = ("_capture", "_part")

    def __init__(self, capture: Capture, part: str) -> None:
        self._capture = capture
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            try:
                self._capture.disarm(self._part, error)
            except Exception:
                last_word(self._part, error)
            return True
        return False


class Microbatch:
    """What ``Recorder.microbatch`` returns."""

    def __init__(self, capture: Capture, index: int, data: Mapping[str, Any] | None) -> None:
        self._capture = capture
        self._index = index
        self._data = data
        self._outer: tuple[int, bool] | None = None

    def __enter__(self) -> None:
        with self._capture.guard(f"microbatch({shown(self._index)})"):
            index = operator.index(self._index)
            self._outer = self._capture.begin_microbatch(index)
            if self._data is not None:
                self._keep_data(index)

    def __exit__(self, *_: object) -> None:
        with self._capture.guard("the end of a microbatch"):
            if self._outer is not None:
                self._capture.end_microbatch(self._outer)

    def _keep_data(self, index: int) -> None:
        """Each value behind a guard of its own: one that cannot be kept leaves the others."""
        if not isinstance(self._data, Mapping):
            raise TypeError(f"microbatch(data=): expected a mapping, got {type(self._data).__qualname__}")
        for name, value in self._data.items():
            if value is not None:
                self._capture.keep_scalar("metric", f"data.{name}", value, index, Stage.START)


def _as_tensor(value: Any, device: torch.device) -> torch.Tensor:
    """A number, or numbers in a list or array, as a tensor on the device. No synchronisation."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"expected a tensor or numbers, got the text {shown(value)}")
    if isinstance(value, complex):
        return torch.full((), value, dtype=torch.complex128, device=device)
    if not hasattr(value, "__len__") and getattr(value, "ndim", 0) == 0:
        return torch.full((), float(value), dtype=torch.float64, device=device)
    made = torch.as_tensor(value, device="cpu")  # whatever the default device is
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
