"""``flightrec report`` from the command line: the page, what is refused, the bar on a terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from cli_support import flightrec
from report_support import write_report_incident
from rich.console import Console

from flightrec.commands.progress import bar
from flightrec.commands.reading import read_in_child
from flightrec.commands.report import write_page
from flightrec.reports.progress import VARIABLE, tell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report_incident(tmp_path_factory.mktemp("report"))


def test_writes_one_page_and_never_replaces_it_unasked(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = flightrec("report", folder, "--output", page)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(page) in done.stdout
    assert list(tmp_path.iterdir()) == [page]
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    page.write_text("mine")
    done = flightrec("report", folder, "--output", page)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert page.read_text() == "mine"
    write_page(page, "another")  # what --force leads to
    assert page.read_text() == "another"
    assert list(tmp_path.iterdir()) == [page]


def test_refuses_what_is_no_incident(tmp_path: Path) -> None:
    done = flightrec("report", tmp_path, "--output", tmp_path / "x.html")
    assert done.returncode == 3
    assert "holds no incident" in done.stderr
    assert not list(tmp_path.iterdir())
    assert flightrec("report", tmp_path, "--output", tmp_path / "none" / "x.html").returncode == 2


def test_help_has_an_example() -> None:
    shown = flightrec("report", "--help").stdout
    assert "flightrec report incidents/NAME" in " ".join(shown.split())


def test_missing_package_is_told_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = flightrec("report", tmp_path, "--output", tmp_path / "x.html")
    assert done.returncode == 2
    assert "torch-flightrec[report]" in done.stderr


# -- the bar -----------------------------------------------------------------------------------------------------------


def count_to_three(path: Path) -> str:
    """What a child process runs."""
    for step in range(3):
        tell(f"step {step} of [red]{path.name}", step, 3)
    os.write(int(os.environ[VARIABLE]), b"not JSON\n")
    return "done"


def test_bar_shows_what_the_child_tells(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with bar("reading", console=console) as channel:
        assert read_in_child(f"{__name__}:count_to_three", tmp_path / "x", channel=channel) == "done"
    assert "step 2 of [red]x" in out.getvalue()


def test_no_bar_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with bar("reading", console=Console(file=out)) as channel:
        assert channel.environment == {}
        tell("nobody listens", 1, 2)
    assert out.getvalue() == ""
