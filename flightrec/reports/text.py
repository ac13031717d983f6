"""Renders the document of ``reports/summary.py`` for a terminal: 80 columns, no colour where none is wanted.

Texts from an incident (layer names, messages, host) are data: control characters in them are shown, never obeyed.
Offline, any thread, no state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.text import Text

WIDTH = 80
"""Columns of the report."""

NUM_FINDINGS = 3
"""Findings that are told in full."""

NUM_PRECURSORS = 3
"""Changes before the origin that are told beside the story."""

NUM_FIRINGS = 8
"""Firings that are told in full."""

NUM_FIRST_STEPS = 12
"""Steps of the fault's way shown for the stage in which it began; ``NUM_LATER_STEPS`` for each later stage."""

NUM_LATER_STEPS = 3

MAX_CHARACTERS = 4000
"""Of one text from an incident."""

_SEVERITY_STYLE = {"fault": "bold red", "warning": "yellow", "watch": "cyan"}
_BARS = "▁▂▃▄▅▆▇█"

Row = Mapping[str, Any]


def report_console(file: IO[str] | None = None, *, width: int = WIDTH) -> Console:
    """Make a console for reports: 80 columns, colour only on a terminal, nothing in a text is taken for markup."""
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False)


def render(document: Mapping[str, Any], console: Console) -> None:
    """Print an incident's story.

    Args:
        document: what ``summary.summarize`` gave.
        console: where to; see ``report_console``.
    """
    _head(document, console)
    _verdict(document["verdict"], console)
    _fired(document, console)
    _began(document["blame"], console)
    _way(document["way"], console)
    _around(document["around"], console)
    _loss(document, console)
    _absent(document, console)


