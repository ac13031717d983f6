"""Draws `flightrec inspect` as it looks in a terminal: ``python docs/picture.py INCIDENT docs/inspect.svg``."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from flightrec.reports import text
from flightrec.reports.summary import summarize_path

THEME = TerminalTheme(
    (24, 26, 31),
    (214, 216, 221),
    [
        (40, 42, 48),
        (224, 108, 117),
        (152, 195, 121),
        (229, 192, 123),
        (97, 175, 239),
        (198, 120, 221),
        (86, 182, 194),
        (214, 216, 221),
    ],
)

CELL = 12.2
"""Width of a character in rich's pictures."""


def main(incident: str, picture: str) -> None:
    """Render one incident's report to an SVG file."""
    document = summarize_path(Path(incident))
    # Where and when it was drawn is nobody's business in a picture.
    document["incident"].update(host="node-17", path=Path(incident).name)
    console = Console(
        file=io.StringIO(), record=True, width=text.WIDTH, force_terminal=True, color_system="truecolor", markup=False
    )
    text.render(document, console)
    Path(picture).write_text(svg_of(console, "flightrec inspect"))


def svg_of(console: Console, title: str) -> str:
    """Give what a recording console printed as a picture that needs nothing from elsewhere."""
    svg = console.export_svg(title=title, theme=THEME)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a picture loads nothing from elsewhere
    svg = re.sub(r' x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>((?:&#160;)+)', _without_indent, svg)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def _without_indent(found: re.Match[str]) -> str:
    """Place a text where its first letter stands: not every viewer keeps spaces at the beginning."""
    x, y, length = map(float, found.group(1, 2, 3))
    indent = CELL * found.group(5).count("&#160;")
    return f' x="{x + indent:.1f}" y="{y:.1f}" textLength="{length - indent:.1f}"{found.group(4)}>'


if __name__ == "__main__":
    main(*sys.argv[1:])
