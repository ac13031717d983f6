"""What stands behind the nvdlfw_inspect feature: one recorder for one ``initialize`` ... ``end_debug``.

The feature's file is executed afresh by each ``initialize``, outside ``sys.modules``; the state is here. Called on the
training thread and on autograd's threads, on their current CUDA stream; a lock keeps iterations in order. Nothing
raises into Transformer Engine: what fails is told once and disarmed, and layers leave debug mode. Never synchronises,
but at the first tensor (the recorder starts) and at the end. Grows with neither iterations nor nvdlfw_inspect's caches.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flightrec.boundary import contained
from flightrec.capture import Capture
from flightrec.config.inspection import FEATURE, NAMESPACE, InspectPlan, plan_of, read_inspect
from flightrec.config.inspection_section import TensorPlan
from flightrec.errors import AttachError, ConfigError, FlightrecError
from flightrec.inspection.operands import Operands, sort_operands
from flightrec.inspection.quantizers import Recipes, with_state
from flightrec.inspection.sighting import Counter, Moment, moment
from flightrec.recorder import Recorder
from flightrec.records import Phase
from flightrec.sources.sink import quiet

_log = logging.getLogger("flightrec")

NEVER: tuple[bool, int | None] = (False, None)
"""Answer of ``enabled`` that lets a layer leave debug mode for good."""

_UNDER_GRAPHS = (
    "a CUDA graph is being captured: its replays would call no feature, and debug mode does not work under graphs. "
    "Nothing is recorded any more; use flightrec.Recorder.attach(model), which taps Transformer Engine's products "
    "outside debug mode"
)


class Session:
    """One life of the feature.

    Attributes:
        recorder: None until the first tensor, or until the user asked for it.
        refused: why nothing is recorded; empty while all is well.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.refused = ""
        self._lock = threading.RLock()
        self._plan: InspectPlan | None = None
        self._tensors: dict[int, tuple[Mapping[str, Any], Mapping[str, TensorPlan]]] = {}
        self._sink: Capture | None = None
        self._counter = Counter()
        self._recipes = Recipes()
        self._iteration = 0  # nvdlfw_inspect's count, of the iteration that the recorder is in
        self._latest: int | None = None  # its count now
        self._begun_at = 0  # the recorder's own count when that iteration began

    # -- the feature's calls, any thread

    def parse(self, raw: object, tensor: object) -> TensorPlan | None:
        """What a section asks for of a tensor; None for nothing.

        Args:
            raw: the ``FlightRecorder`` mapping of the layer's section, always the same object for a section.
            tensor: name of the tensor.
        """
        if not isinstance(raw, Mapping):
            return None
        known = self._tensors.get(id(raw))  # also once refused: Transformer Engine's default, asked instead, may raise
        if known is None:
            if self.refused:
                return None
            try:
                known = (raw, self._tensors_of(raw))
            except Exception as error:
                self.refuse(error)
                return None
            self._tensors[id(raw)] = known  # which holds the mapping, so that its id stays its own
        return known[1].get(str(tensor))

    def enabled(self, plan: TensorPlan, iteration: int) -> tuple[bool, int | None]:
        """Whether a tensor is to be shown in this iteration, and in which one next."""
        if self.refused:
            return NEVER
        self._see(iteration)
        if is_capturing():
            self.refuse(_UNDER_GRAPHS)
        if self.refused or (self._sink is not None and self._sink.off):
            return NEVER
        return plan.turn(iteration)

    def inspect(self, plan: TensorPlan, layer: str, iteration: int, tensor: object, quantized: Quantizations) -> None:
        """Record one sighting during the call.

        Args:
            plan: of this tensor.
            layer: name of the layer.
            iteration: nvdlfw_inspect's count.
            tensor: in high precision, or None.
            quantized: what the two products read, row-wise and column-wise, and who quantized.
        """
        if self.refused:
            return
        self._see(iteration)
        if not plan.turn(iteration)[0]:
            return  # another feature is on: then all are called
        if is_capturing():
            self.refuse(_UNDER_GRAPHS)
            return
        seen = moment(plan.tensor, tuple(getattr(tensor, "shape", ())))  # before quiet(), which switches gradients off
        if seen.phase not in plan.phases:
            return
        with quiet():
            operands = sort_operands(tensor, quantized.rowwise, quantized.columnwise)
            sink = self._sink_for(operands)
            if sink is not None:
                self._record(sink, plan, layer, seen, operands, quantized.quantizer)

    def _record(
        self, sink: Capture, plan: TensorPlan, layer: str, seen: Moment, operands: Operands, quantizer: object
    ) -> None:
        if not operands.records:
            sink.blind(layer, plan.tensor, operands.reason or "no data were shown")
            return
        recipe = self._recipes.of(layer, is_forward=seen.node is None)
        fresh = operands.at_quantizing
        named = sink.microbatch_index if sink.names_microbatches else None
        for record in operands.records:
            if record.part and "quantized" not in plan.keep:
                continue
            part = ".".join(filter(None, ("fc2" if seen.fc2 else "", record.part)))
            microbatch, call = self._counter.place(layer, plan.tensor, part, seen, named)
            if seen.phase is Phase.TRAIN:
                sink.saw_microbatch(microbatch)
            sink.capture(
                layer,
                plan.tensor,
                part=part,
                microbatch=microbatch,
                phase=seen.phase,
                call=call,
                stage=seen.stage,
                high_precision=record.high_precision,
                quantized=with_state(record.quantized, quantizer, recipe, at_quantizing=fresh),
                columnwise=with_state(record.columnwise, quantizer, recipe, at_quantizing=fresh),
                rotates=False,
                keep=plan.keep,
            )

    # -- nvdlfw_inspect's own steps, training thread

    def on_step(self) -> None:
        """``nvdlfw_inspect.api.step()`` was called: the count goes on.

        The recorder's iteration ends with the first thing that happens in the next one, so that a ``step(loss=...)`` of
        the user counts for this one, whether it stands before or after that call.
        """
        with self._lock:
            if self._latest is None:
                return
            self._settle()
            self._latest = int(getattr(_manager(), "_trainer_iteration_count", self._latest + 1))

    def close(self) -> None:
        """The feature's life ends: judge what was recorded, write what is pending. Waits for the writer."""
        with self._lock:
            if self.recorder is not None:
                with contained("ending the last iteration"):
                    self._settle()
                self.recorder.close()
                self._sink = None
            self.refused = self.refused or "nvdlfw_inspect was closed"

    # -- iterations

    def _see(self, iteration: int) -> None:
        if iteration == self._latest == self._iteration:
            return
        with self._lock:
            self._latest = iteration
            self._settle()

    def _settle(self) -> None:
        """Follow the count: end the recorder's iteration if the count has left it, unless the user did."""
        now, recorder = self._latest, self.recorder
        if now is None or now == self._iteration:
            return
        if recorder is not None:
            if recorder.iteration == self._begun_at:
                recorder.step()
            if now < self._iteration or now > recorder.iteration:
                recorder.iteration = now
            self._begun_at = recorder.iteration
        self._counter.begin()
        self._iteration = now

    # -- the recorder

    def start(self) -> Recorder:
        """The recorder, made if there is none yet.

        Raises:
            FlightrecError: the configuration cannot be used, or the recorder cannot start here.
        """
        with self._lock:
            if self.recorder is None:
                if self.refused:
                    raise ConfigError(self.refused)
                manager = _manager()
                plan = self._make_plan()
                if self._latest is None:
                    self._latest = int(getattr(manager, "_trainer_iteration_count", 0))
                self._iteration = self._begun_at = self._latest
                directory = Path(_log_folder(), plan.directory)
                self.recorder = Recorder(plan.config, directory=directory, iteration=self._latest)
            return self.recorder

    def _sink_for(self, operands: Operands) -> Capture | None:
        if self._sink is None and operands.device is not None:
            with self._lock:
                self._sink = self.start().sink_on(operands.device)
        return self._sink

    def refuse(self, reason: str | Exception) -> None:
        """Record nothing from now on, and say so once. Layers leave debug mode when they ask next."""
        with self._lock:
            if self.refused:
                return
            told = reason if isinstance(reason, str) else str(reason)
            self.refused = told if isinstance(reason, (str, FlightrecError)) else f"{type(reason).__name__}: {told}"
            error = None if isinstance(reason, (str, FlightrecError)) else reason
            _log.error("flightrec: the feature %s is off; training goes on. %s", FEATURE, self.refused, exc_info=error)
            if self._sink is not None:
                self._sink.blind(FEATURE, "", self.refused)

    def fail(self, error: Exception, layer: object, tensor: object) -> None:
        """One tensor could not be recorded: it no longer is; without a recorder nothing is."""
        if self._sink is None:
            self.refuse(error)
        else:
            self._sink.disarm(f"{tensor} of {layer!r}", error)

    # -- the configuration

    def _tensors_of(self, raw: Mapping[str, Any]) -> Mapping[str, TensorPlan]:
        for section in self._make_plan().sections:
            if section.raw is raw or section.raw == raw:
                return section.tensors
        raise ConfigError("a section of the configuration has changed since nvdlfw_inspect read it")

    def _make_plan(self) -> InspectPlan:
        with self._lock:
            if self._plan is None:
                self._plan = live_plan()
            return self._plan


