"""What Transformer Engine's DumpTensors writes, and what an incident of ours holds, for the same step of one process.

    python tests/benchmarks/dump_tensors.py [--recipe delayed|current|block] [--all]

Needs a GPU, Transformer Engine and nvdlfw_inspect. Both features are in one configuration. A NaN is planted in the
iteration behind the one that is looked at, so that a rule fires and the incident holds both. Prints a Markdown table, a
row a layer and tensor (of the first transformer layer, or of all), and the totals.

DumpTensors is told to dump one iteration. It dumps all of them, since Transformer Engine shows a tensor to every
feature of a layer if one of them wants it; only that iteration counts here. How long a step takes without it is
measured in a second run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pickletools
import platform
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import te_models
import torch

import flightrec

TENSORS = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
LOOKED_AT, NUM_MICROBATCHES = 4, 2
SECTION = """
look:
  enabled: True
  layers: {{layer_name_regex_pattern: "layers.*"}}
  transformer_engine:
{dump}    FlightRecorder:
      enabled: True
      tensors: [{tensors}]
      directory: {directory}
      ring: {{iterations: 2, memory: 4 GiB}}
      triggers: [{{kind: nonfinite}}]
      incident: {{after: 0}}
"""
DUMP = """    DumpTensors:
      enabled: True
      tensors: [{tensors}]
      high_precision_tensor: True
      quantized_tensor: True
      start_step: {at}
      end_step: {at}
"""


@dataclass
class Row:
    """One layer's tensor on both sides."""

    path: Path | None = None
    seconds: float = 0.0
    writes: int = 0
    dumped: dict[str, Any] = field(default_factory=dict)
    records: list[Any] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=te_models.RECIPES, default="delayed")
    parser.add_argument("--all", action="store_true", help="rows of all layers, not only of the first")
    options = parser.parse_args()
    te_models.load()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writes, dumping = run(options.recipe, folder / "both", dump=True)
        _, quiet = run(options.recipe, folder / "ours", dump=False)
        (index,) = (folder / "both").rglob("*.index.h5")
        with flightrec.open(index.parent) as incident:
            rows = collect(writes, incident)
            print_versions(options.recipe)
            print_rows(rows, everything=options.all)
            print_totals(rows, incident, {"dumping": dumping, "quiet": quiet})


def run(recipe: str, folder: Path, *, dump: bool) -> tuple[list[tuple[Path, float]], float]:
    """Train under debug mode; returns the files that were dumped with their seconds, and a step's median seconds."""
    import nvdlfw_inspect.api as debug_api
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    folder.mkdir()
    config, names = folder / "inspect.yaml", ", ".join(TENSORS)
    section = DUMP.format(tensors=names, at=LOOKED_AT) if dump else ""
    config.write_text(SECTION.format(dump=section, tensors=names, directory=folder / "incidents"))
    TEDebugState._reset()
    debug_api.initialize(config_file=str(config), feature_dirs=feature_directories(), log_dir=str(folder / "log"))
    model = te_models.make(names=True)
    recipe_, data = te_models.recipe_of(recipe), te_models.tokens(LOOKED_AT + 3, NUM_MICROBATCHES)
    times: list[float] = []
    started = [0.0]

    def before(iteration: int, microbatch: int) -> None:
        if microbatch == 0:
            torch.cuda.synchronize()
            started[0] = time.perf_counter()
            if iteration == LOOKED_AT + 1:
                with torch.no_grad():
                    model.layers[1].layernorm_mlp.fc1_weight[3, 5] = math.nan

    def end(iteration: int) -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started[0])
        debug_api.step()

    with timed_saves() as writes:
        te_models.train(model, recipe_, data, optimizer="sgd", before=before, end=end)
    debug_api.end_debug()
    TEDebugState._reset()
    here = [(path, seconds) for path, seconds in writes if path.parent.name == f"iter_{LOOKED_AT:06d}"]
    return here, statistics.median(times[2 : LOOKED_AT + 1])


