"""Every command documents itself with examples that work, and colours are for terminals only."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from cli_support import PROGRAM, flightrec

from flightrec.cli import app
from flightrec.commands.examples import examples

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)
ESCAPE = b"\x1b["


def examples_of(name: str) -> list[str]:
    """The lines of a command's help that show how it is called, but for its usage."""
    shown = flightrec(name, "--help", COLUMNS="200").stdout
    lines = [line for line in shown.splitlines() if "Usage:" not in line]
    return [found.strip() for line in lines for found in re.findall(rf"\bflightrec {name}\b[^│`]*", line)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_is_taken(name: str) -> None:
    shown = examples_of(name)
    assert shown, f"flightrec {name} --help shows no example"
    for example in shown:
        words = shlex.split(example)[2:]
        context = GROUP.commands[name].make_context(name, words)  # refuses what is no option, or no value of it
        assert context.params


def test_an_example_with_a_wrong_option_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        GROUP.commands["pack"].make_context("pack", ["incidents/NAME", "--outputs", "x"])


def test_brackets_are_no_markup() -> None:
    assert examples("flightrec x [bold]a", "flightrec x") == "Examples:\n\n  flightrec x \\[bold]a\n\n  flightrec x"


def plain_environment() -> dict[str, str]:
    forced = ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
    return {**{name: value for name, value in os.environ.items() if name not in forced}, "TERM": "xterm-256color"}


def piped(*arguments: str) -> bytes:
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, env=plain_environment(), check=False)
    return done.stdout + done.stderr


def on_a_terminal(*arguments: str) -> bytes:
    here, there = pty.openpty()
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdin=there, stdout=there, stderr=there, env=plain_environment()
    ) as child:
        os.close(there)
        shown = b""
        try:
            while piece := os.read(here, 65536):
                shown += piece
        except OSError:  # the other end is closed: Linux says so with EIO
            pass
        child.wait()
    os.close(here)
    return shown


def test_colour_on_a_terminal_and_none_in_a_pipe(incident_folder: Path) -> None:
    told = piped("inspect", str(incident_folder))
    assert b"Where it began" in told
    assert ESCAPE not in told
    assert ESCAPE in on_a_terminal("inspect", str(incident_folder))


def test_errors_and_help_in_a_pipe_have_no_colour() -> None:
    assert ESCAPE not in piped("inspect", "nowhere", "--iterations", "3")
    for name in COMMANDS:
        assert "\x1b" not in flightrec(name, "--help").stdout