class Quantizations(NamedTuple):
    """What the feature is shown beside the tensor itself."""

    rowwise: object = None
    columnwise: object = None
    quantizer: object = None


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, or Transformer Engine is about to (its warm-up). Never synchronises."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    is_graph_capturing = getattr(graph, "is_graph_capturing", None)
    return is_graph_capturing is not None and bool(is_graph_capturing())


def live_plan() -> InspectPlan:
    """The plan of what nvdlfw_inspect has loaded, with the file's names and lines where the file can still be read.

    Raises:
        ConfigError: it cannot be used.
    """
    configs = importlib.import_module("nvdlfw_inspect.config_manager").ConfigManager.configs
    loaded = [{**vars(config)["extension_config"]} for config in configs]
    names, document, origin, folder = _names(len(loaded))
    data = {
        name: {
            "enabled": True,
            "layers": {"exact_layer_names": []},
            **({NAMESPACE: entry[NAMESPACE]} if NAMESPACE in entry else {}),
        }
        for name, entry in zip(names, loaded, strict=True)
    }
    return plan_of(data, document=document, origin=origin, folder=folder)


def _names(num_sections: int) -> tuple[list[str], Any, str, Path | None]:
    """Names of the enabled sections, where their keys stand, what to call the file, and its folder."""
    source, document, origin, folder = _manager().config_file, None, "nvdlfw_inspect configuration", None
    data: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    if not isinstance(source, Mapping):
        folder, origin = Path(source).parent, str(source)
        try:
            data, document = read_inspect(Path(source))
        except ConfigError:
            document = None  # gone since it was read
    names = [str(name) for name, section in data.items() if isinstance(section, Mapping) and section.get("enabled")]
    if len(names) != num_sections:
        return [f"section {number}" for number in range(num_sections)], None, origin, folder
    return names, document, origin, folder


