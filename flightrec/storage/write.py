"""Writes an incident's files: facts first, then tensors, at last the index. Runs in the writer process; no torch.

The facts file is laid out in memory and written with plain system calls. The tensors file is laid out by HDF5 on disk,
in early-allocated contiguous datasets whose bytes are written beside it, to their offsets in the file; HDF5 sees the
disk through an object that never fails. Every function writes under a temporary name and publishes a whole file, or
raises ``WriterError`` and leaves nothing under the final name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from flightrec.codecs import base
from flightrec.errors import FormatError, WriterError
from flightrec.records import Component, Firing, RecordLayout
from flightrec.storage import commit, schema, tables, text
from flightrec.storage.contiguous import DatasetAllocator
from flightrec.storage.disk import ForgivingFile
from flightrec.storage.facts import Blind, Identity, IncidentFacts, IterationFacts, RankFiles
from flightrec.storage.payload import Array, Checksums, PendingRecord, Queued

__all__ = [
    "Blind",
    "Identity",
    "IncidentFacts",
    "IterationFacts",
    "RankFiles",
    "TensorsFile",
    "write_facts",
    "write_index",
]

Buffers = Sequence[memoryview] | Callable[[Component], memoryview]
"""Bytes of a record's components: parallel to ``layout.components``, or asked for one by one."""

_FLUSH_BYTES = 256 << 20
_FLUSH_RECORDS = 1024


def write_facts(path: str | Path, facts: IncidentFacts) -> None:
    """Write and commit a rank's facts file.

    A value that cannot be stored is noted in ``/problems``; the rest of the file is written all the same.

    Raises:
        WriterError: the disk refuses or the name is taken; nothing is left under the final name.
    """
    _write_image(Path(path), lambda file: tables.fill_facts(file, facts))


def write_index(
    folder: str | Path, incident_id: str, ranks: Sequence[RankFiles], attributes: Mapping[str, Any] | None = None
) -> Path:
    """Write ``<incident_id>.index.h5``: the rank table, and relative links to the files that are there.

    Args:
        folder: the incident's folder, where the ranks' files lie.
        incident_id: written into the file and its name.
        ranks: one entry a rank; a file that is not in the folder is left out.
        attributes: more root attributes (``run_id``, ``world_size``, ...), numbers or text.

    Raises:
        WriterError: as ``write_facts``.
    """
    folder = Path(folder)
    path = folder / f"{incident_id}.index.h5"
    present = [
        RankFiles(entry.rank, *(name if name and (folder / name).is_file() else "" for name in entry[1:]))
        for entry in ranks
    ]
    _write_image(path, lambda file: tables.fill_index(file, incident_id, present, attributes or {}))
    return path


