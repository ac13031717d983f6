"""``flightrec demo``: a small model trains in FP8 with the recorder on, a fault is planted, caught, and explained."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flightrec.commands.examples import examples
from flightrec.errors import MissingExtraError
from flightrec.reports.text import report_console

if TYPE_CHECKING:
    from flightrec.demo.run import Options

_MIN_ITERATIONS = 80
"""``amax_spike`` judges from 64 samples on; some more show that it stays silent."""

EXAMPLES = examples(
    "flightrec demo",
    "flightrec demo --directory incidents --iterations 300",
)


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory", help="Where incidents go and stay. Without it: a temporary folder.", show_default=False
        ),
    ] = None,
    iterations: Annotated[
        int, typer.Option("--iterations", min=_MIN_ITERATIONS, help="Healthy iterations before the fault.")
    ] = 160,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
) -> None:
    """Train a small GPT in FP8, spoil one channel, and see what the recorder says. About three minutes on two cores.

    The exit code is 1 if the layer that is blamed is not the one that was spoiled.
    """
    console = report_console()
    if directory is not None:
        right = _run(directory, iterations, console)
    elif keep:
        directory = Path(tempfile.mkdtemp(prefix="flightrec-demo-"))
        right = _run(directory, iterations, console)
    else:
        with tempfile.TemporaryDirectory(prefix="flightrec-demo-") as name:
            right = _run(Path(name), iterations, console)
    console.print(f"The incidents stay in {directory}" if directory else "Their folder is removed (--keep keeps it).")
    if not right:
        raise typer.Exit(1)


def _run(directory: Path, iterations: int, console: Console) -> bool:
    try:
        from flightrec.demo.run import Options
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "the demo trains a model and needs torch: pip install 'torch-flightrec[torchao]'"
        raise MissingExtraError(message) from error
    return show(Options(directory=directory, num_iterations=iterations), console)


def show(options: Options, console: Console) -> bool:
    """Run the demonstration and tell it.

    Args:
        options: what is run.
        console: where everything is told.

    Returns:
        Whether nothing was written while all was well, and each incident blames the layer that was spoiled.

    Raises:
        FlightrecError: the recorder cannot start, or an incident cannot be read.
    """
    from rich.syntax import Syntax

    from flightrec.demo import story
    from flightrec.demo.run import train

    _title(console, "1. A small GPT learns Python's manual in FP8, with the recorder on")
    outcome = train(options, console)
    if outcome.num_files_when_healthy:
        console.print("The recorder wrote files although nothing was wrong.", style="bold red")
        return False

    story.compare_losses(outcome.losses, options.num_iterations, console)

    _title(console, "2. What was written")
    story.list_incidents(outcome.incidents, console)
    folder = story.nonfinite_incident(outcome.incidents)
    if folder is None:
        console.print("No incident was written for the NaN.", style="bold red")
        return False

    _title(console, "3. What `flightrec inspect` says about the last one")
    story.tell(folder, console)

    _title(console, "4. The same tensors, with plain h5py")
    program = story.reading_program(folder, outcome.spoiled_layer)
    console.print(Syntax(program, "python", background_color="default", word_wrap=True))
    console.print("Run in the incident's folder, this prints:")
    console.print(story.run_program(program, folder), end="")

    _title(console, "5. Was it right?")
    right = story.is_blamed(outcome.incidents, outcome.spoiled_layer)
    console.print(f"spoiled: {outcome.spoiled_layer}; blamed: {'the same, in every incident' if right else 'another'}")
    return right


def _title(console: Console, text: str) -> None:
    console.print()
    console.rule(text, style="dim", align="left", characters="-")
