"""``flightrec report``: an incident as one HTML page that any browser opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flightrec.commands.progress import bar
from flightrec.commands.reading import Limits, read_in_child
from flightrec.reports.page.html import check_extra, render
from flightrec.storage.commit import discard, partial_path

LIMITS = Limits(cpu_s=600, wall_s=1800.0)
"""Histograms read some of the tensors."""


def report(
    incident: Annotated[Path, typer.Argument(help="An incident: its folder, its index, or one rank's file.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="The page.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace the page if it exists.")] = False,
) -> None:
    """Write one self-contained HTML page: the story, a timeline, heat maps, histograms, scales, the configuration.

    It needs the extra `report` (plotly, jinja2), loads nothing from the network, and stays below 10 MB.

    Example: flightrec report incidents/NAME --output report.html
    """
    if not force and output.exists():
        raise typer.BadParameter(f"{output} exists; --force replaces it", param_hint="--output")
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"{output.absolute().parent} is no folder", param_hint="--output")
    check_extra()
    with bar("reading") as channel:
        task = "flightrec.reports.page.document:document_of_path"
        document = read_in_child(task, incident, limits=LIMITS, channel=channel)
        page = render(document)
    write_page(output, page)
    typer.echo(f"{output}: {len(page.encode()) / 1e6:.1f} MB; open it in any browser")


def write_page(output: Path, page: str) -> None:
    """Write it under a temporary name, then give it its own; ``OSError`` when the disk refuses."""
    partial = partial_path(output)
    try:
        partial.write_text(page, encoding="utf-8", newline="\n")
        partial.replace(output)
    except BaseException:
        discard(partial)
        raise
