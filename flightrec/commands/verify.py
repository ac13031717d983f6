"""``flightrec verify``: do recorded codes and products agree with what they were made from?"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flightrec.commands.reading import Limits, read_in_child
from flightrec.reports import text, verify_text

LIMITS = Limits(cpu_s=7 * 24 * 3600, wall_s=7 * 24 * 3600.0)
"""Multiplying takes minutes a gigabyte, and incidents have many; memory is limited as for all commands."""
EXIT_FINDINGS = 1
_TASK = "flightrec.analysis.verify:verify_path"
_POLL_S = 0.2


def verify(
    path: Annotated[Path, typer.Argument(help="An incident: its folder, its index, or one rank's file.")],
    layer: Annotated[
        str | None, typer.Option("--layer", help="Only these layers: a name, a glob, or re:... and a regex.")
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor", help="Only this tensor's codes (activation, ...), or products (output, dgrad, wgrad)."
        ),
    ] = None,
    iteration: Annotated[int | None, typer.Option("--iteration", help="Only this iteration.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; docs/verify.md tells the form.")
    ] = False,
) -> None:
    """Quantize recorded tensors again, multiply recorded operands again, and compare with what was recorded.

    Ends with 1 if something differs: a kernel, the hardware or a scale is at fault. Ends with 0 if all that could be
    compared agrees: the model's own numbers did it.

    Example: flightrec verify incidents/NAME --layer "*.fc1" --iteration 1234
    """
    options = {"layer": layer, "tensor": tensor, "iteration": iteration, "rank": rank}
    document = _run(path, options)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        verify_text.render_verified(document, text.report_console())
    if not document["agrees"]:
        raise typer.Exit(EXIT_FINDINGS)


def _run(path: Path, options: Mapping[str, Any]) -> Any:
    """Verify in a child process; on a terminal with a bar that follows what the child writes into a file."""
    if not sys.stderr.isatty():
        return read_in_child(_TASK, path, options=options, limits=LIMITS)
    with tempfile.TemporaryDirectory(prefix="flightrec-verify-") as folder:
        told = Path(folder) / "progress.json"
        more = {**options, "progress_file": str(told)}
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        with ThreadPoolExecutor(1) as pool, Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=None)
            future = pool.submit(read_in_child, _TASK, path, options=more, limits=LIMITS)
            _follow(future, told, bar, task)
            return future.result()


def _follow(future: Future[Any], told: Path, bar: Progress, task: TaskID) -> None:
    while not future.done():
        wait_for([future], timeout=_POLL_S)
        try:
            done, total, what = json.loads(told.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there yet, or in the middle of being written
            continue
        bar.update(task, completed=done, total=total, description=text.clean(str(what)))
