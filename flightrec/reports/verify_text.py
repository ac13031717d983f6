"""Renders what ``verify`` found for a terminal; texts of an incident are data, as in ``text``.

Offline, any thread, no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from flightrec.reports.text import clean, key_name, line, place_name, title

MAX_MISMATCHES = 20
"""Mismatches that are told one by one; JSON has all."""

_WHAT = {"codes": "Codes, quantized again", "product": "Products, in float64"}
_NOUN = {"codes": "codes", "product": "elements", "scales": "scales", "amax": "amax words"}

Row = Mapping[str, Any]


def render_verified(document: Row, console: Console) -> None:
    """Print what was compared and what differs.

    Args:
        document: what ``analysis.verify.verify_path`` gave.
        console: where to; see ``text.report_console``.
    """
    title(console, "Verify", clean(document["incident_id"]))
    line(console, document["sentence"], "bold" if document["agrees"] else "bold red")
    _table(document["summary"], console)
    found = document["mismatches"]
    for mismatch in found[:MAX_MISMATCHES]:
        _mismatch(mismatch, console)
    if len(found) > MAX_MISMATCHES:
        line(console, f"... and {len(found) - MAX_MISMATCHES} more: --json has all of them", "dim")
    _left_out(document["summary"], console)
    console.print()


def _table(summary: Row, console: Console) -> None:
    console.print()
    line(console, f"{'':<24}{'compared':>10}{'agree':>8}{'elements':>16}{'not compared':>14}", "dim")
    for what, row in summary.items():
        numbers = (
            f"{row['num_compared']:>10}{row['num_agreeing']:>8}{row['num_elements']:>16}{row['num_not_compared']:>14}"
        )
        line(console, f"{_WHAT[what]:<24}{numbers}")


def _mismatch(mismatch: Row, console: Console) -> None:
    rank = f", rank {mismatch['rank']}" if mismatch["rank"] else ""
    attempt = f" of attempt {mismatch['attempt']}" if mismatch["attempt"] else ""
    where = f"iteration {mismatch['iteration']}{attempt}, {place_name(mismatch)}{rank}"
    title(console, f"{mismatch['kind'].capitalize()} differ: {key_name(mismatch)}", where)
    told = f"{mismatch['num_wrong']} of {mismatch['num_compared']} {_NOUN[mismatch['kind']]} ({mismatch['side']})"
    if mismatch["num_rows"] >= 0:
        more = ", ..." if mismatch["num_rows"] > len(mismatch["rows"]) else ""
        rows = ", ".join(map(str, mismatch["rows"]))
        told += f", in {mismatch['num_rows']} row{'s' * (mismatch['num_rows'] != 1)}: {rows}{more}"
    line(console, told)
    for element in mismatch["elements"]:
        line(
            console,
            f"{element['index']}: expected {clean(element['expected'])}, found {clean(element['found'])}",
            indent=4,
        )
    line(console, clean(mismatch["meaning"]))


def _left_out(summary: Row, console: Console) -> None:
    if not any(row["not_compared"] or row["notes"] or row["num_free_elements"] for row in summary.values()):
        return
    title(console, "Not verified, or only in part")
    for what, row in summary.items():
        noun = "products" if what == "product" else "sides of tensors"
        for entry in row["not_compared"]:
            line(console, f"{entry['count']} {noun} not comparable: {clean(entry['reason'])}", hanging=2)
        for entry in row["notes"]:
            line(console, f"{entry['count']} {noun}: {clean(entry['reason'])}", "dim", hanging=2)
        if row["num_free_elements"]:
            line(
                console,
                f"{row['num_free_elements']} elements without a code to compare with (NaN where the format has none)",
            )
