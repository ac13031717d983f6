"""Quantization or its scale: the tensor before is clean, its codes or its scale are not. Statistics alone, no state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flightrec.analysis.blame import Finding
from flightrec.analysis.changes import Change
from flightrec.analysis.verdict import name_of
from flightrec.storage.rank import Rank
from flightrec.storage.record import Record

STALE_ITERATIONS = 2
"""A scale that stood still for so long while its tensor's amax moved by ``STALE_FACTOR`` is called stale."""

STALE_FACTOR = 4.0

FULL = 0.99
"""Amax times the scale, as a share of the format's range, from which a code must stand at the largest value."""

FITS = 0.5
"""The same share from which a scale keeps values from becoming zero."""

LOST = 0.99
"""Share of codes that are zero from which the quantizer is said to have lost all values."""

TINY = 1e-30
"""An amax below it makes a scale of float32 that is not finite."""

_SERIES = ("layer", "tensor", "part", "phase", "call", "stage")


@dataclass(frozen=True)
class Told:
    """What statistics tell of one record: is the scale at fault, how sure, one sentence, and the evidence."""

    is_scale: bool
    is_certain: bool
    sentence: str
    evidence: tuple[str, ...]


def tell_quantizing(rank: Rank, origin: Finding) -> Told | None:
    """Tell whether the scale or the quantization of a record is at fault; None if its statistics do not say.

    Args:
        rank: whose record it is.
        origin: a finding of a rule about quantization, with a record.

    Raises:
        IncidentError: a table is damaged.
    """
    row = rank.records[origin.record]
    stale = stale_scale(rank, origin.record)
    if stale:
        clipped = row["range_ratio"] > 1 and row["clipped_count"] > 0
        evidence = [stale, *([_clipped(row)] if clipped else [])]
        if row["amax_history_max"] == 0:
            evidence.append("the recorded amax history holds zeros only: no amax ever reached the scale.")
        return Told(True, bool(clipped), "the scale is stale: it did not follow its tensor", tuple(evidence))
    if "range_ratio" not in (row.dtype.names or ()):  # a file before 1.1
        return None
    return _of_another_scale(rank, origin) or _lost(row)


def tiny_amax(row: npt.NDArray[np.void]) -> str:
    """A sentence if a scale made of the record's amax cannot be finite, else empty."""
    amax = float(row["amax"])
    if not amax < TINY:  # NaN: not known
        return ""
    return f"its amax is {amax:.4g}, and what is divided by that is not finite: the amax has no lower bound."


def stale_scale(rank: Rank, record: int) -> str:
    """A sentence if the scale of a record stood still while the amax of its tensor moved, else empty."""
    moved = _amax_while_unchanged(rank, record)
    if moved is None:
        return ""
    return f"the scale is {Record(rank, record).scale_age}, while amax went between {moved[0]:.4g} and {moved[1]:.4g}."


def unchanged_scale(rank: Rank, origin: Finding) -> Change | None:
    """A scale that stood still while amax moved, as a precursor of what it led to."""
    age = Record(rank, origin.record).scale_age if origin.record >= 0 else None
    stale = stale_scale(rank, origin.record) if age is not None else ""
    if age is None or not stale or origin.key is None:
        return None
    word = float(rank.records[origin.record]["scale_max"])
    sentence = f"the scale of {name_of(origin.key)} stood at {word:.4g}: {stale.rstrip('.')}"
    return Change(
        label="precursor", statistic="scale_max", key=origin.key.series, rank=rank.rank, attempt=origin.attempt,
        iteration=origin.iteration - age.unchanged_iterations, before=word, after=word, sentence=sentence,
    )  # fmt: skip


def _amax_while_unchanged(rank: Rank, record: int) -> tuple[float, float] | None:
    age = Record(rank, record).scale_age
    if age is None or age.unchanged_iterations < STALE_ITERATIONS:
        return None
    table, now = rank.records, rank.records[record]
    since = now["iteration"] - age.unchanged_iterations
    same = (table["attempt"] == now["attempt"]) & (table["iteration"] >= since)
    same &= table["iteration"] <= now["iteration"]
    for column in (*_SERIES, "microbatch"):
        same &= table[column] == now[column]
    amax = table["amax"][same]
    amax = amax[np.isfinite(amax) & (amax > 0)]
    if not len(amax) or amax.max() < STALE_FACTOR * amax.min():
        return None
    return float(amax.min()), float(amax.max())


def _clipped(row: npt.NDArray[np.void]) -> str:
    share = 100 * float(row["clipped_count"]) / max(1.0, float(row["quantized_numel"]))
    return f"scaled by it, {share:.3g}% of the values are clipped, the largest is {row['range_ratio']:.4g} x the range."


def _of_another_scale(rank: Rank, origin: Finding) -> Told | None:
    """Codes that were made with another scale: they do not fill the range that amax times the scale fills."""
    row = rank.records[origin.record]
    if not (FULL <= row["range_ratio"] <= 1 / FULL and row["quantized_saturated_count"] == 0):
        return None
    if origin.kind != "quantization_error":
        return None
    evidence = f"amax times the scale is {row['range_ratio']:.3g} x the range, yet no code stands at its largest value."
    before = _same_codes(rank, origin.record)
    if before is None:
        return None
    words = (
        f"the scale went from {before['scale_max']:.4g} to {row['scale_max']:.4g} since iteration "
        f"{before['iteration']}, microbatch {before['microbatch']}, while as many codes are zero as there."
    )
    return Told(
        True, False, "the scale moved on, the codes did not: they belong to the scale before", (evidence, words)
    )


def _same_codes(rank: Rank, record: int) -> npt.NDArray[np.void] | None:
    """The latest record of the same tensor before, if its codes count the same and its scale is another."""
    table, now = rank.records, rank.records[record]
    same = (table["attempt"] == now["attempt"]) & (np.arange(len(table)) < record)
    for column in _SERIES:
        same &= table[column] == now[column]
    rows = np.flatnonzero(same)
    if not len(rows):
        return None
    before: npt.NDArray[np.void] = table[rows[-1]]
    counts = ("quantized_numel", "quantized_zero_count", "quantized_nan_count", "quantized_saturated_count")
    kept = all(before[name] == now[name] for name in counts)
    return before if kept and before["scale_max"] != now["scale_max"] else None


def _lost(row: npt.NDArray[np.void]) -> Told | None:
    """Codes that are all zero although the scale would have kept the values."""
    zeros, total = float(row["quantized_zero_count"]), float(row["quantized_numel"])
    ratio = float(row["range_ratio"])
    if not (total > 0 and zeros >= LOST * total and row["amax"] > 0 and math.isfinite(ratio) and ratio >= FITS):
        return None
    evidence = (
        f"{zeros:.0f} of {total:.0f} codes are zero, while the tensor before has amax {row['amax']:.4g}.",
        f"the scale fits: it puts the largest value at {ratio:.3g} x the format's range.",
    )
    return Told(False, True, "the quantizer gave zeros for values that its scale would have kept", evidence)
