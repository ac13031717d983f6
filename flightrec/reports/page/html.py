r"""Turns the document of ``document.py`` into one HTML page that loads nothing from anywhere.

Every text of the incident is escaped: by jinja2 in the page, as ``\u003c`` in the JSON that the script reads, by
``figures.label`` in the plots. A Content-Security-Policy lets only the page's own two scripts run, by their hashes.
Needs the extra ``report`` (plotly for its JavaScript, jinja2). Offline, any thread, no state.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from flightrec.errors import MissingExtraError
from flightrec.reports import text
from flightrec.reports.page import figures, measures

Row = Mapping[str, Any]

MAX_SEARCH = 6_000
"""Characters of the names of one row of a heat map, in which the search looks."""


def render(document: Row) -> str:
    """Make the page.

    Args:
        document: what ``document.document_of`` gave.

    Returns:
        HTML, self-contained.

    Raises:
        MissingExtraError: plotly or jinja2 is not installed.
    """
    jinja2 = _need("jinja2")
    library = str(_need("plotly.offline").get_plotlyjs()).replace("\r\n", "\n")
    own = _packaged("page.js")
    for script in (library, own):
        assert "</script" not in script.lower(), "a script would end in its middle"
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str else value,
    )
    environment.filters.update(
        key=text.key_name,
        place=text.place_name,
        number=text.number,
        share=text.share,
        words=words,
        title=figures.title_of,
    )
    trusted = importlib.import_module("markupsafe").Markup
    plots = plots_of(document)
    page = environment.from_string(_packaged("page.html")).render(
        document=document,
        measures={name: title for name, title in measures.MEASURES.items() if name in document["maps"]["maps"]},
        figures=set(plots),
        tensor_names=list(dict.fromkeys(name for found in document["maps"]["maps"].values() for name in found)),
        policy=policy([library, own]),
        style=trusted(_packaged("page.css")),
        library=trusted(library),
        script=trusted(own),
        data=trusted(island({"plots": plots, "maps": maps_of(document)})),
    )
    return str(page)


def check_extra() -> None:
    """Refuse early: reading a large incident takes longer than finding out what is not installed.

    Raises:
        MissingExtraError: plotly or jinja2 is not installed.
    """
    for name in ("jinja2", "plotly.offline"):
        _need(name)


def shown(value: str) -> str:
    """A text with its control characters, bidirectional marks and lone surrogates as escapes; line ends stay."""
    return "\n".join(text.clean(line) for line in value.split("\n"))


def plots_of(document: Row) -> dict[str, figures.Figure]:
    """All figures but the heat maps, by the name of their place in the page."""
    found: dict[str, figures.Figure | None] = {"timeline": figures.timeline(document)}
    for place, entry in enumerate(document["scalars"]):
        if entry["name"] != "loss":
            found[f"scalar-{place}"] = figures.scalar(entry)
    for place, suspect in enumerate(document["suspects"]):
        found[f"values-{place}"] = figures.values(suspect)
        found[f"codes-{place}"] = figures.codes(suspect)
        found[f"scales-{place}"] = figures.scales(suspect)
        found[f"history-{place}"] = figures.scale_history(suspect)
    return {name: figure for name, figure in found.items() if figure is not None}


def maps_of(document: Row) -> Row:
    """What the script needs for the heat maps: labels that Plotly shows as they are, and plain words to search in."""
    maps = document["maps"]
    return {
        "rows": [figures.label(row["name"]) for row in maps["rows"]],
        "search": [text.clean("\n".join(row["layers"]))[:MAX_SEARCH].lower() for row in maps["rows"]],
        "columns": [figures.label(column) for column in maps["columns"]],
        "tensors": {name: figures.label(name) for by_tensor in maps["maps"].values() for name in by_tensor},
        "maps": maps["maps"],
    }


def island(data: Any) -> str:
    """JSON that can stand inside a ``script`` element: no character of it means anything to an HTML parser."""
    escaped = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return escaped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(scripts: list[str]) -> str:
    """The Content-Security-Policy: nothing is loaded, and only these scripts run.

    Plotly sets styles as attributes and keeps them in a ``style`` element, and draws heat maps as ``data:`` images.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def words(value: Any) -> str:
    """Any JSON value as a short text for people."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _packaged(name: str) -> str:
    return resources.files("flightrec.reports.page").joinpath(name).read_text(encoding="utf-8")


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"the HTML report needs the package {name.partition('.')[0]} ({error}); install it with: "
            "pip install 'torch-flightrec[report]'"
        ) from error
