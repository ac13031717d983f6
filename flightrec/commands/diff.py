"""``flightrec diff``: where two incidents, two ranks, or two iterations part first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flightrec.commands.reading import Limits, read_in_child
from flightrec.config.expressions import compile_pattern
from flightrec.errors import ConfigError
from flightrec.reports import diff_text, text

LIMITS = Limits(cpu_s=24 * 3600, wall_s=24 * 3600.0)
"""A tolerance makes it read all tensors whose bytes differ; memory is limited as for all commands."""

EXAMPLES = """Examples:

flightrec diff incidents/GOOD incidents/BAD

flightrec diff incidents/BAD --iterations 9900 10012

flightrec diff incidents/BAD --ranks 0 3 --tensor weight --tolerance bfloat16=0.01
"""


def diff(
    a: Annotated[Path, typer.Argument(help="An incident: its folder, its index, or one rank's file.")],
    b: Annotated[Path | None, typer.Argument(help="Another one; without it A itself.", show_default=False)] = None,
    iterations: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--iterations",
            metavar="GOOD BAD",
            help="One iteration of each side, as a number or ATTEMPT.NUMBER. Two of one incident are compared by "
            "statistics, since their data differ.",
        ),
    ] = None,
    ranks: Annotated[
        tuple[int, int] | None, typer.Option("--ranks", metavar="R S", help="One rank of each side.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option("--layer", help="Only these layers: a name, a glob, or re:...", show_default=False)
    ] = None,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="Only these tensors, likewise.", show_default=False)
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="WHAT", help="bytes, or statistics, whatever is compared.", show_default=False),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            metavar="T",
            help="Relative distance of elements that count as equal: 0.01 for all, bfloat16=0.01 for one format, or "
            "the word format for one step of each format's last bit. May be repeated. NaN equals NaN.",
            show_default=False,
        ),
    ] = None,
    factor: Annotated[
        float, typer.Option("--factor", min=1.0, help="By statistics: magnitudes differ beyond this factor.")
    ] = 4.0,
    details: Annotated[
        int, typer.Option("--details", min=0, help="How many differing records are read element by element.")
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; docs/diff.md tells the form.")
    ] = False,
) -> None:
    """Compare two incidents, two ranks, or two iterations: the first divergence, and all else that differs.

    The exit code is 1 if records differ.
    """
    if b is None and iterations is None and ranks is None:
        raise typer.BadParameter("one incident is compared with another, or with itself by --iterations or --ranks")
    if by not in (None, "bytes", "statistics"):
        raise typer.BadParameter(f"expected bytes or statistics, got {by!r}", param_hint="--by")
    _check(layer, tensor, tolerance or [])
    options = {
        "other": None if b is None else str(b),
        "iterations": iterations,
        "ranks": ranks,
        "layer": layer,
        "tensor": tensor,
        "by": by,
        "tolerance": tolerance or [],
        "factor": factor,
        "num_details": details,
    }
    document = read_in_child("flightrec.reports.diff:diff_paths", a, options=options, limits=LIMITS)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        diff_text.render_diff(document, text.report_console())
    if document["differ"]:
        raise typer.Exit(1)


def _check(layer: str | None, tensor: str | None, tolerance: list[str]) -> None:
    """Refuse as a usage error what would fail in the child."""
    from flightrec.analysis.compare_bytes import Tolerance

    _usage("--layer", lambda: compile_pattern(layer or "*"))
    _usage("--tensor", lambda: compile_pattern(tensor or "*"))
    _usage("--tolerance", lambda: Tolerance.parse(tolerance))


def _usage(option: str, parse: Callable[[], object]) -> None:
    try:
        parse()
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
