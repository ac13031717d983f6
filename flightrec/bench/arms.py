"""The two sides of a comparison: the plain step, and the same step with a recorder.

An arm is opened for one block and closed behind it, so that a block without a recorder has none in the process: no hook
on the model, no patched function, no writer, no memory. A recorder that is paused, or that watches a second model,
would leave its process-wide parts in both. The price is a recorder's start before each block with one, which is not
timed, and warm-up steps that bring its budget to rest. Staging memory is kept small, since page-locking it anew for
each block takes seconds: only incidents use it, and a measurement has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from flightrec.bench.timing import Step
from flightrec.bench.workload import Workload
from flightrec.budget.cost import source_bytes
from flightrec.config.model import Config
from flightrec.errors import AttachError
from flightrec.recorder import Recorder
from flightrec.records import RecordLayout


@dataclass(frozen=True, slots=True)
class Sizes:
    """One iteration's records.

    Attributes:
        num_records: how many.
        copied: bytes of each component that was kept.
        read: bytes of each tensor of which statistics alone were kept.
    """

    num_records: int
    copied: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What a recorder knows after a block.

    Attributes:
        iterations: the latest ones.
        predicted_s: what it says that an iteration costs.
        lines: its own sentences.
    """

    iterations: tuple[Sizes, ...]
    predicted_s: float
    lines: tuple[str, ...]


class Running(Protocol):
    """An open arm."""

    @property
    def directory(self) -> Path | None:
        """In which it writes, if it does."""

    def step(self) -> object:
        """One iteration."""

    def told(self, num_iterations: int) -> Told | None:
        """What is known of the latest iterations, if it is a recorder of ours."""


class Arm(Protocol):
    """One side of a comparison."""

    @property
    def name(self) -> str:
        """For the table."""

    def open(self) -> AbstractContextManager[Running]:
        """Get ready; leaving the context leaves nothing behind."""


@dataclass(frozen=True, slots=True)
class Bare:
    """An open arm that only steps; see ``Running``."""

    step: Step
    directory: Path | None = None

    def told(self, num_iterations: int) -> None:  # noqa: ARG002
        """Nothing."""
        return


@dataclass(frozen=True, slots=True)
class Plain:
    """The workload by itself."""

    workload: Workload
    name: str = "no recorder"

    @contextmanager
    def open(self) -> Iterator[Bare]:
        """Nothing to do."""
        yield Bare(self.workload.step)


STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WithRecorder:
    """The workload with a recorder attached; incidents go to a temporary folder."""

    workload: Workload
    config: Config
    name: str

    @contextmanager
    def open(self) -> Iterator[RecordedRun]:
        """Start a recorder and attach it.

        Raises:
            FlightrecError: it refuses.
        """
        with (
            tempfile.TemporaryDirectory(prefix="flightrec-bench-") as folder,
            Recorder(_with_little_staging(self.config), directory=folder) as recorder,
        ):
            recorder.attach(self.workload.model)
            yield RecordedRun(self.workload.step, recorder, Path(folder))


def _with_little_staging(config: Config) -> Config:
    incident = config.incident.model_copy(update={"staging_memory": STAGING_BYTES})
    return config.model_copy(update={"incident": incident})


class RecordedRun:
    """An open arm with a recorder; see ``Running``."""

    def __init__(self, step: Step, recorder: Recorder, directory: Path) -> None:
        self.directory = directory
        self._step = step
        self._recorder = recorder

    def step(self) -> None:
        """One iteration; its loss is recorded if the step gives one."""
        loss = self._step()
        self._recorder.step(loss=loss if isinstance(loss, torch.Tensor) else None)

    def told(self, num_iterations: int) -> Told:
        """What was recorded, and what the recorder says of it.

        Raises:
            AttachError: it has switched itself off, so that nothing was measured.
        """
        recorder = self._recorder
        engine = recorder._capture.engine
        if engine is None or recorder._capture.off:
            raise AttachError("the recorder switched itself off while it was measured; the log says why")
        ring, last = engine.ring, recorder._tick - 1
        iterations = tuple(
            _sizes([ring.layouts[number] for number in ring.index(tick).layout_ids])
            for tick in range(max(0, last - num_iterations + 1), last + 1)
        )
        rotation = recorder._capture.rotation
        return Told(iterations, rotation.story().predicted_s, tuple(rotation.describe(ring)))


def _sizes(layouts: list[RecordLayout]) -> Sizes:
    copied, read = [], []
    for layout in layouts:
        if layout.components:
            copied += [component.num_bytes for component in layout.components]
        else:
            read.append(source_bytes(layout))
    return Sizes(len(layouts), tuple(copied), tuple(read))
