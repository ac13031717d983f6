"""Opens what stands in a file of an incident, after a look at what it claims. Read-only; no state.

A file is data from elsewhere: its links may lead out of it, its arrays may have their bytes in other files, and a shape
costs nothing to claim. So readers come here: links to other places are never followed, an array must have in the file
what it claims, and nothing is allocated before that was compared. Everything is refused with a ``ValueError``, which
``files.reading`` turns into an ``IncidentError`` that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

MAX_TABLE_BYTES = 1 << 30
"""Longest table, and longest array of the history. A row of ``/records`` has some 350 bytes."""

MAX_TEXT_BYTES = 256 << 20
"""Most text of one table of texts."""

MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk; flightrec's own have 1 MiB."""

MAX_ATTRIBUTE_BYTES = 1 << 20

_ANY_BYTES = 1 << 62
_TEXT_ROWS = 1024
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32001: "blosc", 32015: "zstd"}
_SLACK_BYTES = 1 << 16

Item = Any
"""A dataset or a group: h5py has no types."""


def find(parent: h5py.Group, path: str) -> Item | None:
    """Give what stands under a path, None for nothing.

    Raises:
        ValueError: a link on the way is soft or external, or no link can be called so.
    """
    if "\0" in path:
        raise ValueError(f"no link can be called {path!r}")
    here: Any = parent.id
    for word in path.split("/"):
        if not word:
            continue
        name = word.encode("utf-8")
        if not isinstance(here, h5py.h5g.GroupID) or not here.links.exists(name):
            return None
        here = _follow(here, name)
    return _wrapped(here)


def need(parent: h5py.Group, path: str) -> Item:
    """As ``find``, but ``KeyError`` for nothing."""
    found = find(parent, path)
    if found is None:
        raise KeyError(f"{path} is missing")
    return found


def members(group: h5py.Group) -> Iterator[tuple[bytes, Item]]:
    """Give link names and what they lead to (``ValueError`` for a soft or external link)."""
    for name in group.id:
        yield name, _wrapped(_follow(group.id, name))


def checked(item: Item | None, *, max_bytes: int = _ANY_BYTES, sparse: bool = False) -> h5py.Dataset:
    """Give a dataset back if the file holds what it claims.

    Args:
        item: what ``find`` gave.
        max_bytes: most bytes of its elements; of texts the fixed part only.
        sparse: chunks that were never written are no damage: they read as the fill value.

    Raises:
        ValueError: it is none, its bytes are elsewhere or missing, it is larger, or has a filter that is not known.
    """
    if not isinstance(item, h5py.Dataset):
        raise ValueError("expected a dataset")
    if item.shape is None:
        raise ValueError("has no shape")
    item_bytes = item.id.get_type().get_size()
    num_bytes = math.prod(item.shape) * item_bytes
    if num_bytes > max_bytes:
        raise ValueError(f"claims {num_bytes} bytes, expected at most {max_bytes}")
    plan = item.id.get_create_plist()
    layout = plan.get_layout()
    if layout == h5py.h5d.VIRTUAL or plan.get_external_count():
        raise ValueError("has its bytes in other files, which are never read")
    if layout == h5py.h5d.CONTIGUOUS:
        _check_contiguous(item, num_bytes)
    elif layout == h5py.h5d.CHUNKED:
        _check_chunks(item, plan, item_bytes, sparse)
    return item


def read_array(parent: h5py.Group, path: str, *, sparse: bool = False) -> npt.NDArray[Any]:
    """Read an array of numbers of at most ``MAX_TABLE_BYTES``.

    Raises:
        KeyError: there is none.
        ValueError: it is refused, see ``checked``, or has elements without a fixed length.
    """
    dataset = checked(need(parent, path), max_bytes=MAX_TABLE_BYTES, sparse=sparse)
    if dataset.dtype.hasobject:
        raise ValueError(f"has elements of {dataset.dtype}, expected a fixed length")
    return np.asarray(dataset[()])


