"""The command line. One exception handler, in ``main``; the commands stand in ``flightrec/commands``.

Exit codes: 0 fine, 1 findings, 2 usage (or something that is not installed), 3 unreadable input.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flightrec.commands import bench, check, demo, diff, export, inspect, pack, report, verify
from flightrec.errors import ConfigError, FlightrecError, FormatError, IncidentError

EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_UNREADABLE = 3
EXIT_BUG = 70
"""``EX_SOFTWARE``: an error of ours, with its traceback."""

app = typer.Typer(
    name="flightrec",
    help="A fault-triggered flight recorder for PyTorch training in low precision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 fine, 1 findings, 2 usage, 3 unreadable input.",
)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("report")(report.report)
app.command("diff", epilog=diff.EXAMPLES)(diff.diff)
app.command("verify")(verify.verify)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("pack", epilog=pack.EXAMPLES)(pack.pack)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        try:
            version = metadata.version("torch-flightrec")
        except metadata.PackageNotFoundError:
            version = "(a checkout that is not installed)"
        typer.echo(f"flightrec {version}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; the help text is ``app``'s."""


def main() -> None:
    """Run the program on ``sys.argv`` and end the process with its exit code."""
    if hasattr(sys.stdout, "reconfigure"):  # a character that this terminal does not have is no error of ours
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nobody is left to tell, and that is no finding.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except FlightrecError as error:
        if os.environ.get("FLIGHTREC_TRACEBACK"):
            raise
        print(f"flightrec: {_one_text(error)}", file=sys.stderr)
        sys.exit(_exit_code(error))
    except Exception:
        sys.excepthook(*sys.exc_info())
        print("flightrec: this is an error in flightrec itself; please report it with the lines above", file=sys.stderr)
        sys.exit(EXIT_BUG)


def _one_text(error: FlightrecError) -> str:
    """The message; what an incident or a file name contributed to it does not reach the terminal as a command."""
    from flightrec.reports.text import clean

    return "\n".join(clean(line) for line in str(error).split("\n"))


def _exit_code(error: FlightrecError) -> int:
    if isinstance(error, ConfigError):
        return EXIT_FINDINGS
    if isinstance(error, (IncidentError, FormatError)):
        return EXIT_UNREADABLE
    return EXIT_USAGE
