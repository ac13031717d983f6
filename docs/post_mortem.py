"""Fills docs/post-mortem.md with what the commands say of three runs: ``python docs/post_mortem.py``.

The page names its commands itself, in comments; each stands before the block or picture that it fills:

* ``<!-- output of RUN: inspect --worst 3 -->`` before a ``text`` block,
* ``<!-- program in RUN -->`` before a ``python`` block and the ``text`` block of what it prints,
* ``<!-- picture of RUN: inspect -->`` before an image.

RUN is one of ``post_mortem_runs.RUNS``. Needs torch; takes some seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from picture import svg_of
from post_mortem_runs import RUNS
from rich.console import Console
from rich.text import Text

from flightrec.cli import main as flightrec

HERE = Path(__file__).parent
PAGE = HERE / "post-mortem.md"
WIDTH = 80

OUTPUT = re.compile(r"(<!-- output of (\S+): ([^\n]*) -->\n```text\n).*?(```\n)", re.DOTALL)
PROGRAM = re.compile(r"(<!-- program in (\S+) -->\n```python\n(.*?)```\n\n```text\n).*?(```\n)", re.DOTALL)
PICTURE = re.compile(r"<!-- picture of (\S+): (.*) -->\n!\[.*?\]\((\S+)\)\n")


def train(folder: Path, runs: Collection[str]) -> dict[str, str]:
    """Do the runs; name of each -> path of its incident from ``folder``."""
    found = {}
    for name in runs:
        RUNS[name](folder / "incidents")
        (incident,) = (folder / "incidents").glob(f"{name}.*")
        found[name] = f"incidents/{incident.name}"
    return found


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Stand in a folder for a while, as for one who looks at a terminal."""
    before, environment = Path.cwd(), {name: os.environ.get(name) for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    os.chdir(folder)
    os.environ.pop("NO_COLOR", None)
    os.environ.update(FORCE_COLOR="1", COLUMNS=str(WIDTH))
    try:
        yield
    finally:
        os.chdir(before)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def tell(incident: str, command: str) -> tuple[str, Text]:
    """Run a command on an incident; give the line that is typed and what is printed, colours included."""
    name, *options = shlex.split(command)
    printed = io.StringIO()
    before = sys.argv
    sys.argv = ["flightrec", name, incident, *options]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            flightrec()
    finally:
        sys.argv = before
    # When and where it ran is nobody's business in a manual.
    shown = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "2026-01-01 00:00:00 UTC", printed.getvalue())
    shown = shown.replace(f" on {platform.node()}\n", " on node-17\n")
    return f"$ flightrec {name} {incident} {command.removeprefix(name).strip()}".rstrip(), Text.from_ansi(shown)


def plain(lines: Sequence[str]) -> str:
    """Lines without trailing spaces, nor empty ones at the end."""
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def execute(program: str, incident: str) -> str:
    """Run a program in the folder in which the page stands, so to speak; give what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace("INCIDENT", incident), PAGE.name, "exec"), {})  # noqa: S102  # the page's own
    return printed.getvalue()


def fill(page: str, folder: Path, runs: Collection[str] = tuple(RUNS)) -> tuple[str, dict[str, str]]:
    """Do the runs in a folder, and give the page as it must be, and its pictures by their link.

    Args:
        page: as it is.
        folder: an empty one.
        runs: names of those to do; what the others show stays as it is, and they give no pictures.
    """
    incidents = train(folder, runs)
    pictures: dict[str, str] = {}

    def output(found: re.Match[str]) -> str:
        begin, run, command, end = found.groups()
        if run not in incidents:
            return found.group()
        typed, shown = tell(incidents[run], command)
        return begin + plain([typed, *shown.plain.splitlines()]) + end

    def program(found: re.Match[str]) -> str:
        begin, run, text, end = found.groups()
        if run not in incidents:
            return found.group()
        return begin + plain(execute(text, incidents[run]).splitlines()) + end

    def picture(found: re.Match[str]) -> str:
        run, command, link = found.groups()
        if run not in incidents:
            return found.group()
        typed, shown = tell(incidents[run], command)
        console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
        console.print(shown)
        pictures[link] = svg_of(console, typed.removeprefix("$ "))
        return found.group()

    with working_in(folder):
        page = OUTPUT.sub(output, page)
        page = PROGRAM.sub(program, page)
        PICTURE.sub(picture, page)
    return page, pictures


def main() -> None:
    """Write the page and its pictures anew."""
    with tempfile.TemporaryDirectory() as folder:
        page, pictures = fill(PAGE.read_text(), Path(folder))
    PAGE.write_text(page)
    for link, picture in pictures.items():
        (HERE / link).parent.mkdir(exist_ok=True)
        (HERE / link).write_text(picture)


if __name__ == "__main__":
    main()
