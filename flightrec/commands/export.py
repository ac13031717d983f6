"""``flightrec export``: one record or one product as a folder that runs by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flightrec.commands.reading import read_in_child
from flightrec.reports import arrays
from flightrec.reports.text import clean, key_name, place_name

EXAMPLES = """Examples:

flightrec export incidents/BAD --layer decoder.layers.3.mlp.fc1 --tensor activation --output repro

flightrec export incidents/BAD --layer decoder.layers.3.mlp.fc1 --product forward --format safetensors --output repro

python repro/reproduce.py
"""

_PRODUCTS = ("forward", "dgrad", "wgrad")


def export(
    incident: Annotated[Path, typer.Argument(help="An incident: its folder, its index, or one rank's file.")],
    layer: Annotated[str, typer.Option("--layer", help="Its layer: a name, a glob, or re:...")],
    output: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="A new folder.")],
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="activation, weight, gradient, output, ...", show_default=False)
    ] = None,
    product: Annotated[
        str | None,
        typer.Option(
            "--product",
            metavar="WHICH",
            help="forward, dgrad or wgrad: its operands and its result in place of one tensor.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="npz, or safetensors (needs torch-flightrec[export]).")] = "npz",
    iteration: Annotated[
        int | None, typer.Option("--iteration", help="The trigger's, or the latest.", show_default=False)
    ] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="The latest.", show_default=False)] = None,
    microbatch: Annotated[int | None, typer.Option("--microbatch", help="The first.", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="The first.", show_default=False)] = None,
    part: Annotated[str | None, typer.Option("--part", help="Which of several.", show_default=False)] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="forward, backward, ...", show_default=False)] = None,
    call: Annotated[int | None, typer.Option("--call", help="The first.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write one record or one product with a script that decodes, multiplies and compares; numpy and torch suffice."""
    if (tensor is None) == (product is None):
        raise typer.BadParameter("exactly one of --tensor and --product is needed")
    if product not in (None, *_PRODUCTS):
        raise typer.BadParameter(f"expected {', '.join(_PRODUCTS)}, got {product!r}", param_hint="--product")
    if kind not in arrays.FILES:
        raise typer.BadParameter(f"expected {' or '.join(arrays.FILES)}, got {kind!r}", param_hint="--format")
    output = output.absolute()
    if output.exists():
        raise typer.BadParameter(f"{output} exists and is never replaced", param_hint="--output")
    arrays.load(kind)
    filters = {"layer": layer, "tensor": tensor, "part": part, "stage": stage, "attempt": attempt, "call": call}
    filters |= {"iteration": iteration, "microbatch": microbatch, "rank": rank}
    options = {"output": str(output), "product": product, "kind": kind, **filters}
    told = read_in_child("flightrec.reports.export:export_path", incident.absolute(), options=options)
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    for role, entry in told["tensors"].items():
        where = f"iteration {entry['iteration']}, {place_name(entry['key'])}, rank {entry['rank']}"
        typer.echo(f"{role + ': ' if product else ''}{key_name(entry['key'])}: {where}")
    if told["num_others"]:
        typer.echo(
            f"{told['num_others']} more have these words; --iteration, --microbatch, --rank, ... tell them apart"
        )
    typer.echo(f"{clean(told['folder'])}: {', '.join(told['files'])}, {told['bytes'] / 1e6:.1f} MB")
    typer.echo(f"run it: python {clean(told['folder'])}/reproduce.py")
