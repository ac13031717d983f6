"""crc32 of a whole from the crc32 of its parts, so that parts can be read in any order, on any thread. No state.

The arithmetic of zlib's ``crc32_combine``, which Python does not offer: a crc32 is a polynomial over two elements, and
appending n bytes multiplies it by x to the power 8 n, modulo the crc's own polynomial. Bits are reflected: the highest
one stands for x to the power 0.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000


def combine(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of two parts together.

    Args:
        first: of the first part.
        second: of the second part, begun anew.
        second_bytes: its length.
    """
    return _multiply(_power_of_bytes(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    product = 0
    mask = _ONE
    while mask:
        if a & mask:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        mask >>= 1
    return product


@lru_cache(maxsize=256)
def _power_of_bytes(num_bytes: int) -> int:
    """The polynomial x to the power ``8 num_bytes``."""
    power, square, left = _ONE, _ONE >> 8, num_bytes
    while left:
        if left & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        left >>= 1
    return power
