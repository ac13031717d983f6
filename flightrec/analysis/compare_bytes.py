"""Compares one stored array of two records: by checksum, then piece by piece, bit by bit or within a tolerance.

Memory is bounded whatever the arrays' size; what cannot be read is told, not raised. Pure functions, no state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flightrec.codecs import base
from flightrec.errors import ConfigError, IncidentError
from flightrec.storage.rank import StoredComponent
from flightrec.storage.record import Record

MAX_ELEMENTS = 1 << 20
"""Elements that are compared at once: about 50 MiB of working memory."""

EQUAL, WITHIN, DIFFERENT, UNREAD = "equal", "within", "different", "unread"
OWN_STEP = "format"

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tolerance:
    """How far two elements of a format may lie apart, relative to the larger one.

    Attributes:
        everywhere: for formats that ``formats`` does not name; None: bit by bit.
        formats: by element format.
        own_step: where nothing is named, one step of the format's last bit of mantissa (2^-7 for bfloat16, 2^-3 for
            float8_e4m3fn, ...).
    """

    everywhere: float | None = None
    formats: Mapping[str, float] = field(default_factory=dict)
    own_step: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Tolerance:
        """Read ``0.01``, ``bfloat16=0.01`` or ``format``, one or more of them.

        Raises:
            ConfigError: a text is none of these.
        """
        everywhere, formats, own_step = None, {}, False
        for text in texts:
            name, equals, value = text.rpartition("=")
            if text == OWN_STEP:
                own_step = True
                continue
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not number >= 0 or (equals and name not in base.FORMATS):
                known = ", ".join(sorted(base.FORMATS))
                raise ConfigError(
                    f"--tolerance {text}: expected a number, FORMAT=NUMBER or the word {OWN_STEP}; formats are {known}"
                )
            if equals:
                formats[name] = number
            else:
                everywhere = number
        return cls(everywhere, formats, own_step)

    @property
    def is_exact(self) -> bool:
        """Whether everything is compared bit by bit."""
        return self.everywhere is None and not self.formats and not self.own_step

    def of(self, name: str) -> float | None:
        """For one element format; None: bit by bit."""
        if name in self.formats:
            return self.formats[name]
        return step_of(name) if self.own_step and self.everywhere is None else self.everywhere

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"everywhere": self.everywhere, "formats": dict(self.formats), "own_step": self.own_step}


def step_of(name: str) -> float | None:
    """Distance of two neighbours of an element format, relative to the larger; None for what is no floating point."""
    element = base.FORMATS.get(name)
    if element is None:
        return None
    kind = element.storage if element.codes is None else element.codes
    if name in ("bool", "complex32") or (element.codes is None and kind.kind not in "fc"):
        return None
    if name == "float8_e8m0fnu":
        return 0.5
    return float(_limits(kind).eps)


def smallest_of(name: str) -> float:
    """Smallest normal number of an element format, 0 for what is no floating point."""
    element = base.FORMATS.get(name)
    if element is None or step_of(name) is None or name == "float8_e8m0fnu":
        return 0.0
    kind = element.storage if element.codes is None else element.codes
    return float(_limits(kind).smallest_normal)


def _limits(kind: np.dtype[Any]) -> Any:
    finfo: Any = ml_dtypes.finfo  # knows numpy's own types too
    return finfo(kind)


@dataclass
class Comparison:
    """What was found about one component of two records.

    Attributes:
        component: its name.
        format: element format, that of A.
        status: ``equal``, ``within`` (the tolerance), ``different``, or ``unread``: they differ by their checksums, or
            cannot be compared, see ``note``.
        num_elements: that were compared; 0 if nothing was read.
        num_different: of them; beyond the tolerance, if there is one.
        num_nan_a: NaN only in A.
        num_nan_b: NaN only in B.
        max_difference: largest distance where both are finite.
        max_relative: the same, relative to the larger of the two.
        first: index of the first that differs, with both values; likewise ``worst``, by distance.
        note: why it was not read, or what is damaged.
    """

    component: str
    format: str
    status: str
    num_elements: int = 0
    num_different: int = 0
    num_nan_a: int = 0
    num_nan_b: int = 0
    max_difference: float = 0.0
    max_relative: float = 0.0
    first: tuple[tuple[int, ...], float, float] | None = None
    worst: tuple[tuple[int, ...], float, float] | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers may be infinite or NaN."""
        element = {
            name: None if found is None else {"index": list(found[0]), "a": found[1], "b": found[2]}
            for name, found in (("first", self.first), ("worst", self.worst))
        }
        return {**vars(self), **element}


