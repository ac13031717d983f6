"""``flightrec inspect``: tells an incident's story in the terminal, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flightrec.commands.reading import read_in_child
from flightrec.reports import quantizer_text, text


def inspect(
    path: Annotated[Path, typer.Argument(help="An incident: its folder, its index, or one rank's file.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; docs/inspect.md tells the form.")
    ] = False,
    quantizer: Annotated[
        str | None,
        typer.Option(
            "--quantizer",
            metavar="LAYER",
            help="Tell the quantizers of this layer instead (a name, a glob, or re:...): format, recipe, scale, amax, "
            "and how long the scale has stood still.",
        ),
    ] = None,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="With --quantizer: only this tensor (activation, weight, ...).")
    ] = None,
) -> None:
    """Tell what fired, where it began, the fault's way through the layers, and the statistics around it."""
    if quantizer is not None:
        _quantizers(path, quantizer, tensor, as_json=as_json)
        return
    if tensor is not None:
        raise typer.BadParameter("--tensor goes with --quantizer LAYER", param_hint="--tensor")
    document = read_in_child("flightrec.reports.summary:summarize_path", path)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        text.render(document, text.report_console())


def _quantizers(path: Path, layer: str, tensor: str | None, *, as_json: bool) -> None:
    options = {"layer": layer, "tensor": tensor}
    document = read_in_child("flightrec.reports.quantizers:quantizers_of_path", path, options=options)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        quantizer_text.render_quantizers(document, text.report_console())