@contextlib.contextmanager
def timed_saves() -> Iterator[list[tuple[Path, float]]]:
    """Note each file that ``torch.save`` writes, and how long that took: DumpTensors writes with nothing else."""
    original, writes = torch.save, []

    def save(thing: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        original(thing, path, *args, **kwargs)
        writes.append((Path(path), time.perf_counter() - start))

    torch.save = save
    try:
        yield writes
    finally:
        torch.save = original


def feature_directories() -> list[str]:
    """Transformer Engine's features and ours."""
    import transformer_engine

    return [str(Path(transformer_engine.__file__).parent / "debug" / "features"), flightrec.feature_directory()]


def collect(writes: list[tuple[Path, float]], incident: Any) -> dict[tuple[str, str], Row]:
    """Both sides by (layer, tensor)."""
    rows: dict[tuple[str, str], Row] = {}
    for record in incident.records(iteration=LOOKED_AT, tensor=TENSORS):
        rows.setdefault((record.key.layer, record.key.tensor), Row()).records.append(record)
    by_name = {f"{flat(layer)}_{tensor}.pt": (layer, tensor) for layer, tensor in rows}
    for path, seconds in writes:
        row = rows.setdefault(
            by_name.get(path.name, (path.stem.rpartition("_")[0], path.stem.rpartition("_")[2])), Row()
        )
        row.path, row.seconds, row.writes = path, row.seconds + seconds, row.writes + 1
    for row in rows.values():
        if row.path is not None:
            row.dumped = torch.load(row.path, weights_only=False)
    return rows


def flat(layer: str) -> str:
    """A layer's name in DumpTensors' file names."""
    return "".join("_" if char in '/\\:*?"<>| .' else char for char in layer)


def print_versions(recipe: str) -> None:
    packages = {"torch": "torch", "Transformer Engine": "transformer_engine", "nvdlfw_inspect": "nvdlfw_inspect"}
    versions = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    print(
        f"{torch.cuda.get_device_name()}; Python {platform.python_version()}, {versions}, flightrec "
        f"{flightrec.__version__}; {te_models.NUM_LAYERS} TransformerLayers, hidden {te_models.HIDDEN}, "
        f"{recipe} scaling, {NUM_MICROBATCHES} microbatches; iteration {LOOKED_AT}\n"
    )


def print_rows(rows: dict[tuple[str, str], Row], *, everything: bool) -> None:
    print("| layer | tensor | DumpTensors: keys, class | KiB | ms | incident: microbatches | components | metadata |"
          " statistics | KiB | same numbers |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    order = {tensor: index for index, tensor in enumerate(TENSORS)}
    for (layer, tensor), row in sorted(rows.items(), key=lambda entry: (entry[0][0], order.get(entry[0][1], 9))):
        if not everything and not layer.startswith("layers.0"):
            continue
        keys = "; ".join(f"{key}: {type(value).__name__}" for key, value in row.dumped.items()) or "nothing"
        size = f"{row.path.stat().st_size / 1024:.0f}" if row.path else "-"
        found = row.records
        last = found[-1] if found else None
        print("| " + " | ".join([
            layer, tensor, keys, size, f"{1e3 * row.seconds:.1f}" if row.path else "-",
            str(len({(r.key.microbatch, r.key.call) for r in found})) if found else "-",
            ", ".join(part.name for part in last.components) if last else "-",
            str(len(leaves(last.metadata))) if last else "-",
            str(sum(value is not None for value in last.statistics.values())) if last else "-",
            f"{sum(r.num_bytes for r in found) / 1024:.0f}" if found else "-",
            agreement(row),
        ]) + " |")  # fmt: skip


def leaves(value: Any) -> list[Any]:
    """The single values of nested metadata."""
    if hasattr(value, "items"):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value]


def agreement(row: Row) -> str:
    """Whether what DumpTensors left, the last microbatch, is bit for bit what one of our records holds."""
    if not row.dumped or not row.records:
        return "-"
    wanted = {name: value for name, value in row.dumped.items() if isinstance(value, torch.Tensor)}
    verdicts = []
    for name, value in wanted.items():
        if name == "high_precision":
            mine = [r.high_precision for r in row.records if r.high_precision is not None]
            theirs = value.detach().float().cpu().numpy()
        else:
            mine = [r.quantized.dequantize() for r in row.records if r.quantized is not None]
            theirs = value.dequantize(dtype=torch.float32).cpu().numpy() if hasattr(value, "dequantize") else None
        if theirs is not None and mine:
            verdicts.append(any(np.array_equal(m.reshape(-1), theirs.reshape(-1), equal_nan=True) for m in mine))
    return "-" if not verdicts else "yes" if all(verdicts) else "NO"


def print_totals(rows: dict[tuple[str, str], Row], incident: Any, steps: dict[str, float]) -> None:
    paths = [row.path for row in rows.values() if row.path is not None]
    ours = [path for path in incident.path.rglob("*") if path.is_file()]
    records = [record for row in rows.values() for record in row.records]
    num_overwritten = sum(row.writes - 1 for row in rows.values() if row.writes)
    microbatches = {record.key.microbatch for record in records if record.key.microbatch >= 0}
    modules = ", ".join(sorted({name for path in paths for name in pickled_modules(path)}))
    saving = f"{sum(row.seconds for row in rows.values()):.2f} of a step's {steps['dumping']:.2f} in torch.save"
    lines = [
        ("files", len(paths), len(ours)),
        ("MiB on disk", f"{total(paths):.1f}", f"{total(ours):.1f}"),
        ("iterations", 1, len(incident.iterations)),
        ("tensors of this iteration", len(paths), len(records)),
        ("their MiB", f"{total(paths):.1f}", f"{sum(record.num_bytes for record in records) / 2**20:.1f}"),
        ("microbatches kept", f"1 of {NUM_MICROBATCHES}, {num_overwritten} files overwritten",
         f"{len(microbatches)} of {NUM_MICROBATCHES}"),
        ("seconds in the training loop", saving, f"part of the {steps['quiet']:.2f} of a step with it alone"),
        ("needed to read it", f"pickle, with {modules}", "numpy and h5py"),
    ]  # fmt: skip
    print("\n| | DumpTensors | incident |\n|---|---|---|")
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |")


def total(paths: list[Path]) -> float:
    return sum(path.stat().st_size for path in paths) / 2**20


def pickled_modules(path: Path) -> set[str]:
    """Top-level modules that unpickling a file imports."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        operations = list(pickletools.genops(archive.read(name)))
    texts, found = [], set()
    for operation, argument, _ in operations:
        if operation.name == "GLOBAL":
            found.add(str(argument).split(" ")[0].split(".")[0])
        elif operation.name == "STACK_GLOBAL" and len(texts) >= 2:
            found.add(texts[-2].split(".")[0])
        elif isinstance(argument, str):
            texts.append(argument)
    return found


if __name__ == "__main__":
    main()
