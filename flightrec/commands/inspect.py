"""``flightrec inspect``: tells an incident's story in the terminal, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flightrec.commands.reading import read_in_child
from flightrec.reports import text


def inspect(
    path: Annotated[Path, typer.Argument(help="An incident: its folder, its index, or one rank's file.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; docs/inspect.md tells the form.")
    ] = False,
) -> None:
    """Tell what fired, where it began, the fault's way through the layers, and the statistics around it."""
    document = read_in_child("flightrec.reports.summary:summarize_path", path)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        text.render(document, text.report_console())