def _manager() -> Any:
    """nvdlfw_inspect's running manager.

    Raises:
        AttachError: there is none.
    """
    api = sys.modules.get("nvdlfw_inspect.api")
    manager = None if api is None else vars(api).get("DEBUG_MANAGER")
    if manager is None:
        raise AttachError(
            "nvdlfw_inspect is not initialized; call nvdlfw_inspect.api.initialize(config_file=..., "
            "feature_dirs=[<Transformer Engine's features>, flightrec.feature_directory()]) first"
        )
    return manager


def _log_folder() -> str:
    return str(importlib.import_module("nvdlfw_inspect.logging").get_logger().root_log_dir)


_current: Session | None = None


def begin() -> Session:
    """A new session, the current one from now on; the one before is closed."""
    global _current
    previous, _current = _current, Session()
    if previous is not None:
        with contained("closing the recorder of the nvdlfw_inspect session before"):
            previous.close()
    return _current


def inspect_recorder() -> Recorder:
    """The recorder behind the feature ``FlightRecorder``, to tell it what nvdlfw_inspect does not know.

    ``inspect_recorder().step(loss=loss)`` once an iteration, before or after ``nvdlfw_inspect.api.step()``, lets rules
    about the loss and metrics work; ``microbatch(i)`` names microbatches. It is the same object until the next
    ``initialize``, and after ``end_debug`` it records nothing. Call it once before training: a configuration that
    cannot work is refused there.

    Raises:
        ConfigError: the configuration cannot be used; the message has file, line, section and key.
        AttachError: nvdlfw_inspect was not initialized with flightrec's feature directory, or incidents cannot be
            written.
        WriterError: the writer process could not be started.
    """
    if _current is None:
        _manager()
        raise AttachError(
            "nvdlfw_inspect was initialized without flightrec's features; add flightrec.feature_directory() to "
            "feature_dirs"
        )
    return _current.start()
