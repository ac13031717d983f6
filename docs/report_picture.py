"""Takes the picture of docs/report.md: ``python docs/report_picture.py INCIDENT docs/report.png`` (needs Chromium)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from browser_support import Browser, find_browser

from flightrec.reports.page.document import document_of_path
from flightrec.reports.page.html import render

WIDTH, HEIGHT = 1200, 2000

PARTS = ("story", "timeline", "maps")
"""Shown below each other, the last one cut off at the picture's end; the page has them further apart."""


def main(incident: str, picture: str) -> None:
    """Render one incident's page and save the upper part of it."""
    document = document_of_path(Path(incident))
    # Where it was drawn is nobody's business in a picture.
    document["incident"].update(host="node-17", path=Path(incident).name)
    program = find_browser()
    assert program, "no Chromium here"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(program, Path(folder)) as browser:
        page = Path(folder) / "report.html"
        page.write_text(render(document), encoding="utf-8")
        browser.open(page, width=WIDTH, height=HEIGHT)
        others = "main > section" + "".join(f":not(#{part})" for part in PARTS)
        browser.evaluate(
            f"document.querySelectorAll('{others}, #story ul, #story h3, #story .scroll').forEach(e => e.remove())"
        )
        browser.picture(Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
