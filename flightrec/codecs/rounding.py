"""Numbers to codes of a format of 8 bits or less: to nearest, ties to even, saturating; and which codes lie beside.

Codes are compared by *rank*: their position among the format's numbers in order, -0 just below +0. So "one of the two
neighbours" and "within a tolerance" are intervals of ranks. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base
from flightrec.errors import FormatError

Floats = npt.NDArray[np.float32]
Ranks = npt.NDArray[np.int16]

_NORMAL = np.float32(2.0**-126)
_LARGEST = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float6_e2m3fn": 7.5,
    "float6_e3m2fn": 28.0,
    "float4_e2m1fn_x2": 6.0,
}
"""Largest finite value of the formats that numbers are rounded to."""


@dataclass(frozen=True)
class Grid:
    """A format's numbers in order.

    Attributes:
        name: of the element format.
    """

    name: str

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Of ``ml_dtypes``."""
        dtype = base.element_format(self.name).codes
        assert dtype is not None
        return dtype

    @cached_property
    def largest(self) -> float:
        """Largest finite value."""
        return _LARGEST[self.name]

    @cached_property
    def bits(self) -> int:
        """Of a code."""
        return base.element_format(self.name).bits

    @cached_property
    def has_nan(self) -> bool:
        """Whether a code stands for NaN: FP4 and FP6 have none."""
        return self.bits == 8

    @cached_property
    def top(self) -> int:
        """Rank of the largest finite value."""
        return int(self.rank(np.array([self.largest], np.float32).astype(self.dtype).view(np.uint8))[0])

    def rank(self, codes: npt.NDArray[np.uint8]) -> Ranks:
        """Position of each code, one a byte: 0 for +0, -1 for -0. Codes of infinity and NaN lie beyond ``top``."""
        sign = 1 << (self.bits - 1)
        magnitude = (codes & (sign - 1)).astype(np.int16)
        return np.where(codes & sign, -1 - magnitude, magnitude)

    def value(self, ranks: Ranks) -> Floats:
        """The number at a rank."""
        sign = 1 << (self.bits - 1)
        codes = np.where(ranks < 0, (-1 - ranks) | sign, ranks).astype(np.uint8)
        return codes.view(self.dtype).astype(np.float32)

    def nearest(self, values: Floats) -> Ranks:
        """Rank of the nearest number, ties to even, beyond the range the largest; NaN gives rank 0."""
        with np.errstate(invalid="ignore"):
            inside = np.clip(np.where(np.isnan(values), np.float32(0), values), -self.largest, self.largest)
            return self.rank(inside.astype(np.float32).astype(self.dtype).view(np.uint8))

    def interval(self, values: Floats, width: Floats) -> tuple[Ranks, Ranks]:
        """Lowest and highest rank that numbers up to ``width`` away from the values round to."""
        if not width.any():
            ranks = self.nearest(values)
            return ranks, ranks
        with np.errstate(all="ignore"):
            width = np.where(np.isfinite(values), width, np.float32(0))
            return self.nearest(values - width), self.nearest(values + width)

    def neighbours(self, values: Floats) -> tuple[Ranks, Ranks]:
        """Ranks of the numbers just below and above: what stochastic rounding may choose between."""
        ranks = self.nearest(values)
        with np.errstate(invalid="ignore"):
            inside = np.clip(np.where(np.isnan(values), np.float32(0), values), -self.largest, self.largest)
        found = self.value(ranks)
        low = np.where(found > inside, ranks - 1, ranks).astype(np.int16)
        high = np.where(found < inside, ranks + 1, ranks).astype(np.int16)
        return np.where(low == 0, np.int16(-1), low), np.where(high == -1, np.int16(0), high)


@lru_cache(maxsize=32)
def grid(name: str) -> Grid:
    """The numbers of a format.

    Raises:
        FormatError: it is none of those that flightrec can round to.
    """
    if name not in _LARGEST:
        raise FormatError(f"rounding to {name!r} is not known to this version; expected {', '.join(sorted(_LARGEST))}")
    return Grid(name)


def is_denormal(values: Floats) -> npt.NDArray[np.bool_]:
    """Non-zero float32 values below the normal range: hardware may take them for zero (FTZ), numpy does not."""
    magnitude = np.abs(values)
    return (magnitude < _NORMAL) & (magnitude > 0)
