"""The page's plots as Plotly figures: plain JSON data, built from the document. Pure functions, no state.

Plotly takes some HTML tags and entities in labels for markup; ``label`` makes any text of an incident plain. Colours
are those of Okabe and Ito, which colour-blind readers can tell apart; the page adds the theme (light or dark).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flightrec.reports.text import clean, key_name, number, shorten

BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, "#56B4E9")
BAND = "rgba(0, 158, 115, 0.14)"
"""Behind what a format can hold."""

MAX_LABEL = 60
MAX_RULES = 8
"""Rules with a line of their own in the timeline."""

Figure = dict[str, Any]
Row = Mapping[str, Any]


def label(text: str, width: int = MAX_LABEL) -> str:
    """A text that Plotly shows as it is: no control characters, no tag, no entity."""
    short = shorten(clean(text), width)
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def timeline(document: Row) -> Figure:
    """The loss over the iterations, and below it what was recorded, what fired, and where it began."""
    loss = next((entry for entry in document["scalars"] if entry["name"] == "loss"), None)
    traces = _lines(loss, BLUE) if loss else []
    rows = _events(document, loss)
    for place, (name, xs, colour, symbol) in enumerate(rows):
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": xs,
            "y": [place] * len(xs),
            "xaxis": "x",
            "yaxis": "y2",
            "showlegend": False,
            "marker": {"color": colour, "size": 9, "symbol": symbol},
            "hovertemplate": "%{x}<extra>" + name + "</extra>",
        }
        traces.append(trace)
    names = [name for name, _, _, _ in rows]
    lower = min(0.6, 0.1 + 0.07 * len(rows))
    axis = {"tickvals": list(range(len(rows))), "ticktext": names, "domain": [0, lower if loss else 1]}
    layout = {
        "xaxis": {"title": {"text": "iteration"}, "anchor": "y2"},
        "yaxis": {"title": {"text": "loss"}, "domain": [min(lower + 0.06, 0.95), 1]},
        "yaxis2": {**axis, "range": [-0.7, len(rows) - 0.3], "zeroline": False},
        "height": 260 + 26 * len(rows),
    }
    return {"data": traces, "layout": layout}


def scalar(entry: Row) -> Figure:
    """One metric over the iterations."""
    layout = {"xaxis": {"title": {"text": "iteration"}}, "yaxis": {"title": {"text": label(entry["name"], 30)}}}
    return {"data": _lines(entry, BLUE), "layout": {**layout, "height": 280}}


def values(suspect: Row) -> Figure | None:
    """Histogram of a record's values: binades on the x axis, what the format can hold behind them."""
    found = suspect["values"]
    if not found or not found["positive"]:
        return None
    xs = [found["first_binade"] + place for place in range(len(found["positive"]))]
    traces = [
        _bars("positive", xs, found["positive"], BLUE),
        _bars("negative", xs, found["negative"], ORANGE),
    ]
    before = (suspect["before"] or {}).get("values")
    if before and before["positive"]:
        xs_before = [before["first_binade"] + place for place in range(len(before["positive"]))]
        both = [p + n for p, n in zip(before["positive"], before["negative"], strict=True)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"both, iteration {suspect['before']['iteration']}",
                "x": xs_before,
                "y": [count or None for count in both],
                "line": {"color": PURPLE, "shape": "hvh"},
            }
        )
    layout: Figure = {
        "xaxis": {"title": {"text": "log2 of the magnitude"}},
        "yaxis": {"title": {"text": "values"}, **_counts([*found["positive"], *found["negative"]])},
        "barmode": "group",
        "bargap": 0.1,
        "height": 340,
    }
    limits = found["range"]
    if limits and limits["smallest"] and limits["largest"]:
        low, high = math.log2(limits["smallest"]) - 0.5, math.log2(limits["largest"])
        layout["shapes"] = [_band(low, high), _mark(high)]
        layout["annotations"] = [_note(high, f"largest that {label(limits['format'], 24)} holds")]
    return {"data": traces, "layout": layout}