def compare_component(a: Record, b: Record, name: str, tolerance: Tolerance, *, details: bool) -> Comparison:
    """Compare one component of two records.

    Args:
        a: one record.
        b: the other.
        name: of a component that both name.
        tolerance: how far elements may lie apart.
        details: read both although the checksums differ and the verdict is known: how many elements, which, how far.
    """
    one, other = (next(part for part in record.components if part.name == name) for record in (a, b))
    found = Comparison(name, one.format, UNREAD)
    if (one.format, one.shape) != (other.format, other.shape):
        found.status = DIFFERENT
        found.note = f"{one.format} {list(one.shape)} against {other.format} {list(other.shape)}"
        return found
    for side, record in (("A", a), ("B", b)):
        if not record.has_bytes(name):
            found.note = f"{side} has no bytes: {record.why_absent or 'statistics only'}"
            return found
    sums = a.crc32(name), b.crc32(name)
    if None not in sums and sums[0] == sums[1]:
        found.status = EQUAL
        return found
    allowed = tolerance.of(one.format)
    if None not in sums and allowed is None and not details:
        found.status, found.note = DIFFERENT, "the checksums differ; the elements were not read"
        return found
    try:
        _read(a, b, one, allowed, found)
    except IncidentError as error:
        found.status, found.note = DIFFERENT, str(error)
    return found


def _read(a: Record, b: Record, part: StoredComponent, allowed: float | None, found: Comparison) -> None:
    """Go through both arrays together; fills ``found``."""
    told = [a.crc32(part.name), b.crc32(part.name)]
    sums = [0, 0]
    start, bits_differ = 0, False
    element = base.FORMATS.get(part.format)
    for pair in zip(*(r.chunks(part.name, max_elements=MAX_ELEMENTS) for r in (a, b)), strict=False):
        sums = [zlib.crc32(np.ascontiguousarray(it).view("u1").data, s) for it, s in zip(pair, sums, strict=True)]
        if pair[0].shape != pair[1].shape or any(element and it.dtype != element.storage for it in pair):
            raise IncidentError(f"the stored arrays are not {part.format} {list(part.shape)} as their tables say")
        if pair[0].tobytes() != pair[1].tobytes():
            bits_differ = True
            _add(found, pair[0], pair[1], part, allowed, start)
        start += pair[0].size
    found.num_elements = start * (element.elements_per_item if element else 1)
    damaged = [side for side, crc, want in zip("AB", sums, told, strict=True) if want is not None and crc != want]
    if damaged:
        found.note = f"damaged in {' and '.join(damaged)}: the checksum is not that of the bytes"
    found.status = DIFFERENT if found.num_different or damaged else WITHIN if bits_differ else EQUAL


def _add(
    found: Comparison,
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    part: StoredComponent,
    allowed: float | None,
    start: int,
) -> None:
    """Count what differs in one piece; ``start`` is its first stored element."""
    values = [_values(it, part.format) for it in (a, b)]
    nan = [np.isnan(it) for it in values]
    with np.errstate(all="ignore"):
        distance = np.abs(values[0] - values[1])
        larger = np.maximum(np.abs(values[0]), np.abs(values[1]))
        both_finite = np.isfinite(larger) & np.isfinite(distance)
        if allowed is None:
            differs = _bits_differ(a, b, part.format)
        else:
            near = both_finite & (distance <= allowed * (larger + smallest_of(part.format)))
            differs = ~(near | (values[0] == values[1]) | (nan[0] & nan[1]))
        relative = np.where(both_finite & (larger > 0), distance / larger, 0.0)
    found.num_different += int(differs.sum())
    found.num_nan_a += int((nan[0] & ~nan[1]).sum())
    found.num_nan_b += int((nan[1] & ~nan[0]).sum())
    distance = np.where(both_finite, distance, 0.0)
    at = int(distance.argmax())
    per_item = values[0].size // a.size
    if distance[at] > found.max_difference:
        found.max_difference = float(distance[at])
        found.worst = _element(part, start * per_item + at, per_item, values, at)
    found.max_relative = max(found.max_relative, float(relative.max()))
    if found.first is None and differs.any():
        at = int(differs.argmax())
        found.first = _element(part, start * per_item + at, per_item, values, at)


def _element(
    part: StoredComponent, flat: int, per_item: int, values: list[Numbers], at: int
) -> tuple[tuple[int, ...], float, float]:
    shape = (*part.shape[:-1], part.shape[-1] * per_item) if part.shape else ()
    index = tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()
    return index, float(values[0][at]), float(values[1][at])


def _values(stored: npt.NDArray[Any], form: str) -> Numbers:
    """Numbers of stored elements, float64; of complex ones the magnitude, of unknown formats the bytes."""
    if form not in base.FORMATS:
        return stored.view("u1").astype(np.float64)
    values = base.decode(stored, form)
    if values.dtype.kind == "c":
        values = np.abs(values)
    return np.asarray(values, dtype=np.float64)


def _bits_differ(a: npt.NDArray[Any], b: npt.NDArray[Any], form: str) -> npt.NDArray[np.bool_]:
    if form in base.FORMATS and base.FORMATS[form].elements_per_item == 2:
        a, b = base.unpack_fp4(a), base.unpack_fp4(b)
    bytes_of = [np.ascontiguousarray(it).view("u1").reshape(it.size, -1) for it in (a, b)]
    return np.asarray((bytes_of[0] != bytes_of[1]).any(axis=1))
