"""``Recorder``: the public face of the online half.

The constructor and ``attach`` may refuse; afterwards nothing of ours raises into the training loop: an error is logged
once, the failing part is disarmed, and the incident says so. Belongs to the training thread. Nothing waits for the
device except ``state_dict``, an exception's flush and ``close``.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flightrec.attachment import Attachment
from flightrec.boundary import shown
from flightrec.capture import Capture, Microbatch
from flightrec.config.load import load, packaged
from flightrec.config.model import Config
from flightrec.engine import Engine
from flightrec.errors import AttachError, RingMemoryError
from flightrec.flush.history import TickInfo
from flightrec.hosthooks import describe, listen, stack_of, stop_listening
from flightrec.hostroom import host_memory
from flightrec.hostrules import HostRules
from flightrec.identity import environment, identify
from flightrec.lifetimes import follow
from flightrec.records import NO_MICROBATCH, Firing, Stage
from flightrec.runfacts import RunFacts
from flightrec.sources.extract import device_of
from flightrec.sources.sink import quiet
from flightrec.startup import check_writable, default_staging_bytes, history_memory
from flightrec.writer.client import WriterClient

logger = logging.getLogger("flightrec")

DRAIN_TIMEOUT_S = 120.0
"""How long the end of a run waits for evidence to reach the disk; the writer process goes on by itself after that."""


RESCUE_TIMEOUT_S = 10.0
"""How long ``close`` waits for what the writer was handed, if handing over the rest failed."""


class Recorder:
    """Keeps the last iterations of selected tensors on the device and writes them to disk when a rule fires.

    Args:
        config: path of a YAML file, a mapping, or a ``flightrec.Config``; the packaged ``default.yaml`` if None.
        directory: where incidents go; made with the first incident.
        run_id: names the run; from the launcher's environment, or drawn, if None.
        iteration: number of the first iteration, for a run that resumes.

    Raises:
        ConfigError: the configuration cannot be used; the message has file, line and key.
        AttachError: the directory cannot be written.
        WriterError: the writer process could not be started, or ``ring.host_memory`` asks for more than there is.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        *,
        directory: str | os.PathLike[str] = "incidents",
        run_id: str | None = None,
        iteration: int = 0,
    ) -> None:
        self._config = load(packaged("default.yaml") if config is None else config)
        self._directory = Path(directory).absolute()
        check_writable(self._directory)
        self._identity = identify(run_id)
        self._attempt = self._identity.attempt
        self._highest_iteration = iteration - 1
        self._tick = 0
        self._capture = Capture(self._config)
        self._capture.iteration = iteration
        self._facts = RunFacts(self._capture.guard)
        self._capture.on_first_microbatch = self._facts.first_forward
        self._attachment: Attachment | None = None
        self._host_rules = HostRules(self._config.triggers)
        self._loaded: Mapping[str, Any] | None = None  # until there is an engine that takes it
        self._has_loaded = False
        self._environment: Mapping[str, Any] = {}
        self._closed = False
        self._history = history_memory(self._config.history)
        self._host = host_memory(self._config.ring.host_memory, self._config.incident.older_iterations)
        self._client = self._start_writer()
        listen(self)
        follow(self)

    # -- attaching ---------------------------------------------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scaler: object | None = None,
        scheduler: object | None = None,
    ) -> None:
        """Watch a model; chooses the sources that its modules call for.

        Args:
            model: any module; its qualified module names are the layers.
            optimizer: one or several; their settings (learning rates, betas, ...) go into incidents, as each step used
                them. Needed for gradients at stages ``reduced`` and ``clipped``.
            scaler: a ``GradScaler``; the steps that it skips are no fault, its scale and skips become metrics.
            scheduler: its position goes into incidents.

        Raises:
            AttachError: attached before or closed, no parameters on one real device, or nothing of it is selected.
        """
        if self._attachment is not None or self._closed:
            raise AttachError(
                "attach: this Recorder is closed or watches a model already; expected one model. "
                "Make one module that holds all models, or a Recorder for each."
            )
        attachment = Attachment(model, self._capture, optimizer, scaler)
        if attachment.watches_scaler and all(rule.kind != "loss_scale_collapse" for rule in self._config.triggers):
            logger.warning(
                "flightrec: steps that the scaler skips are no fault, and no rule loss_scale_collapse tells when it "
                "skips all of them for ever; add {kind: loss_scale_collapse} to triggers"
            )
        self._capture.rotation.watch(model)
        device, engine = attachment.device, self._capture.engine
        if engine is not None and engine.device != device:
            raise AttachError(f"attach: the model is on {device}, but tensors were recorded on {engine.device} before")
        self._make_engine(device, model)
        try:
            attachment.attach()
        except Exception:
            attachment.detach()  # of whatever was hooked before one refused
            raise
        self._attachment = attachment
        self._facts.watch(device, attachment.optimizers, scheduler)
        logger.info(
            "flightrec: recording %s on %s, %d iterations, budget %s; incidents go to %s",
            attachment.describe(),
            device,
            self._config.ring.iterations,
            self._config.budget,
            self._directory,
        )

    # -- the training loop -------------------------------------------------------------------------------------------

    def microbatch(self, index: int, data: Mapping[str, Any] | None = None) -> Microbatch:
        """Context of one microbatch, for loops that accumulate gradients.

        Without it, each training forward of the attached model counts as one.

        Args:
            index: 0, 1, ... within the iteration.
            data: tensors (or lists of numbers) of any dtype to keep with it, such as ``{"sample_ids": ids}``.
        """
        return Microbatch(self._capture, index, data)

    def loss(self, loss: torch.Tensor | float) -> None:
        """Record the current microbatch's loss, before anything filters it. No synchronisation.

        Args:
            loss: any shape, usually 0-dim; stays the caller's.
        """
        with self._capture.guard("loss()"):
            if self._have_engine(loss):
                self._capture.keep_scalar("loss", "", loss, max(self._capture.microbatch_index, 0), Stage.LOSS)

    def record(
        self,
        layer: str,
        tensor: str,
        *,
        part: str = "",
        high_precision: torch.Tensor | None = None,
        quantized: object | None = None,
        columnwise: object | None = None,
        valid_rows: int | torch.Tensor | None = None,
        splits: torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """Record a tensor of one's own, if ``select`` names it. No synchronisation.

        Args:
            layer: any name.
            tensor: one of ``flightrec.records.TENSORS``.
            part: tells several apart.
            high_precision: any strides; copied during the call.
            quantized: any known quantized class, or ``flightrec.Quantized``.
            columnwise: the same values quantized for the other direction of the product.
            valid_rows: rows of dimension 0 that count; the rest is padding. Overrules ``valid_rows()``.
            splits: rows of each expert of a grouped product, one expert after the other: a list, or an integer tensor
                on the same device (no synchronisation). Each gets statistics of its own, as part ``expert.<i>``; rows
                beyond their sum are padding. They are kept too, as ``metric`` of this layer.
        """
        capture = self._capture
        with capture.guard(f"record({shown(layer)}, {shown(tensor)})"), quiet():
            if not self._have_engine(high_precision, quantized, columnwise):
                return
            capture.keep_by_hand(
                str(layer), str(tensor), high_precision, part, quantized, columnwise, valid_rows, splits
            )

    def valid_rows(self, layer: str, num_rows: int | torch.Tensor) -> None:
        """Say how many rows of dimension 0 of this layer's tensors count, until the end of the iteration.

        Args:
            layer: qualified name.
            num_rows: a number, or a 0-dim integer tensor on the model's device (no synchronisation).
        """
        with self._capture.guard(f"valid_rows({shown(layer)})"):
            if not isinstance(num_rows, torch.Tensor):
                num_rows = operator.index(num_rows)
            elif num_rows.numel() != 1 or num_rows.is_floating_point() or num_rows.is_complex():
                raise TypeError(f"valid_rows: expected one integer, got {num_rows.dtype} {tuple(num_rows.shape)}")
            self._capture.valid_rows[layer] = num_rows

    def trigger(self, reason: str) -> None:
        """Write an incident for the current iteration, once ``step`` ends it."""
        with self._capture.guard("trigger()"):
            self._host_rules.add_reason(reason if isinstance(reason, str) else shown(reason))

    def step(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        metrics: Mapping[str, torch.Tensor | float] | None = None,
    ) -> None:
        """End the iteration: judge it, on the device, and begin the next one. Call it after ``optimizer.step()``.

        Args:
            loss: the iteration's loss; without it the mean of the microbatches' losses counts.
            metrics: named values, such as ``{"grad_norm": norm}``; tensors stay on the device.

        Raises:
            RingMemoryError: in the first iteration only, if ``ring.on_out_of_memory`` is ``error``.
        """
        if self._capture.off or self._capture.is_captured("step()"):
            return
        try:
            self._step(loss, metrics)
        except RingMemoryError:
            self._switch_off("the selection does not fit into ring.memory")
            raise
        except Exception as error:
            self._capture.disarm("the recorder", error)
            self._switch_off("step() failed")

    @property
    def iteration(self) -> int:
        """Number of the current iteration. Setting it to one that was recorded before begins a new attempt."""
        return self._capture.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        with self._capture.guard("iteration"):
            value = operator.index(value)
            if value <= self._highest_iteration:
                self._attempt += 1
                self._highest_iteration = value - 1
            self._capture.iteration = value

    @property
    def attempt(self) -> int:
        """Restarts and rewinds so far."""
        return self._attempt

    @property
    def run_id(self) -> str:
        """The run's name, as it stands in every incident."""
        return self._identity.run_id

    def summary(self) -> str:
        """What the ring holds, and what is recorded when at which cost, as text; empty before the first ``step``."""
        with self._capture.guard("summary()"):
            engine = self._capture.engine
            if engine is not None and engine.ring.committed:
                tier = [] if engine.tier is None else [engine.tier.summary()]
                return "\n".join([engine.ring.summary(), *tier, *self._capture.rotation.describe()])
        return ""

    # -- state and end -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Rules' windows, limits, history and position, for a checkpoint. Synchronises."""
        state: dict[str, Any] = {"version": 1, "iteration": self.iteration, "attempt": self._attempt}
        with self._capture.guard("state_dict"):
            if self._capture.engine is not None and not self._capture.off:
                state["engine"] = self._capture.engine.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, as a new attempt. Call it before or after ``attach``. Synchronises.

        May be called again, as by a loop that goes back to its checkpoint at a fault: no attempt's number comes twice.
        """
        with self._capture.guard("load_state_dict"):
            attempt, iteration, loaded = int(state["attempt"]), int(state["iteration"]), state.get("engine")
            own = self._attempt + (1 if self._tick > 0 or self._has_loaded else 0)
            self._attempt = max(own, attempt + 1)  # from here on all of it is usable
            self._has_loaded = True
            self._capture.iteration = iteration
            self._highest_iteration = iteration - 1
            if self._capture.engine is None:
                self._loaded = loaded
            elif loaded is not None:
                self._capture.engine.load_state_dict(loaded)

    def close(self) -> None:
        """Write what is pending, stop the writer, remove every hook. Idempotent; waits for the writer.

        Records of an iteration that no ``step`` ended are judged too: a loop that stops at a NaN leaves its incident.
        """
        if self._closed:
            return
        self._closed = True
        capture, engine = self._capture, self._capture.engine
        with capture.guard("close"):
            stop_listening(self)
        with capture.guard("close"):
            if engine is None:
                self._client.close(DRAIN_TIMEOUT_S)
                if self._host_rules.has_reasons:
                    logger.warning("flightrec: nothing was recorded, so that trigger() wrote no incident")
            else:
                self._keep_scalars_of_attachment()
                info = None if capture.off else self._info(partial=True)
                capture.off = True
                if not engine.close(info, self._host_firings() if info else (), DRAIN_TIMEOUT_S):
                    logger.error("flightrec: not all evidence was written in %.0f s", DRAIN_TIMEOUT_S)
        with capture.guard("close"):
            self._client.close(RESCUE_TIMEOUT_S)  # stopped already, unless something above failed
        capture.off = True
        with capture.guard("the end of recording"):
            self._history.close()
            if self._host is not None:
                self._host.close()
            self._detach_all("close() was called")
        capture.engine = None  # the ring's memory is free, whoever still holds the recorder

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.on_uncaught(error)
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _step(self, loss: torch.Tensor | float | None, metrics: Mapping[str, torch.Tensor | float] | None) -> None:
        capture = self._capture
        if self._attachment is not None:
            self._attachment.after_step()
        with capture.guard("step(loss=)"):
            if loss is not None and self._have_engine(loss):
                capture.keep_scalar("loss", "", loss, NO_MICROBATCH, Stage.LOSS)
        with capture.guard("step(metrics=)"):
            for name, value in () if metrics is None else metrics.items():
                if value is not None and self._have_engine(value):
                    capture.keep_scalar("metric", str(name), value, NO_MICROBATCH, Stage.AFTER_STEP)
        self._keep_scalars_of_attachment(() if metrics is None else metrics)
        with capture.guard("the budget"):
            capture.rotation.begin_judging()
        began_s = time.perf_counter()
        if capture.engine is not None:
            capture.engine.step(self._info(), self._host_firings())
        judging_s = time.perf_counter() - began_s
        self._tick += 1
        self._highest_iteration = max(self._highest_iteration, capture.iteration)
        capture.end_iteration(capture.iteration + 1, judging_s)
        self._facts.begin()

    def _keep_scalars_of_attachment(self, given: Mapping[str, object] | tuple[()] = ()) -> None:
        """Record what the scaler did in this iteration, less what the user gave under the same name."""
        if self._attachment is None:
            return
        with self._capture.guard("metrics of the scaler"):
            for name, value in self._attachment.scalars().items():
                if name not in given:
                    self._capture.keep_scalar("metric", name, value, NO_MICROBATCH, Stage.AFTER_STEP)

    def _info(self, *, partial: bool = False) -> TickInfo:
        facts, states = self._facts.end()
        info = TickInfo(self._tick, self._attempt, self.iteration, max(self._capture.num_microbatches, 1), partial)
        info.facts, info.random_states = facts, states
        return info

    def _host_firings(self) -> list[Firing]:
        return self._host_rules.take(self._attempt, self.iteration)

    def on_uncaught(self, error: BaseException) -> None:
        """Flush what the ring holds for an exception that ends the training loop; once. Waits, never raises."""
        engine = self._capture.engine
        was_off = self._capture.off  # a dead device may have shown in our own step() before it showed in the loop
        if engine is None or not engine.can_tell(was_off) or not isinstance(error, Exception):
            return  # KeyboardInterrupt, SystemExit: a normal end
        with self._capture.guard("the flush after an exception"):
            message = f"training raised {describe(error)}"
            firing = self._host_rules.firing("exception", message, self._attempt, self.iteration)
            if firing is None:
                return
            self._keep_scalars_of_attachment()
            facts = {**self._environment, "exception": type(error).__qualname__, "stack": stack_of(error)}
            engine.flusher.send_config(self._config.text, facts)
            firings = [*self._host_firings(), firing]
            if not engine.fault(self._info(partial=True), firings, DRAIN_TIMEOUT_S, readable=not was_off):
                logger.error("flightrec: not all evidence could be written for %s", type(error).__name__)
            self._tick += 1
        self._switch_off("training raised")

    def on_thread_uncaught(self, error: BaseException) -> None:
        """Note that another thread ended with an exception: the next ``step`` writes an incident. Any thread."""
        if not self._capture.off and isinstance(error, Exception):
            self._host_rules.add_error(error)

    def _have_engine(self, *values: object) -> bool:
        """Whether tensors can be taken; in a run without ``attach`` the first one tells the device."""
        if self._capture.off:
            return False
        if self._capture.engine is not None:
            return True
        if self._capture.is_captured("the first record"):
            return False
        with self._capture.guard("start"):
            for value in values:
                device = device_of(value)
                if device is not None and device.type != "meta":
                    self._make_engine(device)
                    return True
        return False

    def sink_on(self, device: torch.device) -> Capture | None:
        """Where a source without a model puts what it sees, on the device of its first tensor; None after the end."""
        if not self._capture.off:
            self._make_engine(device)
        return None if self._capture.off else self._capture

    def _make_engine(self, device: torch.device, model: torch.nn.Module | None = None) -> None:
        if self._capture.engine is not None:
            return
        engine = Engine(
            device,
            self._config,
            self._client,
            self._start_writer,
            first_tick=self._tick,
            on_failure=self._rule_failed,
            rotation=self._capture.rotation,
            on_trouble=self._capture.disarm,
        )
        self._capture.rotation.measure(device)
        self._environment = environment(device, model)
        engine.flusher.send_config(self._config.text, self._environment)
        self._facts.watch(device, (), None)
        if self._loaded is not None:
            engine.load_state_dict(self._loaded)
            self._loaded = None
        self._capture.set_engine(engine)

    def _rule_failed(self, name: str, error: Exception) -> None:
        self._capture.disarm(f"rule {name}", error)

    def _start_writer(self) -> WriterClient:
        incident = self._config.incident
        return WriterClient.start(
            self._directory,
            self._identity.to_json(),
            staging_bytes=incident.staging_memory or default_staging_bytes(),
            mode=incident.writer,
            disk_quota_bytes=incident.disk_quota,
            history=self._history,
            host=self._host,
        )

    def _switch_off(self, why: str) -> None:
        if not self._capture.off:
            self._capture.off = True
            with self._capture.guard("the end of recording"):
                self._detach_all(why)

    def _detach_all(self, why: str) -> None:
        if self._attachment is not None:
            self._attachment.detach()
            logger.info("flightrec: recording has ended: %s", why)
        self._attachment = None
        self._facts.stop()

    def forget_in_child(self) -> None:
        """After ``os.fork``: the child (a data loader's worker) records nothing and closes nothing. Never raises."""
        self._capture.off = True
        self._closed = True
