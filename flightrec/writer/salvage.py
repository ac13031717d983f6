"""Looks after what a dead writer left: ``python -m flightrec.writer.salvage DIRECTORY``.

A readable uncommitted file gets its final name with ``.salvaged.h5`` and stays without ``complete``; an unreadable one
stays as it is. Nothing is deleted but the dead writer's marker. A program of its own, because reading a damaged file
may crash the HDF5 library. Prints the new names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import h5py

from flightrec.storage import schema
from flightrec.writer import folders


def salvage(directory: Path) -> list[Path]:
    """Rename the readable left-overs of dead writers in ``directory``; gives the new paths."""
    saved = []
    for marker in folders.abandoned(directory):
        for partial in folders.partial_files(marker.parent):
            name = partial.name[1:].removesuffix(".partial").removesuffix(".h5")
            target = partial.with_name(f"{name}.salvaged.h5")
            if not target.exists() and _readable(partial):
                os.link(partial, target)  # unlike a rename it never overwrites
                partial.unlink()
                saved.append(target)
        marker.unlink(missing_ok=True)
    return saved


def _readable(path: Path) -> bool:
    try:
        with h5py.File(path, "r", locking=False) as file:
            file.visit(lambda _: None)
            return bool(file.attrs.get("format", "") == schema.FORMAT)
    except (OSError, RuntimeError, KeyError, ValueError):
        return False


def main(arguments: list[str]) -> int:
    """Run the program."""
    for path in salvage(Path(arguments[0])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
