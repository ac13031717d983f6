"""Fills the tables of a facts file and of an index from plain facts. Runs in the writer process; no torch.

Works on an open HDF5 file, wherever its bytes lie. Rows are collected as tuples and turned into one numpy array a
table: a group or an attribute a record would take minutes for an incident of 50 000 records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError
from flightrec.records import NO_MICROBATCH, NUM_STATISTICS, Firing, Key, RecordLayout
from flightrec.storage import history, schema, text
from flightrec.storage.facts import Blind, Identity, IncidentFacts, IterationFacts, RankFiles
from flightrec.storage.scale_age import UNKNOWN, ScaleAges

RecordRows = Mapping[tuple[int, int, Key], int]
"""(attempt, iteration, key) -> row of ``/records``."""


def root_attributes(kind: str, identity: Identity) -> dict[str, Any]:
    """Root attributes that facts and tensors files share; ``complete`` is 0 until the very end."""
    return {
        "format": schema.FORMAT,
        "format_version": schema.FORMAT_VERSION,
        "kind": kind,
        "complete": np.uint8(0),
        "incident_id": identity.incident_id,
        "run_id": identity.run_id,
        "attempt": np.int64(identity.attempt),
        "rank": np.int64(identity.rank),
        "world_size": np.int64(identity.world_size),
        "host": identity.host,
        "created": np.int64(identity.created_ns),
        "versions": text.to_json_text(identity.versions),
    }


def fill_facts(file: h5py.File, facts: IncidentFacts) -> None:
    """Write all of a facts file but ``complete``."""
    table = text.TextTable()
    problems: list[str] = []
    attributes = {"tensors_file": facts.tensors_file} if facts.tensors_file else {}
    if facts.ended:
        attributes["ended"] = facts.ended
    text.write_attributes(file, root_attributes(schema.FACTS, facts.identity) | attributes)
    text.write_text(file, "config", facts.config_text)
    text.write_text(file, "environment", text.to_json_text(facts.environment))

    records, rows = _record_rows(facts.iterations, facts.first_records(), table)
    told = _tell_scale_ages(records, facts, problems)
    file.create_dataset("records", data=records)
    file.create_dataset("iterations", data=_iteration_rows(facts.iterations, facts.first_records(), table))
    firings = list(facts.firings)
    primary = next((index for index, firing in enumerate(firings) if _same(firing, facts.trigger)), None)
    if primary is None:
        firings, primary = [facts.trigger, *firings], 0
    firings, trigger = [told(firing) for firing in firings], told(facts.trigger)
    fired = firing_rows(firings, table, rows)
    file.create_dataset("firings", data=fired)
    _fill_trigger(file, trigger, primary, int(fired[primary]["record"]))
    file.create_dataset("quantizers", data=_quantizer_rows(facts.quantizers, table, problems))
    file.create_dataset("blind", data=blind_rows(facts.blind, table))
    history.fill_history(file, facts.history, facts.statistics, table, problems)
    history.fill_random_states(file, facts.iterations)
    table.write(file)
    if problems:
        found = text.TextTable()
        for problem in problems:
            found.add(problem)
        found.write(file, "problems")


def fill_index(file: h5py.File, incident_id: str, ranks: Sequence[RankFiles], attributes: Mapping[str, Any]) -> None:
    """Write the rank table and one link for each file that is there, all but ``complete``."""
    table = text.TextTable()
    fixed = {
        "format": schema.FORMAT,
        "format_version": schema.FORMAT_VERSION,
        "kind": schema.INDEX,
        "complete": np.uint8(0),
        "incident_id": incident_id,
    }
    text.write_attributes(file, dict(attributes) | fixed)
    rows = [(entry.rank, table.add(entry.facts), table.add(entry.tensors)) for entry in ranks]
    file.create_dataset("ranks", data=np.array(rows, dtype=schema.RANK))
    for entry in ranks:
        for link, name in (("facts", entry.facts), ("tensors", entry.tensors)):
            if name:
                file[f"rank{entry.rank:05d}/{link}"] = h5py.ExternalLink(name, "/")
    table.write(file)


def firing_rows(firings: Sequence[Firing], table: text.TextTable, rows: RecordRows) -> npt.NDArray[np.void]:
    """Rows of a ``/firings`` table; records that a firing does not name are looked up in ``rows``."""
    found = []
    for firing in firings:
        key = firing.key or Key("", "")
        record = firing.record
        if record < 0 and firing.key is not None:
            record = rows.get((firing.attempt, firing.iteration, firing.key), -1)
        found.append(
            (
                table.add(firing.rule),
                table.add(firing.kind),
                firing.severity.value,
                firing.attempt,
                firing.iteration,
                firing.key is not None,
                *_key_columns(key, table),
                firing.sequence,
                firing.value,
                firing.threshold,
                table.add(firing.message),
                record,
            )
        )
    return np.array(found, dtype=schema.FIRING)


def blind_rows(blind: Sequence[Blind], table: text.TextTable) -> npt.NDArray[np.void]:
    """Rows of a ``/blind`` table."""
    rows = [
        (entry.attempt, entry.iteration, table.add(entry.layer), table.add(entry.tensor), table.add(entry.reason))
        for entry in map(Blind._make, blind)
    ]
    return np.array(rows, dtype=schema.BLIND)


def _key_columns(key: Key, table: text.TextTable) -> tuple[int, int, int, int, str, int, str]:
    layer, tensor, part = table.add(key.layer), table.add(key.tensor), table.add(key.part)
    return layer, tensor, part, key.microbatch, key.phase.value, key.call, key.stage.value


def _same(one: Firing, other: Firing) -> bool:
    """Whether two firings are one; their values may be NaN and are not compared."""
    return (one.rule, one.attempt, one.iteration, one.key) == (other.rule, other.attempt, other.iteration, other.key)


def _record_rows(
    iterations: Sequence[IterationFacts], first_records: Sequence[int], table: text.TextTable
) -> tuple[npt.NDArray[np.void], dict[tuple[int, int, Key], int]]:
    descriptions = _LayoutTexts(table)
    rows: list[tuple[Any, ...]] = []
    found: dict[tuple[int, int, Key], int] = {}
    for facts, first in zip(iterations, first_records, strict=True):
        assert len(rows) == first
        layouts, paths = facts.layouts, facts.record_paths()
        absent = (math.nan,) * NUM_STATISTICS
        for sequence, (layout, path) in enumerate(zip(layouts, paths, strict=True)):
            found.setdefault((facts.attempt, facts.iteration, layout.key), len(rows))
            rows.append(
                (
                    facts.attempt,
                    facts.iteration,
                    sequence,
                    *_key_columns(layout.key, table),
                    *descriptions.columns(layout),
                    table.add(path),
                    table.add(layout.reason),
                    *absent,
                    UNKNOWN,
                    UNKNOWN,
                )
            )
    records = np.array(rows, dtype=schema.RECORD)
    for facts, first in zip(iterations, first_records, strict=True):
        statistics = np.asarray(facts.statistics, dtype=np.float64).reshape(-1, NUM_STATISTICS)
        if len(statistics) != len(facts.layouts):
            raise FormatError(
                f"iteration {facts.iteration}: {len(statistics)} rows of statistics for {len(facts.layouts)} records"
            )
        for column, name in enumerate(schema.STATISTIC_COLUMNS):
            records[name][first : first + len(statistics)] = statistics[:, column]
    return records, found


def _tell_scale_ages(
    records: npt.NDArray[np.void], facts: IncidentFacts, problems: list[str]
) -> Callable[[Firing], Firing]:
    """Fill in how long scales have stood still; gives what tells it in a firing. An error costs these columns only."""
    for known in (
        facts,
        replace(facts, statistics=()),
    ):  # a broken history leaves the incident's own words
        try:
            ages = ScaleAges(known)
            told = {id(firing): ages.told(firing) for firing in (facts.trigger, *facts.firings)}
            columns = ages.columns()
        except Exception as error:
            problem = f"ages of scales: {type(error).__name__}: {error}"
            continue
        records["scale_unchanged_iterations"], records["scale_differed_iterations"] = columns
        return lambda firing: told.get(id(firing), firing)
    problems.append(problem)
    return lambda firing: firing


class _LayoutTexts:
    """Columns that depend on the layout alone, worked out once a layout."""

    def __init__(self, table: text.TextTable) -> None:
        self._table = table
        self._known: dict[int, tuple[RecordLayout, tuple[Any, ...]]] = {}

    def columns(self, layout: RecordLayout) -> tuple[Any, ...]:
        known = self._known.get(id(layout))
        if known is not None:
            return known[1]
        components = [
            {"name": part.name, "shape": part.shape, "format": part.format, "bytes": part.num_bytes}
            for part in layout.components
        ]
        columns = (
            layout.representation.value,
            self._table.add_json(layout.shape),
            self._table.add(layout.dtype),
            layout.quantizer,
            self._table.add_json(components),
            layout.num_bytes,
        )
        self._known[id(layout)] = (layout, columns)  # the layout is kept so that its id stays its own
        return columns


def _iteration_rows(
    iterations: Sequence[IterationFacts], first_records: Sequence[int], table: text.TextTable
) -> npt.NDArray[np.void]:
    rows = [
        (
            facts.attempt,
            facts.iteration,
            facts.tick,
            facts.num_microbatches,
            facts.loss is not None,
            math.nan if facts.loss is None else facts.loss,
            facts.partial,
            table.add(facts.blind),
            first,
            len(facts.layouts),
            table.add_json(facts.metrics) if facts.metrics else 0,
            *(_number(source.get(name)) for source, name in _numbers_of(facts)),
            *(table.add_json(facts.facts[name]) if facts.facts.get(name) else 0 for name in ("optimizer", "data")),
            facts.tier,
            facts.landmark,
        )
        for facts, first in zip(iterations, first_records, strict=True)
    ]
    return np.array(rows, dtype=schema.ITERATION)


def _numbers_of(facts: IterationFacts) -> list[tuple[Mapping[str, Any], str]]:
    return [(facts.facts, "step_time_s"), (facts.facts, "data_time_s"), (facts.metrics, "loss_scale")]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _quantizer_rows(
    quantizers: Sequence[Mapping[str, Any]], table: text.TextTable, problems: list[str]
) -> npt.NDArray[np.void]:
    rows = []
    for index, info in enumerate(quantizers):
        direction = str(info.get("scale_direction", "none"))
        if not direction.isascii() or len(direction) > 24:
            problems.append(f"quantizer {index}: scale_direction {direction!r} is none of the known words")
            direction = "none"
        rows.append(
            (
                table.add(str(info.get("class_name", ""))),
                table.add(str(info.get("format", ""))),
                direction,
                table.add_json(info.get("block_shape", ())),
                table.add_json(info.get("metadata", {})),
            )
        )
    return np.array(rows, dtype=schema.QUANTIZER)


def _fill_trigger(file: h5py.File, trigger: Firing, primary: int, record: int) -> None:
    values: dict[str, Any] = {
        "rule": trigger.rule,
        "kind": trigger.kind,
        "severity": trigger.severity.value,
        "attempt": np.int64(trigger.attempt),
        "iteration": np.int64(trigger.iteration),
        "value": np.float64(trigger.value),
        "threshold": np.float64(trigger.threshold),
        "message": trigger.message,
        "firing": np.int64(primary),
    }
    if trigger.key is not None:
        key = trigger.key
        values |= {"layer": key.layer, "tensor": key.tensor, "part": key.part, "phase": key.phase.value}
        values |= {"call": np.int64(key.call), "stage": key.stage.value, "record": np.int64(record)}
        if key.microbatch != NO_MICROBATCH:
            values["microbatch"] = np.int64(key.microbatch)
    text.write_attributes(file.create_group("trigger"), values)