class TensorsFile:
    """A rank's tensors file while it is written, under its temporary name until ``commit``.

    One thread at a time. What was added stays readable when the process is killed, up to the last ``flush``.
    """

    def __init__(self, path: Path, file: h5py.File, disk: ForgivingFile) -> None:
        self.path = path
        self._file: h5py.File | None = file
        self._disk = disk
        self._allocator = DatasetAllocator(file)
        self._names = text.TextTable()
        self._components: list[tuple[int, int, int, int, int]] = []
        self._queue: list[Queued] = []
        self._complete: list[PendingRecord] = []
        """Their last bytes are queued."""
        self._incomplete: dict[int, PendingRecord] = {}
        """By record; their datasets have no links, so that nobody takes a part for the whole."""
        self._num_bytes = 0
        self._unflushed_bytes = 0
        self._unflushed_records = 0

    @classmethod
    def create(cls, path: str | Path, identity: Identity, facts_file: str = "") -> TensorsFile:
        """Start the file.

        Args:
            path: final name; nothing appears there before ``commit``.
            identity: root attributes, the same as in the facts file.
            facts_file: name of the facts file beside it.

        Raises:
            WriterError: the folder is missing, read-only or full, or a file of the temporary name exists.
        """
        path = Path(path)
        try:
            disk = ForgivingFile(commit.partial_path(path))
        except OSError as error:
            raise _refused(path, error) from error
        file = cls(path, h5py.File(disk, "w", libver=schema.LIBVER, locking=False), disk)
        values = tables.root_attributes(schema.TENSORS, identity)
        text.write_attributes(file._file, values | {"facts_file": facts_file})
        try:
            file.flush()
        except WriterError:
            file.abort()
            raise
        return file

    @property
    def num_bytes(self) -> int:
        """Payload bytes written until now."""
        return self._num_bytes

    def add(self, record_index: int, group_path: str, layout: RecordLayout, buffers: Buffers) -> None:
        """Write one record's components.

        Args:
            record_index: its row of ``/records`` in the facts file.
            group_path: as ``IterationFacts.record_paths`` gives it.
            layout: names, shapes and formats of the components (ring offsets are not looked at).
            buffers: bytes of the components, ``num_bytes`` each; only read during the call.

        Raises:
            FormatError: a buffer's length, the shape and the format disagree, or the group exists; nothing of the
                record was written and the file can be used on.
            WriterError: the disk refuses; call ``abort`` (or ``commit`` for what is there).
        """
        self.put(record_index, group_path, layout, buffers)
        self.write_out()

    def put(self, record_index: int, group_path: str, layout: RecordLayout, buffers: Buffers) -> None:
        """As ``add``, but the bytes are only read, and written, by the next ``write_out``."""
        views = [
            _as_bytes(buffers(component) if callable(buffers) else buffers[position])
            for position, component in enumerate(layout.components)
        ]
        record = self._lay_out(record_index, group_path, layout, [view.nbytes for view in views], linked=True)
        for array, view in zip(record.arrays, views, strict=True):
            self._enqueue(record, array, 0, view)
        self._complete.append(record)

    def put_parts(
        self, record_index: int, group_path: str, layout: RecordLayout, parts: Iterable[tuple[int, int, memoryview]]
    ) -> bool:
        """Queue parts of a record that comes in several calls, in any order; no reader sees it before it is whole.

        Args:
            record_index: as in ``add``, and so on.
            group_path: as in ``add``.
            layout: as in ``add``.
            parts: (number of the component, offset in it, bytes), read by the next ``write_out``.

        Returns:
            Whether all of the record is queued now.

        Raises:
            FormatError: shape and format disagree; nothing of the record was written.
            WriterError: the disk refuses.
        """
        record = self._incomplete.get(record_index)
        if record is None:
            sizes = [component.num_bytes for component in layout.components]
            record = self._lay_out(record_index, group_path, layout, sizes, linked=False)
            self._incomplete[record_index] = record
        for number, start, view in parts:
            if view.nbytes and start not in record.arrays[number].parts:
                self._enqueue(record, record.arrays[number], start, view)
        if record.missing_bytes > 0:
            return False
        self._complete.append(self._incomplete.pop(record_index))
        return True

    def write_out(self) -> None:
        """Write what is queued: neighbours in one call, checksums beside it; the buffers are free afterwards.

        Raises:
            FormatError: the group of a record that came in parts exists; the others are written.
            WriterError: the disk refuses; call ``abort`` (or ``commit`` for what is there).
        """
        queue, self._queue = self._queue, []
        checksums = Checksums([queued.view for queued in queue])
        try:
            self._disk.write_payload((queued.array.offset + queued.start, queued.view) for queued in queue)
        except OSError as error:
            raise _refused(self.path, error) from error
        finally:
            found = checksums.results()
        for queued, crc in zip(queue, found, strict=True):
            queued.array.parts[queued.start] = (queued.view.nbytes, crc)
        complete, self._complete = self._complete, []
        for record in complete:
            self._end_record(record)
        self._check_disk()
        if self._unflushed_records >= _FLUSH_RECORDS or self._unflushed_bytes >= _FLUSH_BYTES:
            self.flush()

    def _lay_out(
        self, record_index: int, group_path: str, layout: RecordLayout, sizes: Sequence[int], *, linked: bool
    ) -> PendingRecord:
        """Give a record's arrays their places in the file."""
        stored = [
            _stored_as(f"{group_path}/{component.name}", component, num_bytes)
            for component, num_bytes in zip(layout.components, sizes, strict=True)
        ]
        self._open_file()
        arrays = []
        with self._naming(group_path):
            group = self._allocator.create_group(group_path) if linked else None
            for component, (dtype, shape) in zip(layout.components, stored, strict=True):
                dataset, form = None, component.format
                if group is not None:
                    offset = self._allocator.create(group, component.name, shape, dtype, form, record_index)
                else:
                    dataset, offset = self._allocator.create_unlinked(shape, dtype, form, record_index)
                arrays.append(Array(component.name, component.num_bytes, offset, dataset))
        return PendingRecord(record_index, group_path, arrays, sum(sizes))

    def _enqueue(self, record: PendingRecord, array: Array, start: int, view: memoryview) -> None:
        if view.nbytes:
            array.parts[start] = (view.nbytes, 0)
            self._queue.append(Queued(array, start, view))
        record.missing_bytes -= view.nbytes
        self._num_bytes += view.nbytes
        self._unflushed_bytes += view.nbytes

    def _end_record(self, record: PendingRecord) -> None:
        """Its bytes are written: give it its links, and its rows of ``/components``."""
        if any(array.dataset is not None for array in record.arrays):
            with self._naming(record.group_path):
                group = self._allocator.create_group(record.group_path)
                for array in record.arrays:
                    self._allocator.link(array.dataset, group, array.name)
        for array in record.arrays:
            name = self._names.add(array.name)
            self._components.append((record.index, name, array.offset, array.num_bytes, array.crc32()))
        self._unflushed_records += 1

    @contextmanager
    def _naming(self, group_path: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # h5py's word for a link that exists
            raise FormatError(f"{self.path}: {group_path} cannot be made, is it written already? {error}") from error
        except (OSError, RuntimeError) as error:
            raise _refused(self.path, error) from error

    def flush(self) -> None:
        """Make what was added readable even if this process dies (not the machine: no fsync).

        Raises:
            WriterError: the disk refuses.
        """
        self._open_file().flush()
        self._check_disk()
        self._unflushed_bytes = self._unflushed_records = 0

    def commit(self, late_firings: Sequence[Firing] = (), blind: Sequence[Blind] = ()) -> int:
        """Write the component table and what came late, and give the file its final name.

        Args:
            late_firings: fired after the facts file was committed.
            blind: records and iterations whose bytes did not arrive.

        Returns:
            Size of the file in bytes.

        Raises:
            WriterError: the disk refuses or the name is taken; nothing is left under the final name.
        """
        file = self._open_file()
        self._incomplete.clear()  # an open dataset would keep the file open
        try:
            file.create_dataset("components", data=np.array(self._components, dtype=schema.COMPONENT))
            file.create_dataset("firings", data=tables.firing_rows(late_firings, self._names, {}))
            file.create_dataset("blind", data=tables.blind_rows(blind, self._names))
            self._names.write(file)
            self.flush()
            file.attrs.modify("complete", np.uint8(1))
            file.close()
            self._check_disk()
            self._close()
            commit.publish(commit.partial_path(self.path), self.path)
            return self.path.stat().st_size
        except WriterError:
            self.abort()
            raise
        except (OSError, RuntimeError) as error:
            self.abort()
            raise _refused(self.path, error) from error

    def abort(self) -> None:
        """Close and remove the temporary file; harmless after ``commit``."""
        if self._file is not None:
            self._close()
            commit.discard(commit.partial_path(self.path))

    def _close(self) -> None:
        self._incomplete.clear()
        if self._file is not None:
            self._file.close()
        self._file = None
        self._disk.close()

    def _check_disk(self) -> None:
        if self._disk.error is not None:
            raise _refused(self.path, self._disk.error)

    def _open_file(self) -> h5py.File:
        if self._file is None:
            raise WriterError(f"{self.path}: the file was committed or aborted and takes nothing more")
        return self._file


def _as_bytes(buffer: memoryview) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a shape with a zero cannot be cast


def _stored_as(path: str, component: Component, num_bytes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Give dtype and shape of a component's dataset; a format that this version does not know is kept as bytes."""
    if num_bytes != component.num_bytes:
        raise FormatError(f"{path}: {num_bytes} bytes were given, the layout says {component.num_bytes}")
    if component.format not in base.FORMATS:
        return np.dtype("u1"), (num_bytes,)
    dtype = base.storage_dtype(component.format)
    expected = int(np.prod(component.shape, dtype=np.int64)) * dtype.itemsize
    if expected != num_bytes:
        raise FormatError(
            f"{path}: shape {component.shape} in format {component.format} takes {expected} bytes, not {num_bytes}"
        )
    return dtype, component.shape


def _write_image(path: Path, fill: Callable[[h5py.File], None]) -> None:
    """Lay a small file out in memory, then write and publish it."""
    partial = commit.partial_path(path)
    with h5py.File(path.name, "w", driver="core", backing_store=False, libver=schema.LIBVER, locking=False) as file:
        fill(file)
        file.attrs.modify("complete", np.uint8(1))
        file.flush()
        image = file.id.get_file_image()
    created = False
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        created = True
        try:
            commit.write_all(descriptor, image, 0)
        finally:
            os.close(descriptor)
        commit.publish(partial, path)
    except OSError as error:
        if created:
            commit.discard(partial)
        raise _refused(path, error) from error


def _refused(path: Path, error: Exception) -> WriterError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return WriterError(f"{path}: cannot be written: {reason}")
