"""Runs the command line, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from flightrec.cli import main

PROGRAM = [sys.executable, "-c", "from flightrec.cli import main; main()"]


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def flightrec(*arguments: object, **environment: str) -> Done:
    """Run a command in this process: a second faster than ``flightrec_process``, up to the last line of ``main``."""
    out, error = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with (
        mock.patch.object(sys, "argv", ["flightrec", *map(str, arguments)]),
        mock.patch.dict(os.environ, {"NO_COLOR": "1", **environment}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return Done(code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), error.getvalue())


def flightrec_process(*arguments: object, cwd: Path | None = None) -> Done:
    """Run a command as a user does."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1"},
    )
    return Done(done.returncode, done.stdout, done.stderr)
