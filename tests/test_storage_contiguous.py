from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

from flightrec.storage.contiguous import DatasetAllocator


@pytest.fixture
def file(tmp_path: Path):
    with h5py.File(tmp_path / "x.h5", "w", libver=("earliest", "v110")) as opened:
        yield opened


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", ["<f4", "u1", "<u2", "<c8"])
def test_datasets_have_a_place_and_no_content(file: h5py.File, shape: tuple[int, ...], dtype: str) -> None:
    allocator = DatasetAllocator(file)
    group = allocator.create_group("/a/b%2F/ü")
    offset = allocator.create(group, "data", shape, np.dtype(dtype), "form", 7)
    dataset = file["a/b%2F/ü/data"]
    assert (dataset.shape, dataset.dtype) == (shape, np.dtype(dtype))
    assert dict(dataset.attrs) == {"format": "form", "record": 7}
    assert dataset.chunks is None
    assert (offset == -1) == (dataset.size == 0)
    assert dataset.id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER
    if dataset.size:
        assert offset == dataset.id.get_offset()


def test_places_do_not_overlap(file: h5py.File) -> None:
    allocator = DatasetAllocator(file)
    group = allocator.create_group("/g")
    places = [(allocator.create(group, f"d{size}", (size,), np.dtype("u1"), "uint8", 0), size) for size in range(1, 99)]
    places.sort()
    assert all(one + size <= other for (one, size), (other, _) in pairwise(places))


def test_an_existing_group_is_refused(file: h5py.File) -> None:
    allocator = DatasetAllocator(file)
    allocator.create_group("/a/b")
    allocator.create_group("/a/c")
    with pytest.raises(ValueError, match="exists"):
        allocator.create_group("/a/b")


def test_an_unlinked_dataset_appears_with_its_link_and_goes_without(file: h5py.File) -> None:
    allocator = DatasetAllocator(file)
    kept, offset = allocator.create_unlinked((3,), np.dtype("<u2"), "bfloat16", 5)
    lost, _ = allocator.create_unlinked((2,), np.dtype("u1"), "uint8", 6)
    assert list(file) == []
    allocator.link(kept, allocator.create_group("/a/b"), "data")
    del kept, lost
    file.flush()
    dataset = file["a/b/data"]
    assert (dataset.shape, dataset.dtype, dataset.id.get_offset()) == ((3,), np.dtype("<u2"), offset)
    assert dict(dataset.attrs) == {"format": "bfloat16", "record": 5}
