"""A progress bar for a task in a child process: drawn on standard error, only on a terminal.

The child writes JSON lines into a pipe (``flightrec.reports.progress``); a thread of the command reads them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flightrec.reports.progress import VARIABLE
from flightrec.reports.text import clean


@dataclass(frozen=True)
class Channel:
    """What the child is given.

    Attributes:
        environment: further variables.
        descriptors: kept open for it.
    """

    environment: dict[str, str]
    descriptors: tuple[int, ...]


@contextmanager
def bar(what: str, *, console: Console | None = None) -> Iterator[Channel]:
    """Draw a bar while the block runs; nothing at all where standard error is no terminal.

    Args:
        what: shown before the child tells anything.
        console: where to, for tests.
    """
    console = console or Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield Channel({}, ())
        return
    source, target = os.pipe()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=None)
            reader = threading.Thread(target=_follow, args=(source, progress, task), name="flightrec-progress")
            reader.start()
            try:
                yield Channel({VARIABLE: str(target)}, (target,))
            finally:
                os.close(target)
                reader.join()
    finally:
        os.close(source)


def _follow(source: int, progress: Progress, task: Any) -> None:
    """Until the last writer has closed the pipe."""
    with open(source, encoding="ascii", errors="replace", closefd=False) as lines:
        for line in lines:
            try:
                told = json.loads(line)
                what, done, total = clean(str(told["what"])), int(told["done"]), int(told["total"])
            except (ValueError, TypeError, LookupError):  # a child that was killed ends in the middle of a line
                continue
            progress.update(task, description=what[:60], completed=done, total=total)
