"""The tables of ``flightrec bench``: what is missing says so, numbers have no exponent, Markdown keeps its columns."""

from __future__ import annotations

import io

from flightrec.bench import tables
from flightrec.bench.results import Comparison, Quiet, Recorded, Study
from flightrec.reports.text import report_console

RECORDED = Recorded(2000.0, 3.5 * 2**30, 0.0, 0.003, 0.002, ("budget none: everything",))
FOUND = Comparison(
    "everything",
    (0.025,) * 3, (0.028,) * 3, (0.01,) * 3, (0.012,) * 3,
    Quiet(16, 16, 100, 1, 1 << 30, 0), Quiet(16, 16, 164, 1, 3 << 30, 0), RECORDED,
)  # fmt: skip
SLOW = Comparison("tool", (0.025,), (11.692,))
ABSENT = Comparison("absent", missing="absent is not installed")


def test_cells() -> None:
    cells = dict(zip(tables.HEADINGS, tables.row(FOUND), strict=True))
    assert cells["without, ms"] == "25" and cells["added, ms"] == "3"
    assert cells["added, % [95%]"] == "+12.00 [12.00, 12.00]"
    assert (cells["records"], cells["MiB"], cells["byte bound, ms"], cells["added / bound"]) == (
        "2000", "3584", "2", "1.50",
    )  # fmt: skip
    assert (cells["syncs"], cells["allocations"], cells["files"], cells["peak, MiB"]) == ("0", "64", "0", "+2048")
    assert cells["host, ms"] == "2"
    assert abs(FOUND.bound_ratio - 28 / 27) < 1e-9
    assert abs(FOUND.prediction_error) < 1e-9
    slow = dict(zip(tables.HEADINGS, tables.row(SLOW), strict=True))
    assert slow["added, ms"] == "11700" and slow["added, % [95%]"] == "+46668.00"


def test_markdown_has_as_many_cells_in_each_row() -> None:
    text = tables.markdown([Study("a model", (FOUND, SLOW, ABSENT))], {"device": "H200", "torch": "2"})
    assert text.startswith("device H200; torch 2\n\na model; a step without recorder takes 25 ms\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert "absent is not installed |" in rows[-1]
    other = Comparison("other", (0.1,), (0.1,))
    assert "takes 25 to 100 ms" in tables.head(Study("sizes", (FOUND, other)))
    assert tables.head(Study("nothing", (ABSENT,))) == "nothing"


def test_terminal_shows_each_way_and_what_the_recorder_says() -> None:
    file = io.StringIO()
    tables.render([Study("a model", (FOUND, ABSENT))], {"torch": "2"}, report_console(file))
    for words in ("everything", "+12.00", "budget none: everything", "absent is not"):
        assert words in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 80
