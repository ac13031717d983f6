"""Comparisons as text: a table for a terminal, Markdown for a page. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from flightrec.bench.results import Comparison, Study

HEADINGS = (
    "",
    "pairs",
    "without, ms",
    "added, ms",
    "added, % [95%]",
    "records",
    "MiB",
    "byte bound, ms",
    "added / bound",
    "predicted, ms",
    "host, ms",
    "syncs",
    "allocations",
    "files",
    "peak, MiB",
)


MAX_WANDER = 1.5
"""Quiet steps that differ by more are told one by one: they are of different models."""


def row(found: Comparison) -> list[str]:
    """One way of recording, as cells under ``HEADINGS``."""
    if found.missing:
        return [found.name, *([""] * (len(HEADINGS) - 2)), found.missing]
    recorded, off, on = found.recorded, found.off, found.on
    cells = [found.name, str(len(found.off_s)), _ms(found.quiet_s), _ms(found.added_s), percent(found)]
    if recorded is None:
        cells += [""] * 5
    else:
        ratio = found.added_over_bound
        cells += [
            rounded(recorded.num_records, 4),
            rounded(recorded.num_bytes / 2**20, 4),
            _ms(recorded.bound_s),
            "" if ratio is None else f"{ratio:.2f}",
            _ms(recorded.predicted_s),
        ]
    cells.append(_ms(found.added_host_s))
    if off is None or on is None:
        return cells + [""] * 4
    return [
        *cells,
        _more(off.num_syncs, on.num_syncs),
        _more(off.num_allocations, on.num_allocations),
        str(on.num_files),
        "" if off.peak_bytes is None or on.peak_bytes is None else f"{(on.peak_bytes - off.peak_bytes) / 2**20:+.4g}",
    ]


def percent(found: Comparison) -> str:
    """``+1.23 [1.10, 1.40]``."""
    interval = found.overhead
    ends = "" if interval.low != interval.low else f" [{100 * interval.low:.2f}, {100 * interval.high:.2f}]"
    return f"{100 * interval.median:+.2f}{ends}"


def head(study: Study) -> str:
    """The workload and its quiet step."""
    measured = [found for found in study.comparisons if not found.missing]
    if not measured:
        return study.workload
    steps = sorted(found.quiet_s for found in measured)
    if steps[-1] > MAX_WANDER * steps[0]:
        return f"{study.workload}; a step without recorder takes {_ms(steps[0])} to {_ms(steps[-1])} ms"
    return f"{study.workload}; a step without recorder takes {_ms(steps[len(steps) // 2])} ms"


def machine_line(machine: Mapping[str, str]) -> str:
    """Hardware and versions in one line."""
    return "; ".join(name if not value else f"{name} {value}" for name, value in machine.items())


def markdown(studies: Sequence[Study], machine: Mapping[str, str]) -> str:
    """For a page: hardware and versions, then a table a workload."""
    lines = [machine_line(machine)]
    for study in studies:
        lines += ["", head(study), "", _line(HEADINGS), "|" + "---|" * len(HEADINGS)]
        lines += [_line(row(found)) for found in study.comparisons]
    return "\n".join(lines) + "\n"


def render(studies: Sequence[Study], machine: Mapping[str, str], console: Console) -> None:
    """For a terminal: the same, one column a way of recording, so that 80 columns are enough."""
    console.print(machine_line(machine), style="dim")
    for study in studies:
        console.print()
        console.print(head(study))
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for found in study.comparisons:
            table.add_column(found.name, justify="right", overflow="fold")
        rows = [row(found) for found in study.comparisons]
        for number, heading in enumerate(HEADINGS[1:], 1):
            values = [cells[number] for cells in rows]
            if any(values):
                table.add_row(heading, *values)
        console.print(table)
        for found in study.comparisons:
            for line in () if found.recorded is None else found.recorded.told:
                console.print(f"{found.name}: {line}", style="dim")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rounded(value: float, digits: int = 3) -> str:
    """So many significant digits, never an exponent: ``11667.3`` -> ``11700``."""
    return f"{float(f'{value:.{digits}g}'):.15g}" if abs(value) >= 1 else f"{value:.{digits}g}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else rounded(1e3 * seconds)


def _more(off: int | None, on: int | None) -> str:
    return "" if off is None or on is None else str(on - off)
