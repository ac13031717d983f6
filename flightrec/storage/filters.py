"""Compression filters of packed incidents: names, options, and the package that some of them need.

No state. Loads HDF5 only where it is used: the command line's help knows the names too.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flightrec.errors import IncidentError, MissingExtraError

if TYPE_CHECKING:
    import h5py

FILTERS: dict[str, tuple[int, int, int]] = {"gzip": (1, 9, 4), "zstd": (1, 22, 3), "blosc": (1, 9, 5)}
"""Name to lowest, highest and default level. ``gzip`` is part of every HDF5."""


def load(name: str) -> Any:
    """Import what a filter needs, before it writes or reads; None for one that HDF5 has itself.

    Raises:
        MissingExtraError: the package is not installed.
    """
    if name == "gzip":
        return None
    try:
        return importlib.import_module("hdf5plugin")
    except ImportError as error:
        raise MissingExtraError(
            f"the filter {name} needs the package hdf5plugin ({error}); install it with: "
            "pip install 'torch-flightrec[pack]', or pack with --filter gzip"
        ) from error


def options(name: str, level: int, *, shuffle: bool) -> dict[str, Any]:
    """Arguments of ``create_dataset``.

    Args:
        name: of the filter.
        level: of compression.
        shuffle: sort the bytes of elements by significance first.
    """
    if name == "gzip":
        return {"compression": "gzip", "compression_opts": level, "shuffle": shuffle}
    plugin = load(name)
    if name == "zstd":
        return {"compression": plugin.Zstd(clevel=level), "shuffle": shuffle}
    kind = plugin.Blosc.SHUFFLE if shuffle else plugin.Blosc.NOSHUFFLE
    return {"compression": plugin.Blosc(cname="zstd", clevel=level, shuffle=kind)}


def need(path: Path, file: h5py.File) -> None:
    """Make a packed file's filter known to HDF5; nothing for a file that is not packed.

    Raises:
        MissingExtraError: its filter needs a package that is not installed.
        IncidentError: its filter is not known.
    """
    if "packed" not in file.attrs:
        return
    told = json.loads(str(file.attrs["packed"]))
    name = str(told.get("filter", "")) if isinstance(told, dict) else ""
    if name not in FILTERS:
        raise IncidentError(f"{path}: is packed with {name[:60]!r}, expected one of {', '.join(FILTERS)}")
    try:
        load(name)
    except MissingExtraError as error:
        raise MissingExtraError(f"{path}: is packed; {error}") from error
