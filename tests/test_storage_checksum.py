from __future__ import annotations

import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from flightrec.storage.checksum import combine


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 70_000))
def test_the_parts_checksums_give_the_whole_ones(first, second, padding):
    second += bytes(padding)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_more_than_four_gibibytes():
    """Twice 2^32 zeros equal 2^33 of them, put together from other parts."""
    crc, length = zlib.crc32(bytes(1 << 20)), 1 << 20
    while length < 1 << 33:
        crc, length = combine(crc, crc, length), 2 * length
    thirds, part = 0, (1 << 20) * 2048
    two_gib, size = zlib.crc32(bytes(1 << 20)), 1 << 20
    while size < part:
        two_gib, size = combine(two_gib, two_gib, size), 2 * size
    for _ in range(4):
        thirds = combine(thirds, two_gib, part) if thirds else two_gib
    assert thirds == crc
