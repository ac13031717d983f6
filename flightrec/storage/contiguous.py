"""Lays out datasets in an HDF5 file without writing them: a place and no content. Runs in the writer process.

Uses h5py's low-level interface with property lists, types and spaces made once: an incident has tens of thousands of
small datasets, and the high-level interface takes twice the time for each.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np


class DatasetAllocator:
    """Creates early-allocated contiguous datasets with the attributes ``format`` and ``record``.

    One thread at a time; holds the file only through the h5py object that was given.
    """

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._creation.set_layout(h5py.h5d.CONTIGUOUS)
        self._creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._creation.set_obj_track_times(False)
        self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5py.h5t.CSET_UTF8)
        self._scalar = h5py.h5s.create(h5py.h5s.SCALAR)
        self._text = h5py.h5t.py_create(h5py.string_dtype("utf-8"), logical=True)
        self._number = h5py.h5t.STD_I64LE
        self._types: dict[np.dtype[Any], Any] = {}
        self._formats: dict[str, Any] = {}

    def create_group(self, path: str) -> h5py.h5g.GroupID:
        """Create a group and those above it (``ValueError`` when it exists)."""
        return h5py.h5g.create(self._file.id, path.encode(), lcpl=self._links)

    def create(
        self, group: h5py.h5g.GroupID, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], form: str, record: int
    ) -> int:
        """Create one dataset and give its offset in the file in bytes, -1 when it has no elements.

        Args:
            group: where.
            name: link name.
            shape: empty for a scalar.
            dtype: of the stored elements.
            form: value of the attribute ``format``.
            record: value of the attribute ``record``.
        """
        return _offset(self._create(group, name.encode(), shape, dtype, form, record))

    def create_unlinked(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], form: str, record: int
    ) -> tuple[h5py.h5d.DatasetID, int]:
        """As ``create``, but a reader does not see the dataset before ``link``; it goes if that never comes.

        Returns:
            the dataset, to be kept until then, and its offset.
        """
        dataset = self._create(self._file.id, None, shape, dtype, form, record)
        return dataset, _offset(dataset)

    def link(self, dataset: h5py.h5d.DatasetID, group: h5py.h5g.GroupID, name: str) -> None:
        """Give an unlinked dataset its name."""
        h5py.h5o.link(dataset, group, name.encode(), lcpl=self._links)

    def _create(
        self,
        group: h5py.h5g.GroupID,
        name: bytes | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        form: str,
        record: int,
    ) -> h5py.h5d.DatasetID:
        if dtype not in self._types:
            self._types[dtype] = h5py.h5t.py_create(dtype, logical=True)
        if form not in self._formats:
            self._formats[form] = np.array(form, dtype=object)
        space = h5py.h5s.create_simple(shape) if shape else self._scalar
        dataset = h5py.h5d.create(group, name, self._types[dtype], space, dcpl=self._creation)
        h5py.h5a.create(dataset, b"format", self._text, self._scalar).write(self._formats[form])
        h5py.h5a.create(dataset, b"record", self._number, self._scalar).write(np.array(record, dtype="<i8"))
        return dataset


def _offset(dataset: h5py.h5d.DatasetID) -> int:
    offset = dataset.get_offset()
    return -1 if offset is None else int(offset)
