"""Compresses an incident offline, into a folder of its own: same files, same names, the payload in filtered chunks.

Works chunk by chunk, so files may be far larger than memory. Every array is compared with its checksum while it is
read, and read back and compared bit by bit before the new folder gets its name. No state; runs in the command's child.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from flightrec.errors import IncidentError, WriterError
from flightrec.storage import commit, files, filters, guard, schema, text
from flightrec.storage.disk import ForgivingFile
from flightrec.storage.read import open_incident

CHUNK_BYTES = 1 << 20
"""What is decompressed at once, and what HDF5 caches by default."""

SMALLEST_BYTES = 4096
"""Smaller arrays stay as they are: a chunk costs more than it saves."""

_TABLES = ("components", "firings", "blind", "names")

_MARKERS = ".rank*.writer.json"
"""What stands in a folder as long as a writer works in it; see ``writer.folders``."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Told = dict[str, int]


def pack_folder(path: Path, output: str, filter_name: str, level: int, scratch: str = "") -> dict[str, Any]:
    """Write a compressed copy of an incident.

    Args:
        path: the incident's folder; is only read.
        output: the new folder, which must not exist.
        filter_name: one of ``filters.FILTERS``.
        level: of compression, in the filter's own range.
        scratch: the folder's name until it is whole, beside ``output``, so that a caller can remove what a crash
            leaves; empty for one that is drawn.

    Returns:
        ``output``, ``bytes_before``, ``bytes_after``, ``num_arrays``, ``payload_before``, ``payload_after``.

    Raises:
        IncidentError: it is no incident, is damaged, is still written, or ``output`` exists or lies inside of it;
            nothing is left behind.
        MissingExtraError: the filter needs a package that is not installed.
        WriterError: the disk refuses; nothing is left behind.
    """
    target = Path(output)
    filters.load(filter_name)
    if not path.is_dir():
        raise IncidentError(f"{path}: is no folder; pack takes an incident's folder")
    with open_incident(path) as incident:
        incident.trigger  # noqa: B018  # what cannot be read at all is not packed
    _refuse_unfinished(path)
    if os.path.lexists(target):
        raise IncidentError(f"{target}: exists and is never replaced; choose another --output")
    if target.resolve().is_relative_to(path.resolve()):
        raise IncidentError(f"{target}: lies inside the incident, which is only read; choose another --output")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(scratch or tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    work.mkdir(mode=0o700, exist_ok=not scratch)
    try:
        told = _nothing_told()
        sources = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
        for source in sources:
            files.inside(source)
        for source in sources:
            if _kind(source) == schema.TENSORS:
                for name, number in _pack_file(source, work / source.name, filter_name, level).items():
                    told[name] += number
            else:
                shutil.copyfile(source, work / source.name)
            commit.synchronize(work / source.name)
        with open_incident(work):  # the links, ids and tables of the new folder
            pass
        told |= {"bytes_before": _size(path, sources), "bytes_after": _size(work, sources)}
        work.chmod(path.stat().st_mode & 0o7777)
        commit.synchronize(work)
        if os.path.lexists(target):
            raise IncidentError(f"{target}: exists by now and is never replaced; choose another --output")
        work.rename(target)
        commit.synchronize(target.parent)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise WriterError(_refused(error)) from error
        raise
    return {"output": str(target), **told}


def _refuse_unfinished(path: Path) -> None:
    """A copy of half an incident would look like a whole one: nothing in it says that more was to come.

    Raises:
        IncidentError: a writer works in the folder, or died there.
    """
    markers = sorted(entry.name for entry in path.glob(_MARKERS))
    if markers:
        raise IncidentError(
            f"{path}: is not finished, {', '.join(markers)} is there: a writer works on it, or died; expected an "
            "incident that is written. Pack it later; what a writer that died left is salvaged when the next run "
            "starts in the same directory"
        )


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of about ``CHUNK_BYTES`` that are ranges of the array's own order: whole trailing axes, part of one."""
    chunk = [1] * len(shape)
    room = max(1, CHUNK_BYTES // itemsize)
    for axis in reversed(range(len(shape))):
        chunk[axis] = min(shape[axis], room)
        room //= chunk[axis]
        if chunk[axis] < shape[axis] or room == 0:
            break
    return tuple(chunk)


def _nothing_told() -> Told:
    return {"num_arrays": 0, "payload_before": 0, "payload_after": 0}


def _pack_file(source: Path, target: Path, filter_name: str, level: int) -> Told:
    """One tensors file."""
    disk = ForgivingFile(target)
    try:
        with (
            files.reading(source),
            h5py.File(source, "r", locking=False) as old,
            h5py.File(disk, "w", libver=schema.LIBVER, locking=False) as new,
        ):
            told = _fill(source, old, new, disk, filter_name, level)
        _check(disk)
    finally:
        disk.close()
    with files.reading(target), h5py.File(source, "r", locking=False) as old, h5py.File(target, "r") as new:
        for path, dataset in _arrays(old):
            _compare(target, path, dataset, new[path])
    return told


def _fill(source: Path, old: h5py.File, new: h5py.File, disk: ForgivingFile, filter_name: str, level: int) -> Told:
    """Attributes, tables, and arrays in chunks."""
    told = _nothing_told()
    filters.need(source, old)
    expected = _checksums(old)
    complete = old.attrs["complete"]
    _copy_attributes(old, new)
    new.attrs.modify("complete", np.uint8(0))
    new.attrs["packed"] = text.to_json_text({"filter": filter_name, "level": level})
    for name in _TABLES:
        if guard.find(old, name) is not None:
            table = guard.checked(guard.need(old, name), max_bytes=guard.MAX_TABLE_BYTES)[()]
            if name == "components":
                table["offset"] = -1  # no array is one range of the file any more
            new.create_dataset(name, data=table, dtype=old[name].dtype)
    for path, dataset in _arrays(old):
        form = str(text.read_attribute(dataset, "format"))
        packed = _pack_array(dataset, new, path, form, filter_name, level)
        crc = _copy(dataset, packed, disk)
        record = int(dataset.attrs["record"])
        known = expected.get((record, path.rsplit("/", maxsplit=1)[1]))
        if expected and known is not None and known != crc:
            raise IncidentError(f"{source}: {path} is damaged: crc32 is {crc:08x}, expected {known:08x}")
        told["num_arrays"] += 1
        told["payload_before"] += dataset.nbytes
        told["payload_after"] += packed.id.get_storage_size()
    new.flush()
    new.attrs.modify("complete", complete)
    return told


def _check(disk: ForgivingFile) -> None:
    """Ask for what HDF5 is never told, because it would crash in the end: that the disk refused something.

    Raises:
        WriterError: it did.
    """
    if disk.error is not None:
        raise WriterError(_refused(disk.error)) from disk.error


def _refused(error: OSError) -> str:
    return (
        f"the packed copy cannot be written, {error.strerror or error}; nothing of it is left, choose another --output"
    )


def _pack_array(
    dataset: h5py.Dataset, new: h5py.File, path: str, form: str, filter_name: str, level: int
) -> h5py.Dataset:
    options: Mapping[str, Any] = {}
    if dataset.shape and dataset.nbytes >= SMALLEST_BYTES:
        # Bytes of one significance together: exponents resemble each other. Codes of a byte have nothing to sort.
        shuffle = dataset.dtype.itemsize > 1
        chunks = chunk_shape(dataset.shape, dataset.dtype.itemsize)
        options = {"chunks": chunks, **filters.options(filter_name, level, shuffle=shuffle)}
    packed = new.create_dataset(path, shape=dataset.shape, dtype=dataset.dtype, **options)
    text.write_attributes(packed, {"format": form, "record": np.int64(dataset.attrs["record"])})
    return packed


def _copy(old: h5py.Dataset, new: h5py.Dataset, disk: ForgivingFile) -> int:
    """Copy all elements; their crc32. Raises ``WriterError`` if the disk refuses."""
    crc = 0
    for part in _parts(new):
        values = old[part]
        new[part] = values
        _check(disk)
        crc = zlib.crc32(_bytes(values), crc)
    return crc


def _compare(target: Path, path: str, old: h5py.Dataset, new: h5py.Dataset) -> None:
    same = old.shape == new.shape and old.dtype == new.dtype
    if not same or any(_bytes(old[part]) != _bytes(new[part]) for part in _parts(new)):
        raise IncidentError(
            f"{target}: {path} does not come back bit for bit; the filter or this machine's memory lies"
        )


def _parts(dataset: h5py.Dataset) -> Iterator[Any]:
    """Selections of a chunk each, in the array's own order."""
    if dataset.chunks is None:
        yield ()
    else:
        yield from dataset.iter_chunks()


def _bytes(values: Any) -> bytes:
    return np.asarray(values).tobytes()


def _arrays(file: h5py.File) -> list[tuple[str, h5py.Dataset]]:
    """The payload: every dataset with the attribute ``record``."""
    found: list[str] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and "record" in item.attrs:
            found.append(f"/{name}")

    file.visititems(visit)  # follows no link that leads elsewhere
    return [(path, guard.checked(guard.need(file, path))) for path in found]


def _checksums(file: h5py.File) -> dict[tuple[int, str], int]:
    if guard.find(file, "components") is None:  # salvaged
        return {}
    table, names = guard.read_array(file, "components"), text.read_text_table(file)
    return {(int(row["record"]), names[row["component"]]): int(row["crc32"]) for row in table}


def _copy_attributes(old: h5py.File, new: h5py.File) -> None:
    for name in old.attrs:
        if name != "packed":
            new.attrs.create(name, old.attrs[name], dtype=old.attrs.get_id(name).dtype)


def _kind(path: Path) -> str:
    if path.suffix != ".h5":
        return ""
    with files.reading(path), h5py.File(path, "r", locking=False) as file:
        return str(text.read_attribute(file, "kind"))


def _size(folder: Path, sources: list[Path]) -> int:
    return sum((folder / source.name).stat().st_size for source in sources)
