"""Incidents for tests: builders of layouts and facts, and the incident that stands in tests/golden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flightrec.codecs import base
from flightrec.errors import WriterError
from flightrec.records import (
    NUM_STATISTICS,
    Component,
    Firing,
    Key,
    QuantizerInfo,
    RecordLayout,
    Representation,
    Severity,
    Stage,
    Statistic,
)
from flightrec.storage.facts import Blind, HistoryPiece, Identity, IncidentFacts, IterationFacts, RankFiles
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS
from flightrec.storage.write import TensorsFile, write_facts, write_index

FP8 = QuantizerInfo("torchao.Float8", "float8_e4m3fn", "multiply_to_encode", (), {"axiswise": False})


def identity(incident_id: str = "test", rank: int = 0, world_size: int = 1) -> Identity:
    return Identity(incident_id, "run", 0, rank, world_size, "host", 1_700_000_000_000_000_000, {"flightrec": "0.1.0"})


def statistics(**values: float) -> np.ndarray:
    row = np.full(NUM_STATISTICS, np.nan)
    for name, value in values.items():
        row[Statistic[name.upper()]] = value
    return row


@dataclass
class Sample:
    """A record to be: its key, its arrays as (array as stored, format), and its statistics."""

    key: Key
    arrays: Mapping[str, tuple[np.ndarray, str]] = field(default_factory=dict)
    statistics: np.ndarray = field(default_factory=statistics)
    quantizer: int = -1
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    reason: str = ""

    def layout(self, layout_id: int) -> RecordLayout:
        components, offset = [], 0
        for name, (array, form) in self.arrays.items():
            components.append(Component(name, array.shape, form, offset, array.nbytes))
            offset += -(-array.nbytes // 16) * 16
        high, quantized = "high_precision" in self.arrays, bool(self.arrays.keys() - {"high_precision"})
        kind = {
            (True, True): Representation.BOTH,
            (True, False): Representation.HIGH_PRECISION,
            (False, True): Representation.QUANTIZED,
        }.get((high, quantized), Representation.STATISTICS)
        shape = (
            self.shape if self.shape is not None else next(iter(self.arrays.values()))[0].shape if components else ()
        )
        dtype = self.dtype if self.dtype is not None else self.arrays["high_precision"][1] if high else ""
        return RecordLayout(
            layout_id, self.key, kind, shape, dtype, self.quantizer, tuple(components), 0, 0, layout_id, self.reason
        )

    def buffers(self) -> list[memoryview]:
        return [memoryview(np.ascontiguousarray(array)) for array, _ in self.arrays.values()]


def plain(key: Key, values: Any, form: str = "float32", **counts: float) -> Sample:
    array = np.asarray(values, dtype=base.storage_dtype(form))
    return Sample(key, {"high_precision": (array, form)}, statistics(numel=array.size, **counts))


def firing(key: Key | None, iteration: int, rule: str = "nan", kind: str = "nonfinite", **changes: Any) -> Firing:
    values: dict[str, Any] = {
        "severity": Severity.FAULT,
        "attempt": 0,
        "sequence": -1,
        "value": 1.0,
        "threshold": 0.0,
        "message": f"{rule} fired.",
    }
    return Firing(rule=rule, kind=kind, iteration=iteration, key=key, **(values | changes))


def iterations(samples: Mapping[int, Sequence[Sample]], num_microbatches: int = 2) -> list[IterationFacts]:
    found, layout_id = [], 0
    for iteration, entries in samples.items():
        layouts = [sample.layout(layout_id + index) for index, sample in enumerate(entries)]
        layout_id += len(layouts)
        rows = np.array([sample.statistics for sample in entries]).reshape(-1, NUM_STATISTICS)
        found.append(IterationFacts(0, iteration, iteration, num_microbatches, 0.5 * iteration, layouts, rows))
    return found


def write_incident(
    folder: Path,
    samples: Mapping[int, Sequence[Sample]],
    firings: Sequence[Firing],
    *,
    rank: int = 0,
    world_size: int = 1,
    incident_id: str = "test",
    stem: str = "",
    index: bool = True,
    late_firings: Sequence[Firing] = (),
    late_blind: Sequence[Blind] = (),
    **changes: Any,
) -> Path:
    """Write facts, tensors and index of one rank; gives the folder."""
    stem = stem or f"rank{rank:05d}.{incident_id}"
    who = identity(incident_id, rank, world_size)
    names = (f"{stem}.facts.h5", f"{stem}.tensors.h5")
    values: dict[str, Any] = {
        "identity": who,
        "config_text": "triggers: [{kind: nonfinite}]\n",
        "environment": {"argv": ["train.py"]},
        "trigger": firings[0],
        "firings": firings,
        "iterations": iterations(samples),
        "quantizers": [FP8.to_json()],
        "tensors_file": names[1],
    }
    facts = IncidentFacts(**(values | changes))
    write_facts(folder / names[0], facts)
    file = TensorsFile.create(folder / names[1], who, names[0])
    try:
        for first, entry, group in zip(facts.first_records(), facts.iterations, samples.values(), strict=True):
            for sequence, path in enumerate(entry.record_paths()):
                if path:
                    file.add(first + sequence, path, entry.layouts[sequence], group[sequence].buffers())
    except WriterError:
        file.abort()
        raise
    file.commit(late_firings, late_blind)
    if index:
        write_index(folder, incident_id, [RankFiles(rank, *names)])
    return folder


GOLDEN_ACTIVATION = np.array([[0x3F80, 0xC000, 0x7FC1], [0x0001, 0x8000, 0x7F80]], dtype="<u2")
GOLDEN_CODES = np.array([[0x38, 0xC0, 0x7F], [0x01, 0x80, 0x7E]], dtype="u1")
GOLDEN_ODD_LAYER = "a/b\0\ud800 \\ üml"


def history_piece(series: int = 2, quantized: int = 1, samples: int = 4, last: int = 4) -> HistoryPiece:
    """Statistics of ``samples`` past iterations; the value tells sample, column and series."""

    def values(columns: int, width: int) -> np.ndarray:
        return np.fromfunction(lambda n, c, s: 100 * n + c + s / 8, (samples, columns, width)).astype(np.float32)

    iterations = np.arange(12 - samples + 1, 13)
    return HistoryPiece(
        last=last,
        attempts=np.zeros(samples, np.int64),
        iterations=iterations,
        plain_series=[Key(f"plain.{n}", "output") for n in range(series - quantized)],
        plain=values(len(PLAIN_STATISTICS), series - quantized),
        quantized_series=[Key(f"blocks.{n + 1}.fc1", "activation") for n in range(quantized)],
        quantized=values(len(HISTORY_STATISTICS), quantized),
    )


def write_golden(folder: Path) -> Path:
    """Write the incident that stands in tests/golden, as the newest version of the format has it."""
    activation = Key("blocks.1.fc1", "activation", microbatch=0)
    weight = Key("blocks.1.fc1", "weight", microbatch=0)
    odd = Key(GOLDEN_ODD_LAYER, "gradient", "aux.0/x", microbatch=1, stage=Stage.BACKWARD)
    kept = Key("", "loss", stage=Stage.LOSS)

    def entries(bad: int) -> list[Sample]:
        both = {
            "high_precision": (GOLDEN_ACTIVATION, "bfloat16"),
            "data": (GOLDEN_CODES, "float8_e4m3fn"),
            "scale": (np.array(4.0, dtype="<f4"), "float32"),
        }
        blocks = {
            "data": (np.array([[0x21, 0x43, 0x0F]], dtype="u1"), "float4_e2m1fn_x2"),
            "scale_inv": (np.array([[126, 129]], dtype="u1"), "float8_e8m0fnu"),
        }
        counts = {"numel": 6, "nan_count": bad, "positive_inf_count": bad, "amax": 2.0}
        words = {"scale_min": 0.5, "scale_max": 4.0, "quantizer_amax": 24.0, "amax_history_max": 32.0}
        return [
            Sample(activation, both, statistics(**counts, quantized_nan_count=bad, quantized_numel=6), 0),
            Sample(weight, blocks, statistics(quantized_numel=5, **words), 1, shape=(1, 5)),
            plain(odd, [1.5, -0.0], "float64", amax=1.5),
            Sample(kept, {}, statistics(numel=1, sum=0.25), dtype="float32", reason="does not fit into the ring"),
        ]

    microscaled = QuantizerInfo("sample.Blocks", "float4_e2m1fn_x2", "multiply_to_decode", (1, 4), {"note": [1, None]})
    facts = {
        "step_time_s": 0.5,
        "data_time_s": 0.125,
        "optimizer": {"class": "AdamW", "groups": [{"lr": 0.001, "betas": [0.9, 0.95]}]},
        "data": {"num_valid_labels": {"0": 7.0}},
    }
    states = {"torch_cpu": np.arange(16, dtype=np.uint8)}
    both = [
        replace(entry, facts=facts, random_states=states, metrics={"loss_scale": 1024.0})
        for entry in iterations({11: entries(0), 12: entries(1)})
    ]
    both[0] = replace(both[0], tier="host", landmark=100)
    fired = firing(activation, 12, value=float("nan"), message="blocks.1.fc1 activation holds 1 NaN.")
    return write_incident(
        folder,
        {11: entries(0), 12: entries(1)},
        [fired],
        incident_id="incident-1.4",
        stem="incident-1.4",
        quantizers=[FP8.to_json(), microscaled.to_json()],
        history={"loss": ([9, 10, 11, 12], [0.9, 0.8, 0.7, float("nan")], [0, 0, 0, 0])},
        statistics=[history_piece()],
        iterations=both,
        blind=[Blind(0, 10, "", "", "no slot was free")],
        late_firings=[firing(odd, 12, rule="late", kind="amax_spike", severity=Severity.WARNING)],
        late_blind=[Blind(0, 13, "blocks.1.fc1", "weight", "staging was full")],
    )
