"""The demonstration: healthy FP8 training writes nothing; a planted fault is caught, explained, and read back.

Runs on the caller's thread and on the CPU. The recorder is used exactly as in a user's training loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flightrec.demo.model import GPT, ModelSize, OutlierChannel, Text, build_model
from flightrec.recorder import Recorder

MAX_FAULT_ITERATIONS = 16
"""The channel passes float32 after eleven; more than this means that it did not grow."""

ITERATIONS_AFTER = 3
"""Iterations behind the first non-finite loss, so that the recorder sees its ``after`` iteration and the verdict."""

CONFIG: Mapping[str, Any] = {
    "budget": "none",
    "ring": {"iterations": 3, "memory": "1 GiB"},
    "select": [
        {"layers": "blocks.*.mlp.fc2", "tensors": ["activation", "weight", "gradient"]},
        {
            "layers": "*",
            "tensors": ["activation", "weight", "gradient", "output"],
            "keep": ["statistics"],
        },
    ],
    "triggers": [
        {"name": "nan", "kind": "nonfinite"},
        {"name": "amax", "kind": "amax_spike"},
        {"name": "underflow", "kind": "underflow"},
        {"name": "loss", "kind": "loss_jump"},
        {"name": "exception", "kind": "exception"},
    ],
    "incident": {"after": 1, "cooldown": 50},
}
"""What the demo records: whole tensors around the last product of each block, statistics of all the rest."""


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        directory: where incidents go.
        num_iterations: healthy iterations before the fault.
        size: of model and batch.
        block: whose feed-forward part is spoiled.
        channel: which hidden channel.
        config: of the recorder.
        learning_rate: of AdamW.
    """

    directory: Path
    num_iterations: int = 160
    size: ModelSize = field(default_factory=ModelSize)
    block: int = 2
    channel: int = 37
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Outcome:
    """What happened.

    Attributes:
        spoiled_layer: where the fault was planted.
        losses: one an iteration.
        num_files_when_healthy: files in the directory after the healthy iterations that were not there before.
        incidents: folders that were written, oldest first.
        healthy_s: seconds of one healthy iteration, the mean without the first.
    """

    spoiled_layer: str
    losses: list[float]
    num_files_when_healthy: int
    incidents: list[Path]
    healthy_s: float


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, so that the demo leaves a core for the recorder's writer process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(options: Options, console: Console) -> Outcome:
    """Train, spoil a channel, train on until the loss is lost.

    Args:
        options: what to run.
        console: where the progress bar and a few sentences go.

    Returns:
        What happened; the recorder is closed, all files are written.

    Raises:
        FlightrecError: the recorder cannot start (an option, the directory, torchao is missing).
    """
    with one_thread():
        return _train(options, console)


def _train(options: Options, console: Console) -> Outcome:
    text = Text()
    model = build_model(len(text.characters), options.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(0)
    before = _files(options.directory)
    losses: list[float] = []
    with Recorder(options.config, directory=options.directory) as recorder:
        recorder.attach(model, optimizer=optimizer)

        def iterate() -> float:
            losses.append(_iterate(model, optimizer, recorder, text.batch(options.size, generator)))
            return losses[-1]

        with _progress(console) as progress:
            start = time.perf_counter()
            _healthy(options, iterate, progress)
            healthy_s = (time.perf_counter() - start) / options.num_iterations
            num_files = len(_files(options.directory) - before)
            console.print(f"{options.num_iterations} healthy iterations, {num_files} files written.")
            fault = OutlierChannel(model, block=options.block, channel=options.channel)
            console.print(f"Now channel {fault.channel} of what {fault.layer} reads grows from iteration to iteration.")
            _spoiled(fault, iterate, progress)
    folders = {path.parent for path in _files(options.directory) - before if path.name.endswith(".facts.h5")}
    return Outcome(
        spoiled_layer=fault.layer,
        losses=losses,
        num_files_when_healthy=num_files,
        incidents=sorted(folders, key=lambda folder: folder.stat().st_ctime_ns),
        healthy_s=healthy_s,
    )


def _iterate(model: GPT, optimizer: torch.optim.Optimizer, recorder: Recorder, batch: tuple[Any, Any]) -> float:
    """One iteration, as a user would write it: one call of the recorder is all that was added."""
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step(loss=loss)
    return float(loss.item())  # the demo wants to show it; the recorder never waits for it


def _healthy(options: Options, iterate: Callable[[], float], progress: Progress) -> None:
    task = progress.add_task("healthy", total=options.num_iterations, loss=math.nan, gain="")
    for _ in range(options.num_iterations):
        progress.update(task, advance=1, loss=iterate())


def _spoiled(fault: OutlierChannel, iterate: Callable[[], float], progress: Progress) -> None:
    task = progress.add_task("spoiled", total=MAX_FAULT_ITERATIONS, loss=math.nan, gain="")
    num_left = MAX_FAULT_ITERATIONS
    while num_left:
        gain = fault.grow()
        loss = iterate()
        num_left -= 1
        if not math.isfinite(loss):
            num_left = min(num_left, ITERATIONS_AFTER)
        progress.update(task, advance=1, loss=loss, gain=f"channel x {gain:.2g}")
    progress.update(task, total=progress.tasks[task].completed)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f} {task.fields[gain]}"),
        TimeRemainingColumn(),
        console=console,
    )


def _files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()} if directory.is_dir() else set()
