"""Counts the values and the codes of one stored array, window by window, and keeps the worst elements.

A window is a part of an array that is read at once. Arrays that are too large are sampled: evenly spaced windows.
Offline, any thread; each counter owns its counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flightrec.codecs import base

WINDOW_ELEMENTS = 1 << 22
"""Read at once: 16 MiB of float32."""

NUM_WORST = 10
"""Elements that are named of each kind."""

_EXPONENTS = 1100
"""Binades on each side of 1: all of float64."""


@dataclass(frozen=True)
class Window:
    """A part of an array: slices along its axes, and where it starts in the flattened array."""

    slices: tuple[slice, ...]
    start: int


def windows(shape: Sequence[int], limit: int, max_windows: int) -> tuple[list[Window], int]:
    """Cut an array into windows of at most ``limit`` elements, contiguous in its flattened form.

    Args:
        shape: of the array.
        limit: elements of a window.
        max_windows: when there are more, this many are chosen, evenly spaced.

    Returns:
        The windows, and how many there would be.
    """
    if not shape:
        return [Window((), 0)], 1
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = next(place for place, size in enumerate(inner) if size <= limit or place == len(shape) - 1)
    step = max(1, limit // max(1, inner[axis]))
    blocks = -(-shape[axis] // step)
    total = math.prod(shape[:axis]) * blocks
    if total <= max_windows:
        chosen = list(range(total))
    else:
        chosen = [place * (total - 1) // max(1, max_windows - 1) for place in range(max_windows)]
    return [_window(shape, inner, axis, step, blocks, place) for place in chosen], total


def _window(shape: Sequence[int], inner: Sequence[int], axis: int, step: int, blocks: int, place: int) -> Window:
    outer, block = divmod(place, blocks)
    slices: list[slice] = []
    start = 0
    for before in range(axis - 1, -1, -1):
        outer, index = divmod(outer, shape[before])
        slices.insert(0, slice(index, index + 1))
        start += index * inner[before]
    first = block * step
    slices.append(slice(first, min(first + step, shape[axis])))
    return Window((*slices, *(slice(0, size) for size in shape[axis + 1 :])), start + first * inner[axis])


@dataclass
class Values:
    """Counts values by sign and binade, and keeps the first non-finite and the largest finite ones.

    Attributes:
        shape: of the array, for the indices of elements.
    """

    shape: tuple[int, ...]
    num: int = 0
    zeros: int = 0
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    _positive: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2 * _EXPONENTS, np.int64))
    _negative: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2 * _EXPONENTS, np.int64))
    _largest: list[tuple[float, int, float]] = field(default_factory=list)

    def add(self, values: npt.NDArray[Any], start: int) -> None:
        """Count some values, flat positions ``start`` and on."""
        flat = np.ascontiguousarray(values).reshape(-1)
        self.num += flat.size
        if flat.dtype == np.float32:
            nonfinite = self._count_float32(flat)
        else:
            flat = flat.astype(np.float64)
            nonfinite = np.flatnonzero(~np.isfinite(flat))
            self._count_exactly(flat)
        magnitude = np.abs(flat)
        if nonfinite.size:
            self._count_nonfinite(flat, nonfinite, start)
            magnitude[nonfinite] = 0
        self._keep_largest(flat, magnitude, start)

    def _count_float32(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
        """Count by the bits of sign and exponent, ten times as fast; gives the places of what is not finite."""
        high = (flat.view(np.uint32) >> 23).astype(np.uint16)
        counts = np.bincount(high, minlength=512)
        for target, first in ((self._positive, 0), (self._negative, 256)):  # exponents 1 to 254, biased by 127
            target[_EXPONENTS - 126 : _EXPONENTS + 128] += counts[first + 1 : first + 255]
        if counts[0] + counts[256]:
            self._count_exactly(flat[(high & 0xFF) == 0])  # zeros and subnormals
        return np.flatnonzero((high & 0xFF) == 0xFF) if counts[255] + counts[511] else np.empty(0, np.intp)

    def _count_exactly(self, flat: npt.NDArray[Any]) -> None:
        """Zeros and binades of the finite ones."""
        flat = flat[np.isfinite(flat)]
        self.zeros += int(np.count_nonzero(flat == 0))
        _, exponents = np.frexp(flat)
        bins = exponents.astype(np.int64) - 1 + _EXPONENTS
        for target, chosen in ((self._positive, flat > 0), (self._negative, flat < 0)):
            target += np.bincount(bins[chosen], minlength=2 * _EXPONENTS)

    def told(self) -> dict[str, Any]:
        """As JSON data: counts, the binades that hold something, and the elements."""
        used = np.flatnonzero(self._positive + self._negative)
        low, high = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        largest = sorted(self._largest, reverse=True)
        return {
            "num": self.num,
            "zeros": self.zeros,
            "nan": self.nan,
            "inf": self.positive_inf + self.negative_inf,
            "first_binade": low - _EXPONENTS,
            "positive": self._positive[low:high].tolist(),
            "negative": self._negative[low:high].tolist(),
            "nonfinite": self.nonfinite,
            "largest": [{"index": self._index(place), "value": value} for _, place, value in largest],
        }

    def _count_nonfinite(self, flat: npt.NDArray[Any], places: npt.NDArray[np.intp], start: int) -> None:
        found = flat[places]
        self.nan += int(np.count_nonzero(np.isnan(found)))
        self.positive_inf += int(np.count_nonzero(found == np.inf))
        self.negative_inf += int(np.count_nonzero(found == -np.inf))
        for place in places[: max(0, NUM_WORST - len(self.nonfinite))].tolist():
            value = float(flat[place])
            name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            self.nonfinite.append({"index": self._index(start + place), "value": name})

    def _keep_largest(self, flat: npt.NDArray[Any], magnitude: npt.NDArray[Any], start: int) -> None:
        if len(self._largest) == NUM_WORST and not float(magnitude.max(initial=0)) > self._largest[0][0]:
            return
        count = min(NUM_WORST, flat.size)
        largest = np.argpartition(magnitude, flat.size - count)[flat.size - count :] if count else np.empty(0, np.intp)
        for place in largest.tolist():
            entry = (float(magnitude[place]), start + place, float(flat[place]))
            if entry[0] > 0 and len(self._largest) < NUM_WORST:
                heapq.heappush(self._largest, entry)
            elif entry[0] > 0:
                heapq.heappushpop(self._largest, entry)

    def _index(self, place: int) -> list[int]:
        return [int(part) for part in np.unravel_index(place, self.shape)] if self.shape else []


class Codes:
    """Counts the codes of an 8-bit or narrower format.

    Args:
        name: element format; see ``can_count``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._element = name, base.element_format(name)
        self._bytes = np.zeros(256, np.int64)

    @staticmethod
    def can_count(name: str) -> bool:
        """Whether the format has at most 256 codes that are numbers."""
        element = base.FORMATS.get(name)
        return element is not None and element.storage.itemsize == 1 and name != "bool"

    def add(self, stored: npt.NDArray[Any]) -> None:
        """Count stored items (for packed FP4 bytes with two codes each)."""
        self._bytes += np.bincount(np.ascontiguousarray(stored).view(np.uint8).reshape(-1), minlength=256)

    def told(self) -> dict[str, Any]:
        """As JSON data: ``values`` in rising order with ``counts``, and the special ones apart."""
        counts = self._bytes
        if self._element.elements_per_item == 2:
            square = counts.reshape(16, 16)  # [high nibble, low nibble]
            counts = square.sum(axis=0) + square.sum(axis=1)
        num_codes = 1 << min(8, self._element.bits)
        numbers = _numbers(self._element, num_codes)
        counts = counts[:num_codes]
        finite = np.isfinite(numbers)
        values, places = np.unique(numbers[finite], return_inverse=True)
        joined = np.bincount(places.reshape(-1), weights=counts[finite], minlength=len(values)).astype(np.int64)
        ends = joined[[0, -1]].sum() if len(values) > 1 and values[0] < 0 else joined[-1:].sum()
        return {
            "format": self._name,
            "values": [float(value) for value in values],
            "counts": joined.tolist(),
            "num": int(counts.sum()),
            "nan": int(counts[np.isnan(numbers)].sum()),
            "inf": int(counts[np.isinf(numbers)].sum()),
            "at_largest": int(ends),
            "range": format_range(self._name),
        }


def _numbers(element: base.ElementFormat, num_codes: int) -> npt.NDArray[np.float64]:
    codes = np.arange(num_codes, dtype=np.uint8)
    if element.codes is None:
        return codes.view(element.storage).astype(np.float64)
    return codes.view(element.codes).astype(np.float64)


def format_range(name: str) -> dict[str, float] | None:
    """Largest finite, smallest normal and smallest non-zero magnitude of a floating-point format; None for others."""
    element = base.FORMATS.get(name)
    if element is None:
        return None
    dtype = element.codes if element.codes is not None else element.storage
    if element.codes is None and dtype.kind != "f":
        return None
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return {
        "largest": float(limits.max),
        "smallest_normal": float(limits.smallest_normal),
        "smallest": float(limits.smallest_subnormal) or float(limits.smallest_normal),
    }
