"""The recorder's sink: what sources and ``Recorder.record`` call for each tensor they see.

Owns the position within the iteration (microbatches), what is blind and what is disarmed. ``capture`` is called from
the training thread and from autograd's threads, on their current CUDA stream, and never raises. Nothing here waits for
the device.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flightrec.config.model import Config
from flightrec.config.selection import Selection
from flightrec.engine import Engine
from flightrec.records import NO_MICROBATCH, Key, Phase, Stage
from flightrec.ring.registry import MAX_CALLS, MAX_KEYS
from flightrec.sources.extract import extract
from flightrec.sources.sink import quiet
from flightrec.sources.splits import splits_on
from flightrec.sources.traversal import Observed, observe

logger = logging.getLogger("flightrec")


class Capture:
    """See the module; implements ``flightrec.sources.sink.Sink``.

    Attributes:
        engine: where records go; None until a device is known.
        iteration: the current iteration, for ``every``.
        off: nothing is recorded any more.
        num_microbatches: seen in this iteration.
        valid_rows: rows that count, by layer, in this iteration.
    """

    def __init__(self, config: Config) -> None:
        self.engine: Engine | None = None
        self.iteration = 0
        self.off = False
        self.num_microbatches = 0
        self.valid_rows: dict[str, int | torch.Tensor] = {}
        self._config = config
        self._microbatch = NO_MICROBATCH
        self._is_explicit = False
        self._dead_parts: set[str] = set()
        self._notes: dict[tuple[str, str], str] = {}

    # -- Sink --------------------------------------------------------------------------------------------------------

    @property
    def microbatch_index(self) -> int:
        """The current microbatch, ``NO_MICROBATCH`` before the first one of an iteration."""
        return self._microbatch

    def selects(self, layer: str, tensor: str, phase: Phase) -> Selection | None:
        """What of this tensor is kept, or None."""
        return self._config.selects(layer, tensor, phase)

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
        splits: torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """Keep one sighting of a tensor; see the protocol. Never raises: what fails is disarmed and told once."""
        engine = self.engine
        if self.off or engine is None:
            return
        name = f"{tensor} of {layer!r}"
        if self._dead_parts and name in self._dead_parts:
            return
        try:
            selection = self._config.selects(layer, tensor, phase)
            if selection is None or (selection.every > 1 and self.iteration % selection.every):
                return
            if engine.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self.blind(layer, tensor, "seen inside a CUDA graph capture, whose replays are not recorded")
                return
            parts = None
            if quantized is not None or columnwise is not None:
                parts, reason = extract(quantized, columnwise)
                if parts is None:
                    self.blind(layer, tensor, reason)
                    if high_precision is None:
                        return
            counts = None if splits is None else splits_on(engine.device, splits, high_precision, parts)
            layout = engine.record(
                Key(layer, tensor, part, microbatch, phase, call, stage),
                high_precision=high_precision,
                quantized=parts,
                keep=selection.keep,
                valid_rows=self.valid_rows.get(layer) if valid_rows is None else valid_rows,
                splits=counts,
            )
            if layout is None:
                what = f"{MAX_CALLS} calls in a microbatch, or {MAX_KEYS} different tensors"
                self.blind(layer, tensor, f"beyond {what} further ones are left out")
            elif counts is not None:
                if (layer, tensor) in engine.ring.without_experts:
                    why = "the number of splits is another than before, or a part `expert.<i>` was recorded beside them"
                    self.blind(layer, f"{tensor} by expert", why)
                name = ".".join(filter(None, (tensor, part, "splits")))
                self.capture(
                    layer, "metric", part=name, microbatch=microbatch, phase=phase, call=call, stage=stage,
                    high_precision=counts,
                )  # fmt: skip
        except Exception as error:
            self.disarm(name, error)

    def blind(self, layer: str, tensor: str, reason: str) -> None:
        """Note that a selected tensor is not recorded, and why; logged once, told in every incident."""
        if (layer, tensor) in self._notes:
            return
        self._notes[layer, tensor] = reason
        if self.engine is not None:
            self.engine.flusher.note_blind(layer, tensor, reason)
        logger.warning("flightrec: %s of %r is not recorded: %s", tensor or "anything", layer, reason)

    def begin_microbatch_implicit(self) -> None:
        """A training forward of the attached model begins."""
        if not self._is_explicit:
            self._set_microbatch(self._microbatch + 1)

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

    def end_iteration(self, next_iteration: int) -> None:
        """Begin the next iteration."""
        self.iteration = next_iteration
        self._microbatch = NO_MICROBATCH
        self.num_microbatches = 0
        self._is_explicit = False
        self.valid_rows.clear()

    def keep(
        self,
        layer: str,
        tensor: str,
        high_precision: torch.Tensor | None,
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
            splits=splits,
        )

    def keep_scalar(self, tensor: str, part: str, value: torch.Tensor | float, microbatch: int, stage: Stage) -> None:
        """Record a loss or a metric; a Python number becomes a tensor on the device, without synchronisation."""
        if self.off or self.engine is None:
            return
        with self.guard(f"{tensor} {part}".rstrip()), quiet():
            if not isinstance(value, torch.Tensor):
                value = torch.full((), float(value), dtype=torch.float64, device=self.engine.device)
            self.keep("", tensor, value, part=part, microbatch=microbatch, stage=stage)

    def disarm(self, part: str, error: Exception) -> None:
        """Something of ours failed: log it once, never use that part again, say so in incidents."""
        if part in self._dead_parts:
            return
        self._dead_parts.add(part)
        logger.error("flightrec: %s failed and is disarmed; training goes on: %s", part, error, exc_info=error)
        self._notes["", part] = f"failed and was disarmed: {type(error).__name__}: {error}"
        if self.engine is not None:
            self.engine.flusher.note_blind("", part, self._notes["", part])

    def _set_microbatch(self, index: int) -> None:
        self._microbatch = index
        self.num_microbatches = max(self.num_microbatches, index + 1)


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
            self._capture.disarm(self._part, error)
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
        with self._capture.guard(f"microbatch({self._index!r})"):
            self._outer = self._capture.begin_microbatch(operator.index(self._index))
            for name, value in (self._data or {}).items():
                tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
                self._capture.keep_scalar("metric", f"data.{name}", tensor, self._index, Stage.START)

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._capture.end_microbatch(self._outer)
