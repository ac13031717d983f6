"""Files get their final name only when they are whole. Plain system calls, no HDF5; runs in the writer process."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flightrec.errors import WriterError

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def partial_path(path: Path) -> Path:
    """Give the temporary name of a file while it is written: ``.<name>.partial`` in the same folder."""
    return path.with_name(f".{path.name}.partial")


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at a file offset; ``OSError`` when the disk refuses."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def write_vector(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write buffers one behind the other at a file offset, at most 1 024; ``OSError`` when the disk refuses.

    Returns:
        Bytes written: all.
    """
    expected = sum(buffer.nbytes for buffer in buffers)
    written = os.pwritev(descriptor, buffers, offset)
    at = 0
    for buffer in buffers if written < expected else ():  # a long call may end early: what is missing, one by one
        done = min(max(written - at, 0), buffer.nbytes)
        write_all(descriptor, buffer[done:], offset + at + done)
        at += buffer.nbytes
    return expected


def publish(partial: Path, final: Path) -> None:
    """Flush a finished temporary file to the disk and give it its final name, never replacing another file.

    Raises:
        WriterError: the final name is taken; the temporary file stays.
        OSError: the disk refuses.
    """
    synchronize(partial)
    try:
        os.link(partial, final)
    except FileExistsError:
        raise _taken(partial, final) from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(final):
            raise _taken(partial, final) from None
        partial.rename(final)  # no hard links here; the incident's folder is ours alone, nobody races for the name
    else:
        partial.unlink()
    synchronize(final.parent)


def discard(partial: Path) -> None:
    """Remove a temporary file; errors are swallowed, there is nothing left to save."""
    try:
        partial.unlink(missing_ok=True)
    except OSError:
        return


def _taken(partial: Path, final: Path) -> WriterError:
    return WriterError(
        f"{final}: a file of this name exists and is never replaced; the new one stays as {partial.name}"
    )


def synchronize(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; waits."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
