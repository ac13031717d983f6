"""Renders the document of ``reports/diff.py`` for a terminal: 80 columns, no colour where none is wanted.

Texts from an incident are data, as in ``reports/text.py``. Offline, any thread, no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from flightrec.reports.text import clean, key_name, line, number, place_name, shorten, title

NUM_SHOWN = 12
"""Rows of a list that are shown; ``--json`` has more."""

NUM_ITERATIONS = 2
"""Pairs of iterations of which the facts are shown."""

Row = Mapping[str, Any]


def render_diff(document: Row, console: Console) -> None:
    """Print a comparison.

    Args:
        document: what ``diff.diff`` gave.
        console: where to; see ``text.report_console``.
    """
    _head(document, console)
    _first(document["first"], document, console)
    _differences(document, console)
    for side in ("a", "b"):
        _only(document, side, console)
    for name in ("configuration", "versions", "environment"):
        _facts(name.capitalize(), document[name], console)
    told = [entry for entry in document["iterations"] if entry["facts"]]
    for entry in told[:NUM_ITERATIONS]:
        _facts(f"Iterations {_time(entry['a'])} and {_time(entry['b'])}", entry["facts"], console)
    _more(console, len(told) - NUM_ITERATIONS)


def _head(document: Row, console: Console) -> None:
    compared, a, b = document["compared"], document["a"], document["b"]
    for side, about in (("A", a), ("B", b)):
        if side == "A" or about["path"] != a["path"]:
            line(console, Text.assemble((f"{side}  ", "bold"), clean(about["id"])), indent=0, hanging=3)
    first, last = compared[0], compared[-1]
    line(console, f"A is rank {first['a']['rank']}, iteration {_time(first['a'])}; B is rank {first['b']['rank']}, "
                  f"iteration {_time(first['b'])}" + (f"; {len(compared)} such pairs, to A's iteration "
                  f"{_time(last['a'])}" if len(compared) > 1 else ""))  # fmt: skip
    line(console, _rule(document))
    counts = [f"{document['num_pairs']} pairs of records", f"{document['num_different']} differ"]
    counts += [f"{document['num_within']} are within the tolerance"] if document["num_within"] else []
    counts += [f"{document['num_not_compared']} have bytes on one side only"] if document["num_not_compared"] else []
    line(console, ", ".join([*counts, f"{document['num_equal']} are the same"]))


def _rule(document: Row) -> str:
    if document["by"] == "statistics":
        return (
            f"by statistics: magnitudes beyond a factor of {document['factor']:g}, shares by {document['share']:.0%} "
            "and more, NaN and Inf on one side only"
        )
    tolerance = document["tolerance"]
    if tolerance is None:
        return "bit by bit; statistics where one side has no bytes"
    words = [f"{name} {value:g}" for name, value in tolerance["formats"].items()]
    if tolerance["everywhere"] is not None:
        words.append(f"{tolerance['everywhere']:g}{' elsewhere' if words else ''}")
    elif tolerance["own_step"]:
        words.append("one step of each format")
    return f"within a tolerance, relative to the larger: {', '.join(words)}"


def _first(first: Row | None, document: Row, console: Console) -> None:
    title(console, "Where they part first")
    if first is None:
        line(console, "nowhere: no pair of records differs" if document["num_pairs"] else "no record has its like")
        return
    line(console, Text(key_name(first["key"]), "bold"))
    where = f"iteration {_time(first['a'])}"
    if _time(first["a"]) != _time(first["b"]):
        where += f" and {_time(first['b'])}"
    line(console, f"{where}, {place_name(first['key'])}; differs in {', '.join(first['reasons'])}")
    line(console, clean(first["sentence"]))
    console.print()
    line(console, f"{'':<24}{'A':>12}{'B':>12}", "dim")
    for name, values in first["side_by_side"].items():
        same = values["a"] == values["b"]
        if same and not values["a"]:
            continue
        told = f"{name:<24}{number(values['a']):>12}{number(values['b']):>12}{'' if same else ' <'}"
        line(console, told, "" if same else "bold")
    for fact in first["quantizer"][:NUM_SHOWN]:
        line(console, _fact(fact), hanging=2)


def _differences(document: Row, console: Console) -> None:
    found = document["differences"]
    if len(found) < 2:
        return
    title(console, "All that differ", "in the order in which they depend on each other")
    for entry in found[:NUM_SHOWN]:
        mark = "" if len(document["compared"]) < 2 else f"{_time(entry['a'])} "
        microbatch = entry["key"]["microbatch"]
        place = f" mb{microbatch}" if microbatch >= 0 else ""
        name = shorten(f"{mark}{key_name(entry['key'])}", 34 - len(place)) + place
        line(console, f"{name:<35}{shorten(_short(entry), 43)}")
    _more(console, document["num_different"] - NUM_SHOWN)


def _short(entry: Row) -> str:
    """What differs, in half a line."""
    read = next((it for it in entry["components"] if it["num_different"]), None)
    if read is not None:
        apart = f", {number(read['max_difference'])} apart" if read["max_difference"] else ""
        return f"{read['num_different']} of {read['num_elements']} elements{apart}"
    if entry["statistics"]:
        name, values = next(iter(entry["statistics"].items()))
        return f"{name} {number(values['a'])} and {number(values['b'])}"
    return ", ".join(entry["reasons"])


def _only(document: Row, side: str, console: Console) -> None:
    found = document[f"only_{side}"]
    if not found:
        return
    title(console, f"Only in {side.upper()}", f"{document[f'num_only_{side}']} records")
    for entry in found[:4]:
        line(console, f"{key_name(entry['key'])}: iteration {_time(entry)}, {place_name(entry['key'])}", hanging=2)
    _more(console, document[f"num_only_{side}"] - 4)


def _facts(name: str, found: Sequence[Row], console: Console) -> None:
    if not found:
        return
    title(console, name)
    for fact in found[:NUM_SHOWN]:
        line(console, _fact(fact), hanging=2)
    _more(console, len(found) - NUM_SHOWN)


def _fact(fact: Row) -> str:
    values = [shorten(clean("absent" if it is None else str(it)), 60) for it in (fact["a"], fact["b"])]
    return f"{clean(fact['path']) or 'all'}: {values[0]} in A, {values[1]} in B"


def _time(moment: Row) -> str:
    return f"{moment['attempt']}.{moment['iteration']}" if moment["attempt"] else str(moment["iteration"])


def _more(console: Console, count: int) -> None:
    if count > 0:
        line(console, f"... and {count} more; --json has them", "dim")
