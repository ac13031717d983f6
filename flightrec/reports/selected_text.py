"""Prints the field ``selected`` of the inspect document: chosen records, and elements of the worst of them.

Offline, any thread, no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from flightrec.reports.text import clean, key_name, line, number, place_name, share, shorten, title

NUM_ROWS = 200
"""Records that are printed."""

REASONS = {
    "nonfinite": "the first value that is not finite",
    "quantized_nonfinite": "the first code that stands for no finite number",
    "largest_error": "where quantization changed the value most",
    "largest": "the largest magnitude",
}

Row = Mapping[str, Any]

_NUMBERS = f"{'amax':>9}{'NaN, Inf':>9}{'satur.':>8}{'underfl.':>9}"


def render_selected(document: Mapping[str, Any], console: Console) -> None:
    """Print what is selected of an incident, without its story.

    Args:
        document: of ``selected.inspect_path``.
        console: see ``text.report_console``.
    """
    selected = document["selected"]
    about = document["incident"]
    console.print(Text.assemble("Incident ", (clean(about["id"]), "bold")))
    count, shown = selected["num_selected"], selected["records"]
    worst = f", the worst {len(shown)}" if selected["worst"] else ""
    title(console, "Selected records", f"{count} of {sum(rank['num_records'] for rank in document['ranks'])}{worst}")
    _rows(shown[:NUM_ROWS], console, many_ranks=len(document["ranks"]) > 1)
    if len(shown) > NUM_ROWS:
        line(console, f"... and {len(shown) - NUM_ROWS} more; --json has all, --worst N the worst", "dim")
    for entry in selected["values"]:
        _values(entry, console, many_ranks=len(document["ranks"]) > 1)


def _rows(rows: Sequence[Row], console: Console, *, many_ranks: bool) -> None:
    """A line a record; columns that are the same in all take no room."""
    places = [("iter", [str(row["iteration"]) for row in rows])]
    if many_ranks:
        places.append(("rank", [str(row["rank"]) for row in rows]))
    microbatches = [row["key"]["microbatch"] for row in rows]
    if len(set(microbatches)) > 1:
        places.append(("mb", ["-" if number < 0 else str(number) for number in microbatches]))
    widths = [max(map(len, [name, *texts])) + 1 for name, texts in places]
    room = console.width - 2 - sum(widths) - len(_NUMBERS)
    head = "".join(f"{name:<{width}}" for (name, _), width in zip(places, widths, strict=True))
    line(console, f"{head}{'layer and tensor':<{room}}{_NUMBERS}", "dim", indent=1)
    for number_of, row in enumerate(rows):
        where = "".join(f"{texts[number_of]:<{width}}" for (_, texts), width in zip(places, widths, strict=True))
        name = shorten(key_name(row["key"]), room - 1)
        style = "bold" if row["nonfinite_share"] else ""
        line(console, f"{where}{name:<{room}}{_statistics(row)}", style, indent=1)


def _statistics(row: Row) -> str:
    total = (row["nan"] or 0) + (row["inf"] or 0)
    nonfinite = number(total) if total or not row["quantized_nonfinite"] else f"q {number(row['quantized_nonfinite'])}"
    shares = f"{share(row['saturated_share']):>8}{share(row['underflow_share']):>9}"
    return f"{number(row['amax']):>9}{nonfinite:>9}{shares}"


def _values(entry: Row, console: Console, *, many_ranks: bool) -> None:
    title(console, "Elements of", shorten(key_name(entry["key"]), 66))
    shape = " x ".join(map(str, entry["shape"]))
    rank = f", rank {entry['rank']}" if many_ranks else ""
    words = [f"iteration {entry['iteration']}{rank}", place_name(entry["key"]), shape, clean(entry["format"])]
    line(console, ", ".join(word for word in words if word))
    if entry["absent"]:
        line(console, clean(entry["absent"]), "yellow")
        return
    line(console, f"around {_index(entry['worst'])}: {REASONS[entry['reason']]}")
    room = max(len(_index(element["index"])) for element in entry["elements"]) + 3
    codes = f"{'code':>7}{'number':>8}{'x scale':>13}{'decoded':>12}" if entry["format"] else ""
    line(console, f"{'index':<{room}}{'value':>12}{codes}", "dim")
    for element in entry["elements"]:
        is_worst = element["index"] == entry["worst"]
        place = _index(element["index"]) + (" <" if is_worst else "")
        line(console, f"{place:<{room}}{_numbers(element, has_codes=bool(codes))}", "bold" if is_worst else "")


def _numbers(element: Row, *, has_codes: bool) -> str:
    value = f"{_exactly(element['value']):>12}"
    if not has_codes:
        return value
    code = "-" if element["code"] is None else f"{element['code']:#04x}" if element["code"] >= 0 else element["code"]
    return (
        f"{value}{code:>7}{_exactly(element['code_value']):>8}"
        f"{_exactly(element['scale_inv']):>13}{_exactly(element['decoded']):>12}"
    )


def _index(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _exactly(value: Any) -> str:
    """A number in five digits: more than the table of records shows, for neighbours of a fault differ in them."""
    return f"{value:.5g}" if isinstance(value, float) else number(value)