def codes(suspect: Row) -> Figure | None:
    """Histogram of a record's codes, in the order of what they stand for; the ends of the format are marked."""
    found = suspect["codes"]
    if not found or not found["values"]:
        return None
    numbers, counts = found["values"], found["counts"]
    last = len(numbers) - 1
    colours = [RED if place in (0, last) else BLUE for place in range(len(numbers))]
    trace = {
        "type": "bar",
        "name": "codes",
        "x": list(range(len(numbers))),
        "y": counts,
        "customdata": numbers,
        "marker": {"color": colours},
        "hovertemplate": "%{customdata}: %{y}<extra></extra>",
        "showlegend": False,
    }
    limits = found["range"] or {}
    marks = {0.0, numbers[0], numbers[-1], 1.0, -1.0, limits.get("smallest_normal", 0.0)}
    ticks = [place for place, value in enumerate(numbers) if value in marks]
    layout: Figure = {
        "xaxis": {
            "title": {"text": "codes, in the order of their values"},
            "tickvals": ticks,
            "ticktext": [number(numbers[place]) for place in ticks],
        },
        "yaxis": {"title": {"text": "codes"}, **_counts(counts)},
        "bargap": 0,
        "height": 320,
    }
    if limits:
        small = [place for place, value in enumerate(numbers) if abs(value) < limits["smallest_normal"]]
        layout["shapes"] = [_band(-0.5, last + 0.5), _mark(0), _mark(last)]
        if small:
            layout["shapes"].append(_band(small[0] - 0.5, small[-1] + 0.5, "rgba(204, 121, 167, 0.25)"))
        layout["annotations"] = [_note(last, f"the format's largest, {number(limits['largest'])}")]
    return {"data": [trace], "layout": layout}


def scales(suspect: Row) -> Figure | None:
    """Map of the scales of a tensor in blocks."""
    found = suspect["scales"]
    if not found or not found["map"]:
        return None
    logs = [[math.log2(v) if v is not None and v > 0 else None for v in row] for row in found["map"]]
    rows, columns = found["shape"]
    trace = {
        "type": "heatmap",
        "z": logs,
        "customdata": found["map"],
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": "log2"}, "thickness": 12},
        "hovertemplate": "row %{y}, column %{x}<br>scale %{customdata}<extra></extra>",
        "dx": max(1, -(-columns // len(logs[0]))),
        "dy": max(1, -(-rows // len(logs))),
        "x0": 0,
        "y0": 0,
    }
    layout = {
        "xaxis": {"title": {"text": "block, along the columns"}},
        "yaxis": {"title": {"text": "block, along the rows"}, "autorange": "reversed"},
        "height": 360,
    }
    return {"data": [trace], "layout": layout}


def scale_history(suspect: Row) -> Figure | None:
    """How amax and scale of a tensor went."""
    found = suspect["history"]
    curves = {
        "amax": ("amax", "y", BLUE),
        "quantizer_amax": ("the quantizer's amax", "y", ORANGE),
        "scale_min": ("smallest scale", "y2", GREEN),
        "scale_max": ("largest scale", "y2", PURPLE),
    }
    traces = []
    for name, (title, axis, colour) in curves.items():
        if name not in found:
            continue
        if name == "scale_min" and found[name] == found.get("scale_max"):
            continue
        if name == "scale_max" and found[name] == found.get("scale_min"):
            title = "scale"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": title,
                "x": found["iterations"],
                "y": found[name],
                "xaxis": "x",
                "yaxis": axis,
                "line": {"color": colour},
                "marker": {"size": 4},
                "connectgaps": False,
            }
        )
    if not traces:
        return None
    two = {trace["yaxis"] for trace in traces} == {"y", "y2"}
    only = traces[0]["yaxis"]
    layout: Figure = {"xaxis": {"title": {"text": "iteration"}, "anchor": "y2" if two else only}, "height": 360}
    for axis, title, domain in (("y", "amax", [0.55, 1]), ("y2", "scale", [0, 0.45])):
        if two or axis == only:
            name = "yaxis" if axis == "y" else "yaxis2"
            span = {"domain": domain if two else [0, 1], "nticks": 5, "exponentformat": "power"}
            layout[name] = {"title": {"text": title}, "type": "log", **span}
    return {"data": traces, "layout": layout}


def _lines(entry: Row, colour: str) -> list[Figure]:
    """One curve an attempt: a run that was rewound goes back in its iterations."""
    attempts = list(dict.fromkeys(entry["attempts"]))
    name = label(entry["name"], 30)
    traces = []
    for place, attempt in enumerate(attempts):
        mine = [number for number, other in enumerate(entry["attempts"]) if other == attempt]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name if len(attempts) == 1 else f"{name}, attempt {attempt}",
                "x": [entry["iterations"][number] for number in mine],
                "y": [entry["values"][number] for number in mine],
                "line": {"color": colour if not place else COLOURS[place % len(COLOURS)], "width": 1.5},
                "marker": {"size": 3},
            }
        )
    return traces


