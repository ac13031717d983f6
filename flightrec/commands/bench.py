"""``flightrec bench``: what recording costs, on this machine, of one's own model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flightrec.commands.examples import examples
from flightrec.commands.factory import find_factory
from flightrec.errors import AttachError, MissingExtraError

if TYPE_CHECKING:
    from flightrec.bench.results import Comparison
    from flightrec.config.model import Config

_FORM = (
    "expected package.module:factory, a function that returns (model, step), where step() runs one iteration and "
    "returns the loss or None"
)

EXAMPLES = examples(
    "flightrec bench",
    "flightrec bench --model mypackage.model:build --output bench.json",
)


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PACKAGE.MODULE:FACTORY",
            help="A function that returns (model, step), where step() runs one iteration and returns the loss or None. "
            "Parameters `device` and `tokens` are given to it if it has them. Without it: a small built-in GPT.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="A configuration in YAML; may be given several times. Without it: the default."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu; without it a GPU if there is one.")
    ] = None,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Pairs of blocks at most.")] = 40,
    interval: Annotated[
        float, typer.Option("--interval", min=0.0, help="End when the overhead is known to plus or minus so many %.")
    ] = 0.3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of a block.")] = 12,
    warm_up: Annotated[int, typer.Option("--warm-up", min=8, help="Steps before them.")] = 10,
    counted_steps: Annotated[
        int,
        typer.Option("--counted-steps", min=0, help="Steps whose synchronisations, allocations and files are counted."),
    ] = 16,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, help="Tokens of a step; may be given several times.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write all figures as JSON.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --output.")] = False,
) -> None:
    """Time steps with and without the recorder, in pairs, until the cost is known to 0.3%. Some minutes.

    The recorder is started and closed around each block with it, so that the other blocks have nothing of it.
    """
    if output is not None and output.exists() and not force:
        raise AttachError(f"--output {output}: exists already; give another name, or --force to overwrite it")
    configs = _configs(config or [])
    from flightrec.bench import tables
    from flightrec.bench.results import document

    try:
        from flightrec.bench.run import Options, run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("bench trains a model and needs torch: pip install 'torch-flightrec[train]'") from error
    options = Options(
        configs=configs,
        factory=None if model is None else find_factory(model, _FORM),
        target=model or "",
        device=device,
        tokens=tokens or [None],
        num_steps=steps,
        num_warm_up=warm_up,
        max_pairs=pairs,
        half_width=interval / 100,
        num_looks=counted_steps,
    )
    studies, facts = run(options, _progress(Console(stderr=True, markup=False, highlight=False)))
    if output is not None:
        _write(output, document(studies, facts))
    if markdown:
        typer.echo(tables.markdown(studies, facts), nl=False)
    else:
        tables.render(studies, facts, Console(markup=False, highlight=False, emoji=False))


def _configs(paths: list[Path]) -> list[tuple[str, Config]]:
    from flightrec.config.load import load, packaged

    if not paths:
        return [("default", load(packaged("default.yaml")))]
    return [(path.stem, load(path)) for path in paths]


def _progress(console: Console) -> Callable[[Comparison], None]:
    """Tells on standard error how far it is, on a terminal only."""
    from flightrec.bench import tables

    def tell(found: Comparison) -> None:
        if console.is_terminal:
            console.print(f"{found.name}: {len(found.off_s)} pairs, {tables.percent(found)} %", end="\r")

    return tell


def _write(path: Path, data: dict[str, Any]) -> None:
    """Under a temporary name first: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        json.dump(data, file, indent=1, allow_nan=False)
        file.write("\n")
    os.replace(file.name, path)
