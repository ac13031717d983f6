from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest

from flightrec.storage import disk


def refusing_beyond(limit: int):
    """Stand in for a full disk: ``pwrite`` that refuses what ends beyond the limit."""
    pwrite = os.pwrite

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    return write


def test_hdf5_goes_on_over_a_full_disk_and_reads_its_own_bytes(tmp_path: Path, monkeypatch) -> None:
    target = disk.ForgivingFile(tmp_path / "x.h5")
    monkeypatch.setattr(os, "pwrite", refusing_beyond(3000))
    with h5py.File(target, "w", libver=("earliest", "v110")) as file:
        for number in range(200):
            file.create_dataset(f"{number}/values", data=np.arange(number))
            file.flush()
        assert [file[f"{number}/values"].shape for number in range(200)] == [(number,) for number in range(200)]
        assert file["199/values"][()].tolist() == list(range(199))
    assert target.error is not None
    assert target.error.errno == errno.ENOSPC
    target.close()
    target.close()


def test_reads_mix_the_disk_with_what_it_refused(tmp_path: Path, monkeypatch) -> None:
    target = disk.ForgivingFile(tmp_path / "x")
    target.write(b"0123456789")
    monkeypatch.setattr(os, "pwrite", refusing_beyond(10))
    target.seek(8)
    target.write(b"abcd")
    target.seek(6)
    assert target.read(8) == b"67abcd\0\0"
    assert target.tell() == 14
    assert target.seek(0, os.SEEK_END) == 12
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_healthy_disk_holds_the_same_file_as_a_path(tmp_path: Path) -> None:
    target = disk.ForgivingFile(tmp_path / "x.h5")
    with h5py.File(target, "w", libver=("earliest", "v110")) as file:
        file["a/b"] = np.arange(1000)
    target.close()
    assert target.error is None
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["a/b"][()].tolist() == list(range(1000))


def test_payload_errors_are_raised_and_remembered(tmp_path: Path) -> None:
    target = disk.ForgivingFile(tmp_path / "x")
    target.write_payload([(0, memoryview(b"abc"))])
    assert target.error is None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            target.write_payload([(3, memoryview(b"d"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert target.error is not None


def test_payload_goes_to_its_places_neighbours_in_one_call(tmp_path: Path, monkeypatch) -> None:
    calls = []
    pwritev = os.pwritev

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append((offset, len(buffers)))
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    target = disk.ForgivingFile(tmp_path / "x")
    many = [(10_000 + number, memoryview(bytes([number % 251]))) for number in range(1500)]
    target.write_payload([(8, memoryview(b"ij")), (0, memoryview(b"abcd")), (4, memoryview(b"efgh")), *many])
    assert calls == [(0, 3), (10_000, 1024), (11_024, 476)]
    stored = (tmp_path / "x").read_bytes()
    assert stored[:10] == b"abcdefghij"
    assert stored[10_000:] == bytes(number % 251 for number in range(1500))


def test_a_refused_truncation_is_remembered(tmp_path: Path, monkeypatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    target = disk.ForgivingFile(tmp_path / "x")
    monkeypatch.setattr(os, "ftruncate", refuse)
    assert target.truncate(100) == 100
    assert target.error is not None


def test_an_existing_file_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        disk.ForgivingFile(tmp_path / "x")
