"""What ``flightrec export`` writes: one record or one product, as arrays, a description, and a script that runs them.

The folder needs neither flightrec nor the incident. Owns no state; runs in the child process of the command.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.analysis.incident import open_incident
from flightrec.codecs import quantized, sides, simple
from flightrec.errors import FormatError, IncidentError
from flightrec.reports import arrays, operands
from flightrec.reports.summary import key_of, plain
from flightrec.storage.record import HIGH_PRECISION, Record

DOCUMENT = "flightrec-export"
VERSION = 1
MAX_CHECKED = 1 << 26
"""Elements up to which the script's way of decoding is compared with the codecs'; no rule depends on the size."""

_SCRIPTS = (("interop", "reproduce.py"), ("interop", "te_tensors.py"), ("codecs", "te_layout.py"))
_INSIDE = "from flightrec.codecs import te_layout"

Document = dict[str, Any]


def export_path(path: Path, *, output: str, product: str | None = None, kind: str = "npz", **filters: Any) -> Document:
    """Write a folder.

    Args:
        path: of an incident.
        output: the folder; must not be there.
        product: ``forward``, ``dgrad`` or ``wgrad``; None: one record.
        kind: ``npz`` or ``safetensors``.
        filters: those of ``Incident.records`` and ``call``: layer, tensor, part, attempt, iteration, microbatch, rank,
            stage.

    Returns:
        What was written, as JSON data: ``folder``, ``files``, ``bytes``, ``tensors`` (role to key and place), and
        ``num_others``, how many more the same words name.

    Raises:
        IncidentError: there is no such record, it has no bytes, or they are damaged.
        MissingExtraError: ``safetensors`` is not installed.
    """
    target = Path(output)
    if target.exists():
        raise IncidentError(f"{target}: is there already and is never replaced")
    arrays.load(kind)
    wanted = {name: value for name, value in filters.items() if value is not None}
    with open_incident(path) as incident:
        if product is None:
            chosen = operands.choose(incident, **wanted)
            found, num_others = {"record": chosen.record}, chosen.num_others
        else:
            found, num_others = operands.product(incident, product, **wanted)
        stored: dict[str, tuple[npt.NDArray[Any], str]] = {}
        manifest: Document = {
            "document": DOCUMENT,
            "version": VERSION,
            "kind": "record" if product is None else "product",
            "incident": {"id": incident.incident_id, "run_id": incident.run_id, "versions": dict(incident.versions)},
            "tensors": {role: _tensor(role, record, stored) for role, record in found.items()},
        }
    if product is not None:
        out = found.get("output")
        manifest |= {"product": product, "formula": operands.FORMULAS[product], "sides": operands.SIDES[product]}
        manifest["step"] = operands.rounding_steps().get(out.dtype if out else "float32", 2.0**-7)
    return {**_write(target, kind, manifest, stored), "num_others": num_others}


def _tensor(role: str, record: Record, stored: dict[str, tuple[npt.NDArray[Any], str]]) -> Document:
    """Describe one record; its arrays go to ``stored``."""
    here = [part for part in record.components if record.has_bytes(part.name)]
    for part in here:
        stored[f"{role}.{part.name}"] = (record.raw(part.name), part.format)
    entry: Document = {
        "key": key_of(record.key),
        "rank": record.rank,
        "attempt": record.attempt,
        "iteration": record.iteration,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "statistics": plain(record.statistics),
        "metadata": plain(record.metadata),
        "components": {
            part.name: {"array": f"{role}.{part.name}", "format": part.format, "shape": list(part.shape)}
            for part in here
        },
        "sides": {},
    }
    codes = {part.name: stored[f"{role}.{part.name}"][0] for part in here if part.name != HIGH_PRECISION}
    formats = {part.name: part.format for part in here if part.name != HIGH_PRECISION}
    for side in quantized.sides_of(codes):
        told = _side(f"{role}.{side}", record, codes, formats, side, stored)
        if told is not None:
            entry["sides"][side] = {"codes": f"{role}.{sides.prefix_of(side)}data", **told}
    return entry


def _side(
    name: str,
    record: Record,
    codes: Mapping[str, npt.NDArray[Any]],
    formats: Mapping[str, str],
    side: str,
    stored: dict[str, tuple[npt.NDArray[Any], str]],
) -> Document | None:
    """How the script decodes one side: by a rule where there is one, else from numbers that are decoded here.

    None for a class that is not understood: its arrays are there.
    """
    shape = record.shape
    taken = sides.take(codes, record.metadata, formats=formats, shape=shape, side=side)
    told: Document = {"rht": bool(taken.metadata.get("rht")), "crc32": None, "format": taken.format}
    try:
        rule = simple.simplify(taken)
    except FormatError:
        rule = None
    if rule is not None and math.prod(rule.shape) > MAX_CHECKED:
        return told | _rule(name, rule, stored)
    try:
        values = quantized.dequantize(codes, record.metadata, formats=formats, shape=shape, side=side)
    except FormatError:
        return None
    told["crc32"] = checksum(values)
    if rule is not None and checksum(simple.apply(rule, taken.codes())) == told["crc32"]:
        return told | _rule(name, rule, stored)
    stored[f"{name}.values"] = (values, "float32")
    return told | {"values": f"{name}.values"}


def _rule(name: str, rule: simple.Simple, stored: dict[str, tuple[npt.NDArray[Any], str]]) -> Document:
    told: Document = {**rule.to_json(), "scales": None}
    if rule.scales is not None:
        told["scales"] = f"{name}.scales"
        stored[f"{name}.scales"] = (np.ascontiguousarray(rule.scales, dtype=np.float32), "float32")
    return told


def checksum(values: npt.NDArray[np.float32]) -> int:
    """Of float32 numbers; every NaN counts as the same, as in the script."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return zlib.crc32(np.where(np.isnan(values), np.uint32(0x7FC00000), bits).astype("<u4").tobytes())


def _write(target: Path, kind: str, manifest: Document, stored: arrays.Arrays) -> Document:
    """Fill the folder under another name, then give it its own."""
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        manifest["file"] = arrays.write(partial, kind, stored)
        manifest["arrays"] = {
            name: {"format": form, "stored": array.dtype.str, "shape": list(array.shape)}
            for name, (array, form) in stored.items()
        }
        (partial / "record.json").write_text(json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8")
        root = resources.files("flightrec")
        for package, name in _SCRIPTS:
            text = (root / package / name).read_text(encoding="utf-8")
            (partial / name).write_text(text.replace(_INSIDE, "import te_layout"), encoding="utf-8")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    files = sorted(path.name for path in target.iterdir())
    return {
        "folder": str(target),
        "files": files,
        "bytes": sum((target / name).stat().st_size for name in files),
        "tensors": {
            role: {name: entry[name] for name in ("key", "rank", "attempt", "iteration")}
            for role, entry in manifest["tensors"].items()
        },
    }
