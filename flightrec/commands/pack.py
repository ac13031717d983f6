"""``flightrec pack``: compresses an incident into a new folder."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Annotated

import typer

from flightrec.commands.examples import examples
from flightrec.commands.reading import Limits, read_in_child
from flightrec.storage import filters

LIMITS = Limits(cpu_s=7 * 24 * 3600, wall_s=7 * 24 * 3600.0)
"""Compressing takes seconds a gigabyte, and incidents have many; memory is limited as for all commands."""

EXAMPLES = examples(
    "flightrec pack incidents/NAME",
    "flightrec pack incidents/NAME --output archive/NAME --filter zstd --level 9",
)


def pack(
    incident: Annotated[Path, typer.Argument(help="An incident's folder; it is only read.")],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="The new folder; INCIDENT.packed if not given.")
    ] = None,
    filter_name: Annotated[
        str,
        typer.Option(
            "--filter",
            metavar="NAME",
            help="gzip (every HDF5 reads it), zstd or blosc (faster; writer and reader need torch-flightrec[pack]).",
        ),
    ] = "gzip",
    level: Annotated[
        int | None, typer.Option("--level", help="gzip 1 to 9 (4), zstd 1 to 22 (3), blosc 1 to 9 (5).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sizes as JSON.")] = False,
) -> None:
    """Compress an incident into a new folder, checked bit by bit; the old one stays as it is."""
    if filter_name not in filters.FILTERS:
        names = ", ".join(filters.FILTERS)
        raise typer.BadParameter(f"expected one of {names}, got {filter_name!r}", param_hint="--filter")
    lowest, highest, usual = filters.FILTERS[filter_name]
    level = usual if level is None else level
    if not lowest <= level <= highest:
        raise typer.BadParameter(f"expected {lowest} to {highest} for {filter_name}, got {level}", param_hint="--level")
    incident = incident.absolute()
    target = incident.with_name(f"{incident.name}.packed") if output is None else output.absolute()
    if target.exists():
        raise typer.BadParameter(f"{target} exists and is never replaced", param_hint="--output")
    filters.load(filter_name)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    options = {"output": str(target), "filter_name": filter_name, "level": level, "scratch": str(scratch)}
    try:
        told = read_in_child("flightrec.storage.pack:pack_folder", incident, options=options, limits=LIMITS)
    except BaseException:  # the child may have crashed, or was interrupted: then nobody else removes it
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    before, after = told["bytes_before"], told["bytes_after"]
    typer.echo(f"{told['output']}: {told['num_arrays']} arrays, every one compared bit by bit")
    typer.echo(
        f"{before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after ({filter_name} {level}): "
        f"{before / max(after, 1):.2f} to 1"
    )
