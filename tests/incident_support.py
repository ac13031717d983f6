"""Builds small incidents straight from the storage layer: no torch, no recorder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flightrec.records import (
    NUM_STATISTICS,
    Component,
    Firing,
    Key,
    RecordLayout,
    Representation,
    Severity,
    Stage,
    Statistic,
)
from flightrec.storage.facts import Blind, Identity, IncidentFacts, IterationFacts, RankFiles
from flightrec.storage.write import TensorsFile, write_facts, write_index

SHAPE = (4, 8)
FIRST_ITERATION = 210
FAULTY_ITERATION = 212

FORWARD_AND_BACKWARD = (
    ("blocks.0.fc1", "activation", Stage.FORWARD),
    ("blocks.0.fc2", "activation", Stage.FORWARD),
    ("blocks.0", "output", Stage.FORWARD),
    ("blocks.1.fc1", "activation", Stage.FORWARD),
    ("", "loss", Stage.LOSS),
    ("blocks.1.fc1", "gradient", Stage.BACKWARD),
    ("blocks.0.fc2", "gradient", Stage.BACKWARD),
)
"""What an iteration of the made-up model records, in order."""

SPOILED = 1
"""Position of the record in which the fault begins."""


def layouts(names: Sequence[tuple[str, str, Stage]] = FORWARD_AND_BACKWARD) -> list[RecordLayout]:
    """One layout for each name; all but the loss hold float32 bytes."""
    made = []
    for number, (layer, tensor, stage) in enumerate(names):
        has_bytes = tensor != "loss"
        num_bytes = 4 * int(np.prod(SHAPE))
        parts = (Component("high_precision", SHAPE, "float32", 0, num_bytes),) if has_bytes else ()
        made.append(
            RecordLayout(
                layout_id=number,
                key=Key(layer, tensor, microbatch=0, stage=stage),
                representation=Representation.HIGH_PRECISION if has_bytes else Representation.STATISTICS,
                shape=SHAPE if has_bytes else (),
                dtype="float32",
                quantizer=-1,
                components=parts,
                segment=0 if has_bytes else -1,
                offset_bytes=0,
                row=number,
            )
        )
    return made


def statistics(num_rows: int, *, amax: float = 1.0) -> np.ndarray:
    """Rows of a healthy iteration."""
    rows = np.full((num_rows, NUM_STATISTICS), np.nan)
    for column in Statistic:
        if column.name.endswith("_COUNT") and not column.name.startswith("QUANTIZED"):
            rows[:, column] = 0
    rows[:, Statistic.NUMEL] = 32
    rows[:, Statistic.AMAX] = amax
    rows[:, Statistic.SUM] = 3.2
    rows[:, Statistic.SUM_OF_SQUARES] = 8.0
    return rows


def write_incident(
    directory: Path,
    *,
    incident_id: str = "run.0.0000212.nan.r0",
    message: str = "blocks.0.fc2 activation holds 2 NaN or Inf of 32 values",
    layer: str = "blocks.0.fc2",
    with_tensors: bool = True,
    with_history: bool = True,
    amax_grows: bool = False,
    blind: Sequence[Blind] = (),
) -> Path:
    """Write facts, tensors and index of a NaN that began in ``blocks.0.fc2``; give the incident's folder."""
    folder = directory / incident_id
    folder.mkdir(parents=True)
    made = [record if number != SPOILED else _renamed(record, layer) for number, record in enumerate(layouts())]
    iterations = []
    for iteration in range(FIRST_ITERATION, FAULTY_ITERATION + 1):
        rows = statistics(len(made), amax=50.0 if amax_grows and iteration > FIRST_ITERATION else 1.0)
        if iteration == FAULTY_ITERATION:
            rows[SPOILED, Statistic.NAN_COUNT] = 1
            rows[SPOILED, Statistic.POSITIVE_INF_COUNT] = 1
            rows[SPOILED + 1 :, Statistic.NAN_COUNT] = 32
            rows[SPOILED + 1 :, Statistic.AMAX] = np.nan
        iterations.append(
            IterationFacts(
                attempt=0,
                iteration=iteration,
                tick=iteration,
                num_microbatches=1,
                loss=2.5,
                layouts=made,
                statistics=rows,
            )
        )
    identity = Identity(incident_id, "run", 0, 0, 1, "node7", 1_700_000_000_000_000_000, {"flightrec": "0.1.0"})
    trigger = Firing(
        rule="nan",
        kind="nonfinite",
        severity=Severity.FAULT,
        attempt=0,
        iteration=FAULTY_ITERATION,
        key=made[SPOILED].key,
        sequence=SPOILED,
        value=2.0,
        threshold=0.0,
        message=message,
    )
    stem = f"rank00000.{incident_id}"
    history = {"loss": (np.arange(150, 213), np.linspace(3.0, 2.5, 63))} if with_history else {}
    facts = IncidentFacts(
        identity=identity,
        config_text="budget: none\n",
        environment={},
        trigger=trigger,
        firings=[trigger],
        iterations=iterations,
        blind=blind,
        history=history,
        tensors_file=f"{stem}.tensors.h5" if with_tensors else "",
    )
    write_facts(folder / f"{stem}.facts.h5", facts)
    if with_tensors:
        _write_tensors(folder / f"{stem}.tensors.h5", facts, f"{stem}.facts.h5")
    write_index(folder, incident_id, [RankFiles(0, f"{stem}.facts.h5", facts.tensors_file)])
    return folder


def _renamed(record: RecordLayout, layer: str) -> RecordLayout:
    data = record.to_json()
    data["key"][0] = layer
    return RecordLayout.from_json(data)


def _write_tensors(path: Path, facts: IncidentFacts, facts_name: str) -> None:
    tensors = TensorsFile.create(path, facts.identity, facts_name)
    row = 0
    for iteration in facts.iterations:
        for layout, group in zip(iteration.layouts, iteration.record_paths(), strict=True):
            if layout.components:
                values = np.full(SHAPE, float(iteration.iteration), np.float32)
                tensors.add(row, group, layout, [memoryview(values.tobytes())])
            row += 1
    tensors.commit()
