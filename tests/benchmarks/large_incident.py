"""Makes a large incident through the real writer, and measures how long reading it takes. Needs no torch.

    python tests/benchmarks/large_incident.py DIRECTORY [--records 20000] [--gigabytes 10] [--measure]

Five iterations of a made-up transformer: activation, weight, output, gradient, dgrad and wgrad of four products a block
in two microbatches, in bfloat16 beside FP8 with one scale, MXFP8, NVFP4, or alone; a history of 1 000 iterations. The
arrays come from a small pool, and the statistics are those of the arrays. In the last iteration a product gives NaN
(``BLAMED``), and everything behind it is NaN; before, the amax of an activation grows fourfold an iteration
(``GROWING``). Prints one JSON line a measured command: wall and CPU seconds (medians), and the peak resident memory of
the command and of its child together (the sum of both peaks).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np

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
from flightrec.storage.facts import HistoryPiece, Identity, IncidentFacts, IterationFacts, RankFiles
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS
from flightrec.storage.write import TensorsFile, write_facts, write_index

NUM_ITERATIONS = 5
LAST_ITERATION = 1000
NUM_MICROBATCHES = 2
PRODUCTS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
BLAMED = ("decoder.layers.0.mlp.linear_fc1", "output")
GROWING = ("decoder.layers.0.mlp.linear_fc1", "activation")
POOL = 6
COLUMNS = 1024

QUANTIZERS = [
    QuantizerInfo("made.Float8", "float8_e4m3fn", "multiply_to_decode", (), {"scheme": "float8"}),
    QuantizerInfo("made.MXFP8", "float8_e4m3fn", "multiply_to_decode", (1, 32), {"scheme": "mxfp8"}),
    QuantizerInfo("made.NVFP4", "float4_e2m1fn_x2", "multiply_to_decode", (1, 16), {"scheme": "nvfp4"}),
]


@dataclass
class Entry:
    """A tensor of the pool: its arrays as they are stored, and their statistics."""

    arrays: dict[str, tuple[np.ndarray, str]]
    statistics: np.ndarray
    quantizer: int = -1
    shape: tuple[int, ...] = ()
    views: list[memoryview] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.views = [memoryview(np.ascontiguousarray(array)) for array, _ in self.arrays.values()]


def bfloat16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16)


def entry(values: np.ndarray, quantizer: int) -> Entry:
    """bfloat16 values with codes of a quantizer (-1: none)."""
    x = bfloat16(values).astype(np.float32)
    finite = np.isfinite(x)
    amax = float(np.abs(x[finite]).max()) if finite.any() else np.nan
    row = np.full(NUM_STATISTICS, np.nan)
    row[Statistic.NUMEL] = x.size
    row[Statistic.NAN_COUNT] = np.isnan(x).sum()
    row[Statistic.POSITIVE_INF_COUNT] = np.isposinf(x).sum()
    row[Statistic.NEGATIVE_INF_COUNT] = np.isneginf(x).sum()
    row[Statistic.ZERO_COUNT] = (x == 0).sum()
    row[Statistic.AMAX] = amax
    row[Statistic.SUM] = x[finite].sum(dtype=np.float64)
    row[Statistic.SUM_OF_SQUARES] = np.square(x[finite], dtype=np.float64).sum()
    arrays = {"high_precision": (bfloat16(values).view("<u2"), "bfloat16")}
    if quantizer >= 0:
        codes, back, largest, scales = (_float8, _mxfp8, _nvfp4)[quantizer](np.where(finite, x, 0), amax or 1.0)
        arrays |= codes
        row[Statistic.QUANTIZED_NUMEL] = x.size
        row[Statistic.QUANTIZED_NAN_COUNT] = row[Statistic.QUANTIZED_INF_COUNT] = 0
        row[Statistic.QUANTIZED_ZERO_COUNT] = (back == 0).sum()
        row[Statistic.UNDERFLOW_COUNT] = ((back == 0) & (x != 0)).sum()
        row[Statistic.SQUARED_ERROR] = np.square((back - x)[finite], dtype=np.float64).sum()
        row[Statistic.QUANTIZED_SATURATED_COUNT] = row[Statistic.CLIPPED_COUNT] = row[Statistic.ZERO_SCALE_COUNT] = 0
        row[Statistic.SCALE_NONFINITE_COUNT] = 0
        row[Statistic.SCALE_MIN], row[Statistic.SCALE_MAX] = scales.min(), scales.max()
        row[Statistic.RANGE_RATIO], row[Statistic.QUANTIZED_LARGEST] = 1.0, largest
    return Entry(arrays, row, quantizer, x.shape)


def _float8(x: np.ndarray, amax: float) -> tuple[dict[str, tuple[np.ndarray, str]], np.ndarray, float, np.ndarray]:
    scale_inv = np.array([amax / 448 if amax == amax else 1.0], np.float32)
    codes = np.clip(x / scale_inv, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    stored = {"data": (codes.view("u1"), "float8_e4m3fn"), "scale_inv": (scale_inv, "float32")}
    return stored, codes.astype(np.float32) * scale_inv, 448.0, scale_inv


def _mxfp8(x: np.ndarray, _: float) -> tuple[dict[str, tuple[np.ndarray, str]], np.ndarray, float, np.ndarray]:
    blocks = x.reshape(len(x), -1, 32)
    largest = np.maximum(np.abs(blocks).max(-1), 2.0**-100)
    scale = np.exp2(np.ceil(np.log2(largest / 448)))
    codes = (blocks / scale[..., None]).astype(ml_dtypes.float8_e4m3fn)
    words = scale.astype(ml_dtypes.float8_e8m0fnu).view("u1")
    stored = {
        "data": (codes.view("u1").reshape(x.shape), "float8_e4m3fn"),
        "scale_inv": (words, "float8_e8m0fnu"),
    }
    return stored, (codes.astype(np.float32) * scale[..., None]).reshape(x.shape), 448.0, scale


def _nvfp4(x: np.ndarray, amax: float) -> tuple[dict[str, tuple[np.ndarray, str]], np.ndarray, float, np.ndarray]:
    amax = np.float32(amax if amax == amax else 1.0)
    blocks = x.reshape(len(x), -1, 16)
    words = np.clip(np.abs(blocks).max(-1) / 6 / (amax / (6 * 448)), 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = words.astype(np.float32) * amax * np.float32(1 / (6 * 448))
    codes = np.clip(blocks / scale[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view("u1").reshape(x.shape) & 15
    stored = {
        "data": (nibbles[:, ::2] | nibbles[:, 1::2] << 4, "float4_e2m1fn_x2"),
        "scale_inv": (words.view("u1"), "float8_e4m3fn"),
        "amax": (np.array([amax]), "float32"),
    }
    return stored, (codes.astype(np.float32) * scale[..., None]).reshape(x.shape), 6.0, scale


def keys(num_records: int) -> list[Key]:
    """Keys of one iteration, in the order in which they are seen; about ``num_records``."""
    num_blocks = max(1, num_records // (NUM_MICROBATCHES * 6 * len(PRODUCTS)))
    layers = [f"decoder.layers.{block}.{product}" for block in range(num_blocks) for product in PRODUCTS]
    found = []
    for microbatch in range(NUM_MICROBATCHES):
        for layer in layers:
            found += [Key(layer, tensor, microbatch=microbatch) for tensor in ("activation", "weight", "output")]
        found.append(Key("", "loss", microbatch=microbatch, stage=Stage.LOSS))
        for layer in reversed(layers):
            names = ("gradient", "dgrad", "wgrad")
            found += [Key(layer, tensor, microbatch=microbatch, stage=Stage.BACKWARD) for tensor in names]
    return found


class Maker:
    """Chooses the pool's entry of each record."""

    def __init__(self, rows: int, rng: np.random.Generator) -> None:
        values = [rng.standard_normal((rows, COLUMNS)).astype(np.float32) for _ in range(POOL)]
        self.pool = [[entry(value, quantizer) for value in values] for quantizer in range(-1, len(QUANTIZERS))]
        self.bad = [entry(np.full_like(values[0], np.nan), quantizer) for quantizer in range(-1, len(QUANTIZERS))]
        spoiled = values[0].copy()
        spoiled[rows // 2, 7::64] = np.nan
        self.first = entry(spoiled, -1)
        self.growing = [entry(values[1] * 4.0**power, 0) for power in range(NUM_ITERATIONS)]
        self.loss = Entry({}, np.full(NUM_STATISTICS, np.nan))

    def of(self, key: Key, number: int, iteration: int, is_bad: bool) -> Entry:
        if key.tensor == "loss":
            return self.loss
        place = (
            0
            if key.tensor in ("output", "dgrad", "wgrad")
            else 1 + zlib.crc32(key.layer[-5:].encode()) % len(QUANTIZERS)
        )
        if is_bad and key.tensor != "weight":
            return self.bad[place]
        if (key.layer, key.tensor) == GROWING:
            return self.growing[iteration]
        return self.pool[place][(number + iteration) % POOL]


def layout(key: Key, made: Entry, number: int) -> RecordLayout:
    parts = [Component(name, array.shape, form, 0, array.nbytes) for name, (array, form) in made.arrays.items()]
    kinds = {0: Representation.STATISTICS, 1: Representation.HIGH_PRECISION}
    kind = kinds.get(len(parts), Representation.BOTH)
    dtype = "bfloat16" if parts else "float32"
    return RecordLayout(number, key, kind, made.shape, dtype, made.quantizer, tuple(parts), 0, 0, number)


def history(seen: Sequence[Key], quantized: set[Key], length: int, rng: np.random.Generator) -> HistoryPiece:
    """Statistics of the last iterations, around 1, as a random walk."""
    series = list(dict.fromkeys(key.series for key in seen if key.tensor != "loss"))
    with_codes = [key for key in series if key in quantized]
    plain = [key for key in series if key not in quantized]

    def walk(columns: int, width: int) -> np.ndarray:
        noise = rng.standard_normal((length, 1, width)).astype(np.float32) * np.float32(0.01)
        values = np.repeat(1 + np.cumsum(noise, 0) / 10, columns, axis=1)
        values[:, 1:3] = 0.0  # NaN and Inf counts
        return values

    numbers = np.arange(LAST_ITERATION - length + 1, LAST_ITERATION + 1)
    wide = walk(len(HISTORY_STATISTICS), len(with_codes))
    for name in ("quantized_nan_count", "quantized_inf_count", "scale_nonfinite_count", "zero_scale_count"):
        wide[:, HISTORY_STATISTICS.index(name)] = 0.0
    grown = [place for place, key in enumerate(with_codes) if (key.layer, key.tensor) == GROWING]
    wide[-NUM_ITERATIONS:, HISTORY_STATISTICS.index("amax"), grown] *= 4.0 ** np.arange(NUM_ITERATIONS)[:, None]
    return HistoryPiece(
        last=LAST_ITERATION,
        attempts=np.zeros(length, np.int64),
        iterations=numbers,
        plain_series=plain,
        plain=walk(len(PLAIN_STATISTICS), len(plain)),
        quantized_series=with_codes,
        quantized=wide,
    )


def make(folder: Path, num_records: int, num_bytes: int, length: int = LAST_ITERATION) -> Path:
    """Write the incident, with a history of ``length`` iterations; gives its folder."""
    rng = np.random.default_rng(0)
    seen = keys(num_records // NUM_ITERATIONS)
    a_row = COLUMNS * 2.6  # bytes a record: bfloat16, and codes for half of them
    maker = Maker(max(2, round(num_bytes / (len(seen) * NUM_ITERATIONS) / a_row)), rng)
    made, iterations = [], []
    for number, iteration in enumerate(range(LAST_ITERATION - NUM_ITERATIONS + 1, LAST_ITERATION + 1)):
        entries, is_bad = [], False
        for place, key in enumerate(seen):
            first = number == NUM_ITERATIONS - 1 and (key.layer, key.tensor, key.microbatch) == (*BLAMED, 0)
            entries.append(maker.first if first else maker.of(key, place, number, is_bad))
            is_bad |= first
        layouts = [layout(key, each, place) for place, (key, each) in enumerate(zip(seen, entries, strict=True))]
        rows = np.array([each.statistics for each in entries])
        made.append(entries)
        loss = float("nan") if is_bad else 2.5
        iterations.append(IterationFacts(0, iteration, iteration, NUM_MICROBATCHES, loss, layouts, rows))
    blamed = next(place for place, key in enumerate(seen) if (key.layer, key.tensor) == BLAMED)
    count = int(iterations[-1].statistics[blamed, Statistic.NAN_COUNT])
    told = f"{' '.join(BLAMED)} holds {count} NaN."
    where = {"attempt": 0, "iteration": LAST_ITERATION, "key": seen[blamed], "sequence": blamed}
    fired = Firing("nan", "nonfinite", Severity.FAULT, **where, value=float(count), threshold=0.0, message=told)
    quantized = {key.series for key, each in zip(seen, made[0], strict=True) if each.quantizer >= 0}
    identity = Identity("large", "large", 0, 0, 1, "host", time.time_ns(), {"flightrec": "0"})
    names = ("rank00000.large.facts.h5", "rank00000.large.tensors.h5")
    losses = 2.5 + 0.1 * rng.standard_normal(LAST_ITERATION)
    facts = IncidentFacts(
        identity=identity,
        config_text="budget: none\ntriggers:\n  - {name: nan, kind: nonfinite}\n",
        environment={"argv": ["train.py"]},
        trigger=fired,
        firings=[fired],
        iterations=iterations,
        quantizers=[info.to_json() for info in QUANTIZERS],
        history={"loss": (np.arange(1, LAST_ITERATION + 1), losses, np.zeros(LAST_ITERATION, np.int64))},
        statistics=[history(seen, quantized, length, rng)],
        tensors_file=names[1],
    )
    folder.mkdir(parents=True)
    write_facts(folder / names[0], facts)
    file = TensorsFile.create(folder / names[1], identity, names[0])
    for first, facts_of, entries in zip(facts.first_records(), iterations, made, strict=True):
        for place, path in enumerate(facts_of.record_paths()):
            if path:
                file.put(first + place, path, facts_of.layouts[place], entries[place].views)
            if place % 64 == 63:
                file.write_out()
        file.write_out()
    file.commit()
    write_index(folder, "large", [RankFiles(0, *names)])
    return folder


BLAME = """
import sys, time, flightrec
start = time.perf_counter()
with flightrec.open(sys.argv[1]) as incident:
    findings = incident.blame()
    found = incident.verdict(elements=True) if hasattr(incident, "verdict") else findings[0]
print(len(findings), repr(found)[:300], f"{time.perf_counter() - start:.2f} s without the imports")
"""


def commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    program = [sys.executable, "-c", "from flightrec.cli import main; main()"]
    yield "inspect", [*program, "inspect", str(folder)]
    yield "inspect --json", [*program, "inspect", str(folder), "--json"]
    yield "inspect --quantizer", [*program, "inspect", str(folder), "--quantizer", GROWING[0]]
    yield "blame with elements", [sys.executable, "-c", BLAME, str(folder)]


def measure(name: str, command: list[str], repeats: int = 3) -> dict[str, object]:
    """Run a command several times: the median of seconds, the largest memory."""
    seconds, cpu, memory = [], [], 0
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", WATCH, *command], capture_output=True, text=True, check=False)
        watched = json.loads(done.stderr.splitlines()[-1])
        memory = max(memory, watched["kilobytes"])
        seconds.append(watched["seconds"])
        cpu.append(watched["cpu_seconds"])
    said = done.stdout[-400:] if name.startswith("blame") else ""
    middle = repeats // 2
    times = {"seconds": sorted(seconds)[middle], "fastest": min(seconds), "cpu_seconds": sorted(cpu)[middle]}
    return {"command": name, **times, "megabytes": memory / 1000, "said": said}


WATCH = """
import json, os, resource, subprocess, sys, threading, time
start = time.perf_counter()
child = subprocess.Popen(sys.argv[1:])
peaks = {}

def tree(pid):
    yield pid
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for below in open(f"/proc/{pid}/task/{task}/children").read().split():
                yield from tree(below)
    except OSError:
        return

def look():
    for pid in tree(child.pid):
        try:
            lines = open(f"/proc/{pid}/status").read().splitlines()
        except OSError:
            continue
        peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        if peak:
            peaks[pid] = max(peak[0], peaks.get(pid, 0))

while child.poll() is None:
    look()
    time.sleep(0.01)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime
told = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu, "kilobytes": sum(peaks.values())}
print(json.dumps(told), file=sys.stderr)
"""


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = {"python": platform.python_version(), "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    return {"cpu": models[0] if models else "", "num_cpus": len(models), **versions, "numpy": np.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--measure", action="store_true")
    asked = parser.parse_args()
    folder = asked.directory / "large"
    if not folder.exists():
        start = time.perf_counter()
        make(folder, asked.records, int(asked.gigabytes * 1e9))
        took = time.perf_counter() - start
        sizes = {path.name: path.stat().st_size / 1e6 for path in sorted(folder.iterdir())}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps({"made": str(folder), "seconds": took, "megabytes": sizes, "peak_megabytes": peak}))
    if asked.measure:
        print(json.dumps(machine()))
        for name, command in commands(folder):
            print(json.dumps(measure(name, command)), flush=True)


if __name__ == "__main__":
    main()
