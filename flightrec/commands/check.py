"""``flightrec check``: is a configuration sound, and what would it record of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flightrec.commands.examples import examples
from flightrec.commands.factory import find_factory
from flightrec.errors import AttachError, IncidentError

if TYPE_CHECKING:
    import torch

    from flightrec.config.model import Config

_FACTORY_FORM = "expected package.module:factory, a function without arguments that returns a model or (model, step)"

EXAMPLES = examples(
    "flightrec check pretrain.yaml",
    "flightrec check pretrain.yaml --model mypackage.model:build",
)


def check(
    file: Annotated[Path, typer.Argument(help="A configuration in YAML.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PACKAGE.MODULE:FACTORY",
            help="A function that returns the model, or (model, step) where step() runs one forward and backward: "
            "then also tell what would be recorded of it and what the ring would hold.",
        ),
    ] = None,
) -> None:
    """Check a configuration; with --model tell what it would record. The exit code is 1 if it is refused."""
    from flightrec.config.inspection import is_inspect_file

    if is_inspect_file(file):
        _check_inspect(file, model)
        return
    config = _load(file)
    typer.echo(f"{file}: fine")
    for name, told in _facts(config):
        typer.echo(f"  {name:<10} {told}")
    if model is not None:
        check_model(config, model)


def _check_inspect(file: Path, target: str | None) -> None:
    """An nvdlfw_inspect configuration: what its feature FlightRecorder records, and what debug mode cannot do."""
    from flightrec.config.inspection import load_inspect
    from flightrec.inspection.paths import check_inspect

    plan = load_inspect(file)
    typer.echo(f"{file}: fine, an nvdlfw_inspect configuration")
    for section in plan.sections:
        for tensor in section.tensors.values():
            typer.echo(f"  {'section':<10} {section.name}: {tensor.describe()}")
    for name, told in _facts(plan.config):
        if name not in ("budget", "select"):
            typer.echo(f"  {name:<10} {told}")
    if target is not None:
        check_inspect(file, _build(target)[0])
        typer.echo("  debug mode works with this model as far as its modules tell")


def _load(file: Path) -> Config:
    from flightrec.config.load import load

    try:
        with file.open("rb"):
            pass
    except OSError as error:
        # Told apart from a configuration that is refused: that is a finding, this is unreadable input.
        raise IncidentError(f"{file}: cannot be read ({error.strerror})") from None
    return load(file)


def _facts(config: Config) -> Iterator[tuple[str, str]]:
    yield "budget", _budget(config)
    yield (
        "ring",
        f"{config.ring.iterations} iterations up to the fault, {config.incident.after} after; {_memory(config)}",
    )
    for entry in config.select:
        turns = "" if entry.every == 1 else f", every {entry.every} iterations"
        kept = ", ".join(sorted(entry.keep))
        stages = f", at {', '.join(entry.stages)}" if "stages" in entry.model_fields_set else ""
        yield "select", f"{', '.join(entry.layers)}: {', '.join(entry.tensors)} (keeps {kept}{turns}{stages})"
    for rule in config.triggers:
        yield "rule", f"{rule.name} ({rule.kind}, {rule.severity.value})"
    quota = config.incident.disk_quota
    space = "no disk quota" if quota is None else f"at most {quota / 2**30:.3g} GiB"
    yield "incidents", f"at most {config.incident.limit} a rule, {config.incident.cooldown} iterations apart, {space}"


def _budget(config: Config) -> str:
    from flightrec.config.sizes import Share

    if not isinstance(config.budget, Share):
        return "none: everything that is selected is recorded in every iteration"
    return (
        f"{config.budget} of a step: block boundaries, loss and metrics in every iteration, other layers in turns; all "
        f"for {config.watch_iterations} iterations after a watch"
    )


def _memory(config: Config) -> str:
    from flightrec.config.sizes import Share

    memory = config.ring.memory
    if memory is None:
        return "memory chosen when attached"
    if isinstance(memory, Share):
        return f"memory {100 * memory.fraction:g}% of what is free when attached"
    return f"memory {memory / 2**20:g} MiB"


def check_model(config: Config, target: str) -> None:
    """Attach a recorder to a factory's model in a temporary folder, run its step if it has one, print the result.

    Args:
        config: of the recorder.
        target: ``package.module:factory``.

    Raises:
        AttachError: the factory or its step fails, or nothing of the model is selected.
        MissingExtraError: torch is not installed.
    """
    model, step = _build(target)
    from flightrec.recorder import Recorder

    with tempfile.TemporaryDirectory() as folder, Recorder(config, directory=folder) as recorder:
        recorder.attach(model)
        _tell_layers(config, model)
        if step is None:
            typer.echo("Return (model, step) from the factory to see what the ring would hold.")
            return
        try:
            step()
        except Exception as error:
            raise AttachError(f"--model {target}: step() failed, {type(error).__name__}: {error}") from error
        recorder.step()
        typer.echo(recorder.summary())


def _tell_layers(config: Config, model: torch.nn.Module) -> None:
    names = [name for name, _ in model.named_modules()]
    typer.echo(f"{type(model).__name__} has {len(names)} modules, itself among them:")
    for entry in config.select:
        matched = [name for name in names if any(config.selects(name, tensor) is entry for tensor in entry.tensors)]
        examples = ", ".join(name or "(the model)" for name in matched[:4]) + (", ..." if len(matched) > 4 else "")
        typer.echo(f"  {', '.join(entry.layers)}: {len(matched)} modules{f' ({examples})' if matched else ''}")


def _build(target: str) -> tuple[torch.nn.Module, Callable[[], Any] | None]:
    factory = find_factory(target, _FACTORY_FORM)
    import torch

    try:
        made = factory()
    except Exception as error:
        raise AttachError(f"--model {target}: {type(error).__name__}: {error}; {_FACTORY_FORM}") from error
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module) or not (step is None or callable(step)):
        raise AttachError(f"--model {target}: gave a {type(made).__name__}; {_FACTORY_FORM}")
    return model, step
