"""``flightrec inspect``: tells an incident's story in the terminal, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flightrec.commands.examples import examples
from flightrec.commands.ranges import parse_ranges
from flightrec.commands.reading import read_in_child
from flightrec.errors import ConfigError
from flightrec.reports import quantizer_text, selected_text, text
from flightrec.storage.select import matching

EXAMPLES = examples(
    "flightrec inspect incidents/NAME",
    "flightrec inspect incidents/NAME --json",
    "flightrec inspect incidents/NAME --layer 'blocks.2.*' --iteration 88:90",
    "flightrec inspect incidents/NAME --tensor gradient --worst 10 --values",
    "flightrec inspect incidents/NAME --quantizer blocks.2.mlp.fc2",
)


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
    layer: Annotated[
        list[str] | None,
        typer.Option("--layer", metavar="NAME", help="Only this layer: a name, a glob, or re:...; may be repeated."),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor", metavar="NAME", help="Only this tensor (activation, weight, ...); also with --quantizer."
        ),
    ] = None,
    iteration: Annotated[
        list[str] | None,
        typer.Option("--iteration", metavar="RANGE", help="Only these iterations: 7, 10:20, 10:, :20, or 7,9,10:20."),
    ] = None,
    rank: Annotated[list[str] | None, typer.Option("--rank", metavar="RANGE", help="Only these ranks.")] = None,
    microbatch: Annotated[
        list[str] | None,
        typer.Option("--microbatch", metavar="RANGE", help="Only these microbatches; -1: of the whole iteration."),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            "--worst",
            min=1,
            metavar="N",
            help="The N worst records: by share of NaN and Inf, saturation, underflow, quantization error, growth.",
        ),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="The elements around the worst place of the worst selected record.")
    ] = False,
) -> None:
    """Tell what fired, where it began, the fault's way through the layers, and the statistics around it.

    With a filter, --worst or --values: the records that are selected, in place of the story.
    """
    names = {"layer": patterns(layer, "--layer"), "tensor": patterns(tensor, "--tensor")}
    numbers = {"iteration": iteration, "rank": rank, "microbatch": microbatch}
    wanted = names | {name: parse_ranges(texts, f"--{name}") for name, texts in numbers.items()}
    selects = worst is not None or values or any(entry is not None for entry in wanted.values())
    if quantizer is not None:
        if {name for name, entry in wanted.items() if entry is not None} - {"tensor"} or worst is not None or values:
            raise typer.BadParameter("goes with --tensor and --json only", param_hint="--quantizer")
        _quantizers(path, quantizer, names["tensor"], as_json=as_json)
    elif selects:
        options = {"wanted": wanted, "worst": worst, "values": values}
        document = read_in_child("flightrec.reports.selected:inspect_path", path, options=options)
        _print(document, selected_text.render_selected, as_json=as_json)
    else:
        _print(read_in_child("flightrec.reports.summary:summarize_path", path), text.render, as_json=as_json)


def patterns(texts: list[str] | None, option: str) -> list[str] | None:
    """Give an option's patterns, None if it was not given.

    Raises:
        typer.BadParameter: a regular expression is invalid.
    """
    try:
        matching(texts or [])
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    return texts or None


def _print(document: Any, render: Callable[[Any, Console], None], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        render(document, text.report_console())


def _quantizers(path: Path, layer: str, tensor: list[str] | None, *, as_json: bool) -> None:
    options = {"layer": layer, "tensor": tensor[0] if tensor and len(tensor) == 1 else tensor}
    document = read_in_child("flightrec.reports.quantizers:quantizers_of_path", path, options=options)
    _print(document, quantizer_text.render_quantizers, as_json=as_json)
