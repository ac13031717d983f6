from __future__ import annotations

import zlib

import numpy as np

from flightrec.storage.payload import Array, Checksums


def test_checksums_of_small_and_of_large_buffers():
    large = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    for views in ([], [memoryview(b"abc"), memoryview(b"")], [memoryview(large), memoryview(large)[5:]]):
        assert Checksums(views).results() == [zlib.crc32(view) for view in views]


def test_an_arrays_checksum_comes_from_its_parts_in_any_order():
    data = bytes(range(256)) * 3
    array = Array("data", len(data), 0)
    for start, stop in [(500, 768), (0, 200), (200, 500)]:
        array.parts[start] = (stop - start, zlib.crc32(data[start:stop]))
    assert array.crc32() == zlib.crc32(data)
    assert Array("data", 0, -1).crc32() == 0