def read_table(parent: h5py.Group, path: str, columns: np.dtype[Any], later: frozenset[str]) -> npt.NDArray[np.void]:
    """Read a table and compare its columns with what they should be.

    Args:
        parent: the file.
        path: of the table.
        columns: names and types.
        later: those that an earlier version of the format did not have.

    Returns:
        [rows]; columns that are not known stay.

    Raises:
        KeyError: there is none.
        ValueError: it is refused, or a column is missing or of another type.
    """
    table = read_array(parent, path)
    if table.ndim != 1 or table.dtype.names is None:
        raise ValueError(f"is an array of {table.dtype.kind} with {table.ndim} axes, expected a table")
    for name in columns.names or ():
        if name not in table.dtype.names:
            if name not in later:
                raise ValueError(f"column {name} is missing")
            continue
        found, expected = table.dtype[name], columns[name]
        if found.kind != expected.kind or (found.itemsize != expected.itemsize and expected.kind != "S"):
            raise ValueError(f"column {name} is {found}, expected {expected}")
    return table


def read_texts(dataset: h5py.Dataset) -> list[str]:
    r"""Read strings, a part at a time: many may stand for one long text. What is no UTF-8 comes as ``\xNN``.

    Raises:
        ValueError: it is refused, holds no strings, or more than ``MAX_TEXT_BYTES``.
    """
    checked(dataset, max_bytes=MAX_TABLE_BYTES)
    if h5py.check_string_dtype(dataset.dtype) is None or dataset.ndim > 1:
        raise ValueError(f"is {dataset.dtype} with {dataset.ndim} axes, expected texts")
    found: list[str] = []
    num_bytes = 0
    for start in range(0, dataset.size, _TEXT_ROWS):
        values = dataset[start : start + _TEXT_ROWS] if dataset.ndim else [dataset[()]]
        num_bytes += sum(map(len, values))
        if num_bytes > MAX_TEXT_BYTES:
            raise ValueError(f"holds more than {MAX_TEXT_BYTES} bytes of text")
        found.extend(decoded(value) for value in values)
    return found


def decoded(value: bytes) -> str:
    r"""Text of a string; bytes that are no UTF-8 are shown as ``\xNN``."""
    return value.decode("utf-8", "backslashreplace")


def _follow(group: Any, name: bytes) -> Any:
    if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{decoded(name)!r} is a link to another place, which is never followed")
    return h5py.h5o.open(group, name)


def _wrapped(found: Any) -> Item:
    if isinstance(found, h5py.h5d.DatasetID):
        return h5py.Dataset(found)
    if isinstance(found, h5py.h5g.GroupID):
        return h5py.Group(found)
    raise ValueError("is a named datatype, expected a dataset or a group")


def _check_contiguous(dataset: h5py.Dataset, num_bytes: int) -> None:
    stored = dataset.id.get_storage_size() if num_bytes else 0
    size = dataset.file.id.get_filesize()
    if stored < num_bytes or num_bytes > size:  # texts take more in the file than in memory
        raise ValueError(f"claims {num_bytes} bytes, the file has {min(stored, size)} of them")


def _check_chunks(dataset: h5py.Dataset, plan: Any, item_bytes: int, sparse: bool) -> None:
    chunk = plan.get_chunk()
    chunk_bytes = math.prod(chunk) * item_bytes
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(f"has chunks of {chunk_bytes} bytes, expected at most {MAX_CHUNK_BYTES}")
    used = [plan.get_filter(place)[0] for place in range(plan.get_nfilters())]
    unknown = [code for code in used if code not in _FILTERS]
    if unknown or len(set(used)) < len(used):
        raise ValueError(f"has the filters {used}, expected each at most once of {_FILTERS}")
    expected = math.prod(-(-size // part) for size, part in zip(dataset.shape, chunk, strict=True))
    num_chunks = dataset.id.get_num_chunks() if math.prod(dataset.shape) else 0
    if num_chunks != expected and not sparse:
        raise ValueError(f"claims {expected} chunks, the file has {num_chunks}")
    stored = dataset.id.get_storage_size()
    if stored > max(1, num_chunks) * (2 * chunk_bytes + _SLACK_BYTES):  # texts take twice as much in the file
        raise ValueError(f"has {stored} compressed bytes in {num_chunks} chunks of {chunk_bytes}")
