"""Renders the document of ``reports/quantizers.py`` for a terminal; texts of an incident are data, as in ``text``.

Offline, any thread, no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from flightrec.reports.text import clean, key_name, line, number, place_name, share, shorten, sparkline, title

NUM_USES = 16
"""The last uses that are shown."""

NUM_AMAXES = 32
"""Values of an amax history that are shown."""

_DIRECTIONS = {
    "multiply_to_encode": "the scale multiplies to encode (codes / scale decodes)",
    "multiply_to_decode": "the scale multiplies to decode (codes x scale)",
    "none": "no scale",
    "unknown": "what its arrays mean is not known",
}

Row = Mapping[str, Any]


def render_quantizers(document: Row, console: Console) -> None:
    """Print the quantizers.

    Args:
        document: what ``quantizers.quantizers_of`` gave.
        console: where to; see ``text.report_console``.
    """
    for entry in document["quantizers"]:
        _render(entry, console)


def _render(entry: Row, console: Console) -> None:
    rank = f", rank {entry['rank']}" if entry["rank"] else ""
    title(console, f"Quantizer of {key_name(entry['key'])}", f"{place_name({**entry['key'], 'microbatch': -1})}{rank}")
    blocks = " x ".join(str(size) for size in entry["block_shape"])
    line(console, clean(entry["format"]) + (f", a scale for each {blocks} elements" if blocks else ""))
    line(console, clean(entry["class_name"]))
    line(console, _DIRECTIONS.get(entry["scale_direction"], clean(entry["scale_direction"])))
    for name, value in words(entry["metadata"]):
        line(console, clean(f"{name}: {value}"), "dim", hanging=4)
    line(console, _story(entry), "bold")
    if entry["amax_history"]:
        shown = " ".join(number(value) for value in entry["amax_history"][:NUM_AMAXES])
        more = f" ... ({len(entry['amax_history'])})" if len(entry["amax_history"]) > NUM_AMAXES else ""
        line(console, f"amax history: {shown}{more}", hanging=14)
    console.print()
    line(console, _HEAD, "dim", indent=1)
    for use in entry["uses"][-NUM_USES:]:
        line(console, _columns(use), indent=1)
    _curves(entry["history"], console)


def _story(entry: Row) -> str:
    """One sentence about the last use: ``scale 64, unchanged for 30 iterations, while amax rose from 1.2 to 37``."""
    last, since = entry["uses"][-1], entry["since"]
    if last["scale_min"] is None:
        return "its scale is not known"
    told = f"scale {_scale(last)} in iteration {last['iteration']}"
    if last["scale_age"] is not None:
        told += f", {last['scale_age']}"
    now = last["amax"] if last["amax"] is not None else last["quantizer_amax"]
    then = since["amax"] if since else None
    if isinstance(now, (int, float)) and isinstance(then, (int, float)):
        moved = f"rose from {number(then)} to" if now > then else f"fell from {number(then)} to"
        told += f", while amax {'stayed' if now == then else moved} {number(now)}"
    return told


_HEAD = f"{'iteration':<13}{'amax':>9}{'its own':>9}{'scale':>19}{'range':>8}{'clipped':>10}{'stands':>9}"


def _columns(use: Row) -> str:
    where = f"{use['iteration']}" + (f" mb {use['microbatch']}" if use["microbatch"] >= 0 else "")
    unchanged, differed = use["scale_unchanged_iterations"], use["scale_differed_iterations"]
    exactly = "" if unchanged is None or differed == unchanged + 1 else "+"
    stands = "-" if unchanged is None else f"{unchanged}{exactly}"
    ratio = number(use["range_ratio"])
    return (
        f"{shorten(where, 12):<13}{number(use['amax']):>9}{number(use['quantizer_amax']):>9}{_scale(use):>19}"
        f"{ratio:>8}{share(use['clipped_share']):>10}{stands:>9}"
    )


def _scale(use: Row) -> str:
    low, high = use["scale_min"], use["scale_max"]
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _curves(history: Row | None, console: Console) -> None:
    if history is None or len(history["iterations"]) < 2:
        return
    console.print()
    line(
        console, f"over {len(history['iterations'])} iterations of its history, the last on the right", "dim", indent=1
    )
    for name, statistic in (("amax", "amax"), ("its own", "quantizer_amax"), ("scale", "scale_max")):
        values = [value for value in history[statistic] if value != "NaN"]
        if values:
            line(console, f"{name:<9}{sparkline(values)}", indent=1)


def words(metadata: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested metadata as flat (name, value) pairs, without what is null or empty."""
    found: list[tuple[str, Any]] = []
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            found += words(value, f"{prefix}{name}.")
        elif value is not None and value != [] and value != "":
            found.append((f"{prefix}{name}", value))
    return found