def _events(document: Row, loss: Row | None) -> list[tuple[str, list[int], str, str]]:
    """Lines of the timeline from below: name, iterations, colour, symbol; empty ones are left out."""
    iterations = document["iterations"]
    seen = [entry["iteration"] for entry in iterations if entry["num_records"] and not entry["blind"]]
    missed = [entry["iteration"] for entry in iterations if entry["blind"]]
    missed += [entry["iteration"] for entry in document["blind"] if entry["iteration"] >= 0]
    rows = [("recorded", sorted(set(seen)), GREEN, "square"), ("not recorded", sorted(set(missed)), "#888888", "x")]
    if loss:
        bad = [time for time, value in zip(loss["iterations"], loss["values"], strict=True) if value is None]
        rows.append(("loss not finite", bad, RED, "x"))
    rules: dict[str, set[int]] = {}
    for firing in document["firings"]:
        rules.setdefault(firing["rule"], set()).add(firing["iteration"])
    for name, times in list(rules.items())[:MAX_RULES]:
        rows.append((label(f"rule {name}", 24), sorted(times), ORANGE, "diamond"))
    changes = [change["iteration"] for change in document["verdict"].get("precursors") or ()]
    rows.append(("precursor", sorted(set(changes)), PURPLE, "triangle-up"))
    before = (document["verdict"].get("began") or {}).get("before")
    blamed = before["iteration"] if before else document["blame"][0]["iteration"] if document["blame"] else None
    rows.append(("it began", [] if blamed is None else [blamed], RED, "star"))
    rows.append(("it was noticed", [document["trigger"]["iteration"]], RED, "circle"))
    return [row for row in rows if row[1]]


def _bars(name: str, xs: Sequence[float], counts: Sequence[int], colour: str) -> Figure:
    hover = "2^%{x}: %{y}<extra>" + name + "</extra>"
    return {"type": "bar", "name": name, "x": xs, "y": counts, "marker": {"color": colour}, "hovertemplate": hover}


def _counts(counts: Sequence[int]) -> Figure:
    """A logarithmic axis on which a single one can be seen."""
    return {"type": "log", "dtick": 1, "range": [math.log10(0.6), math.log10(2.5 * max(1, *counts))]}


def _band(low: float, high: float, colour: str = BAND) -> Figure:
    shape = {"type": "rect", "x0": low, "x1": high, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
    return {**shape, "fillcolor": colour, "line": {"width": 0}, "layer": "below"}


def _mark(x: float) -> Figure:
    line = {"color": RED, "width": 1.5, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _note(x: float, text: str) -> Figure:
    place = {"x": x, "xref": "x", "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top"}
    return {**place, "text": text, "showarrow": False}


def title_of(suspect: Row) -> str:
    """One suspect as words, for headings."""
    return f"{key_name(suspect['key'])}, iteration {suspect['iteration']}"