def clean(text: str) -> str:
    """Make a text safe to print: control characters, bidirectional marks, lone surrogates as escapes; not endless."""
    text = shorten(text, MAX_CHARACTERS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def key_name(key: Row | None) -> str:
    """Give a key as words: layer, tensor, part."""
    if key is None:
        return "the run"
    part = f"[{key['part']}]" if key["part"] else ""
    return clean(f"{key['layer']} {key['tensor']}{part}".strip())


def place_name(key: Row | None) -> str:
    """Tell where in its iteration a key was seen, as words."""
    if key is None:
        return ""
    words = [] if key["microbatch"] < 0 else [f"microbatch {key['microbatch']}"]
    words.append(key["stage"].replace("_", " "))
    if key["phase"] != "train":
        words.append(key["phase"])
    if key["call"]:
        words.append(f"call {key['call']}")
    return ", ".join(words)


def number(value: Any) -> str:
    """Give a number in at most nine characters: counts as they are, others with three digits; ``-`` for absent."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return {"Infinity": "Inf", "-Infinity": "-Inf"}.get(value, clean(value))
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def share(value: Any) -> str:
    """Give a share as percent, ``-`` for absent."""
    if value is None or isinstance(value, str):
        return "-"
    percent = 100 * value
    return "0%" if percent == 0 else "<0.01%" if percent < 0.01 else f"{percent:.3g}%"


def shorten(text: str, width: int) -> str:
    """Take the middle out of a text that is too long; both ends tell more than the middle."""
    if len(text) <= width:
        return text
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def sparkline(values: Sequence[Any], width: int = 60) -> str:
    """Draw the last values as one line of bars; what is not a finite number is an ``!``."""
    shown = list(values)[-width:]
    finite = [value for value in shown if isinstance(value, (int, float))]
    if not finite:
        return "!" * len(shown)
    low, high = min(finite), max(finite)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((v - low) / step)] if isinstance(v, (int, float)) else "!" for v in shown)


def line(console: Console, text: str | Text, style: str = "", indent: int = 2, hanging: int = 0) -> None:
    """Print a text wrapped and indented; lines after the first by ``hanging`` more."""
    content = Text(text, style=style) if isinstance(text, str) else text
    for place, part in enumerate(content.wrap(console, console.width - indent - hanging)):
        part.rstrip()
        console.print(Text(" " * (indent + (hanging if place else 0))).append_text(part))


def title(console: Console, text: str, note: str = "") -> None:
    """Print the heading of a section."""
    console.print()
    console.print(Text.assemble((text, "bold"), (f"  {note}" if note else "", "dim")))


def _head(document: Mapping[str, Any], console: Console) -> None:
    about, ranks, iterations = document["incident"], document["ranks"], document["iterations"]
    console.print(Text.assemble("Incident ", (clean(about["id"]), "bold")))
    numbers = ", ".join(str(rank["rank"]) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    created = about["created"].replace("T", " ").replace("+00:00", " UTC")
    line(console, f"{created}, rank {numbers} of {about['world_size']} on {clean(about['host'])}")
    line(console, f"run {clean(about['run_id'])}, attempt {about['attempt']}")
    span = f"iterations {iterations[0]['iteration']} to {iterations[-1]['iteration']}" if iterations else "no iteration"
    num_records = sum(rank["num_records"] for rank in ranks)
    megabytes = sum(rank["bytes"] for rank in ranks) / 1e6
    line(console, f"{span}, {num_records} records, {megabytes:.1f} MB of tensors")
    for words in _host_tier(iterations):
        line(console, words, "dim")
    if about["ended"]:
        line(console, f"ended early: {clean(about['ended'])}", "yellow")


def _host_tier(iterations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tell which iterations came from the host tier, and which are landmarks."""
    older = [entry["iteration"] for entry in iterations if entry["tier"] == "host" and not entry["landmark"]]
    if older:
        yield f"from the host tier: {len(older)} of them, iterations {older[0]} to {older[-1]}"
    for entry in iterations:
        if entry["landmark"]:
            yield f"landmark: iteration {entry['iteration']}, about {entry['landmark']} before the fault"


def _verdict(verdict: Row, console: Console) -> None:
    title(console, "Verdict", f"{verdict['kind']}, {verdict['confidence']}")
    line(console, clean(verdict["story"]))
    for change in verdict["precursors"][:NUM_PRECURSORS]:
        line(console, f"before it: {clean(change['sentence'])}", "yellow", hanging=2)
    _more(console, len(verdict["precursors"]) - NUM_PRECURSORS, "change before it", "changes before it")
    if verdict["advice"]:
        line(console, "This configuration would have shown where it began:")
        for text in verdict["advice"].splitlines():
            console.print(Text(f"    {clean(text)}", style="dim"))


def _fired(document: Mapping[str, Any], console: Console) -> None:
    firings = document["firings"]
    title(console, "What fired", f"{len(firings)} in all" if len(firings) > 1 else "")
    trigger = document["trigger"]
    # The trigger first; what else the same rule found in the same iteration is one fault seen many times.
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for firing in [trigger, *(firing for firing in firings if firing != trigger)]:
        groups.setdefault((firing["severity"], firing["rule"], firing["iteration"]), []).append(firing)
    for (severity, rule, iteration), group in list(groups.items())[:NUM_FIRINGS]:
        style = _SEVERITY_STYLE.get(severity, "")
        others = f" and {len(group) - 1} more" if len(group) > 1 else ""
        where = f" in iteration {iteration}: {key_name(group[0]['key'])}{others}"
        line(console, Text.assemble((f"{severity:<8}", style), (clean(rule), "bold"), where), hanging=8)
        line(console, clean(group[0]["message"]), indent=10)
    _more(console, len(groups) - NUM_FIRINGS, "rule and iteration", "rules and iterations")


def _began(findings: Sequence[Row], console: Console) -> None:
    title(console, "Where it began")
    if not findings:
        line(console, "nothing was found: no recorded tensor is non-finite and no rule points to one")
    for finding in findings[:NUM_FINDINGS]:
        first = finding["position"] == 1
        console.print(Text.assemble(f"  {finding['position']}. ", (key_name(finding["key"]), "bold" if first else "")))
        where = f"iteration {finding['iteration']}, {place_name(finding['key'])}".rstrip(", ")
        rank = f", rank {finding['rank']}" if finding["rank"] else ""
        rule = f", rule {clean(finding['rule'])}" if finding["rule"] else ""
        line(console, f"{where}{rank}{rule}", indent=5)
        line(console, clean(finding["evidence"]), indent=5)
        if finding["tied_with"]:
            others = ", ".join(f"rank {tie['rank']} microbatch {tie['microbatch']}" for tie in finding["tied_with"][:4])
            line(console, f"as early as {others}: neither depends on the other", indent=5)
    _more(console, len(findings) - NUM_FINDINGS, "finding")


def _way(steps: Sequence[Row], console: Console) -> None:
    title(console, "Its way through the layers")
    if not steps:
        line(console, "no recorded tensor shows it")
        return
    line(console, f"{'':<11}{_COLUMNS_HEAD}", "dim", indent=1)
    for iteration, members in itertools.groupby(steps, key=lambda step: step["iteration"]):
        line(console, f"iteration {iteration}", "dim", indent=1)
        groups = itertools.groupby(members, key=lambda step: (step["key"]["microbatch"], step["key"]["stage"]))
        for place, ((_, stage), found) in enumerate(groups):
            group = list(found)
            limit = NUM_LATER_STEPS if place else NUM_FIRST_STEPS
            for step in group[:limit]:
                line(console, f"{stage:<11}{_columns(step)}", "bold" if step is steps[0] else "", indent=1)
            if len(group) > limit:
                last = shorten(key_name(group[-1]["key"]), 38)
                line(console, f"{'':<11}... and {len(group) - limit} more, the last: {last}", indent=1)


_COLUMNS_HEAD = f"{'layer and tensor':<37}{'amax':>9}{'NaN, Inf':>9}{'underflow':>11}"


def _columns(row: Row, mark: str = "") -> str:
    name = shorten(key_name(row["key"]), 36 - len(mark)) + mark
    return f"{name:<37}{number(row['amax']):>9}{_nonfinite(row):>9}{share(row['underflow_share']):>11}"


def _nonfinite(row: Row) -> str:
    total = (row["nan"] or 0) + (row["inf"] or 0)
    if not total and row["quantized_nonfinite"]:
        return f"q {number(row['quantized_nonfinite'])}"
    return number(total)


def _around(rows: Sequence[Row], console: Console) -> None:
    if not rows:
        return
    through = [row for row in rows if row["role"] == "through_time"]
    beside = [row for row in rows if row["role"] == "neighbour"]
    blamed = through[0]["key"]
    title(console, "Statistics around it", f"{shorten(key_name(blamed), 54)}")
    header = f"{'amax':>10}{'rms':>10}{'NaN, Inf':>10}{'underflow':>11}{'zero':>9}{'saturated':>11}"
    line(console, f"{'iteration':<15}{header}", "dim", indent=1)
    at = beside[0]["iteration"] if beside else None
    for row in through:
        marked = row["iteration"] == at
        name = f"{row['iteration']}{' <' if marked else ''}"
        line(console, f"{name:<15}{_statistics(row)}", "bold" if marked else "", indent=1)
    console.print()
    line(console, f"recorded just before and after it, in iteration {at}", "dim", indent=1)
    for row in beside:
        marked = row["key"] == blamed
        line(console, f"{'':<11}{_columns(row, ' <' if marked else '')}", "bold" if marked else "", indent=1)


def _statistics(row: Row) -> str:
    return (
        f"{number(row['amax']):>10}{number(row['rms']):>10}{_nonfinite(row):>10}{share(row['underflow_share']):>11}"
        f"{share(row['zero_share']):>9}{share(row['saturated_share']):>11}"
    )


def _loss(document: Mapping[str, Any], console: Console) -> None:
    values = document["history"].get("loss", {}).get("values", [])
    if not values:
        return
    finite = [value for value in values if isinstance(value, (int, float))]
    span = f"{number(min(finite))} to {number(max(finite))}" if finite else "nothing finite"
    title(console, "Loss", f"{len(values)} iterations, {span}")
    line(console, sparkline(values))


def _absent(document: Mapping[str, Any], console: Console) -> None:
    lines = list(_absences(document))
    if not lines:
        return
    title(console, "Not recorded")
    for entry in lines[:NUM_FIRINGS]:
        line(console, entry)
    _more(console, len(lines) - NUM_FIRINGS, "entry", "entries")


def _absences(document: Mapping[str, Any]) -> Iterator[str]:
    for rank in document["ranks"]:
        if rank["tensors_problem"]:
            yield clean(f"rank {rank['rank']}: {rank['tensors_problem']}")
        for problem in rank["problems"]:
            yield clean(f"rank {rank['rank']}: {problem}")
    for iteration in document["iterations"]:
        if iteration["blind"]:
            yield clean(f"iteration {iteration['iteration']}: {iteration['blind']}")
    for entry in document["blind"]:
        yield clean(f"{_blind_place(entry)}: {entry['reason']}")


def _blind_place(entry: Row) -> str:
    words = [] if entry["iteration"] < 0 else [f"iteration {entry['iteration']}"]
    words += [word for word in (entry["layer"], entry["tensor"]) if word]
    return " ".join(words) or "everything"


def _more(console: Console, count: int, one: str, several: str = "") -> None:
    if count > 0:
        word = one if count == 1 else several or f"{one}s"
        line(console, f"... and {count} more {word}; --json has all", "dim")
