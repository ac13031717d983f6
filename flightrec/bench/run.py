"""A whole run of ``flightrec bench``: workloads, configurations, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flightrec.bench.arms import Plain, WithRecorder
from flightrec.bench.compare import Plan, compare
from flightrec.bench.machine import machine
from flightrec.bench.results import Comparison, Study
from flightrec.bench.workload import Workload, build, builtin
from flightrec.config.model import Config
from flightrec.errors import AttachError


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        configs: name and configuration of each recorder.
        factory, target: makes the model, and how the user named it; None for the built-in one.
        device: ``cuda``, ``cpu``, or None for a GPU if there is one.
        tokens: of a step, one study each; None for what suits.
        num_steps, num_warm_up, max_pairs, half_width, num_looks: see ``Plan``.
    """

    configs: Sequence[tuple[str, Config]]
    factory: Callable[..., Any] | None = None
    target: str = ""
    device: str | None = None
    tokens: Sequence[int | None] = (None,)
    num_steps: int = 12
    num_warm_up: int = 10
    max_pairs: int = 40
    half_width: float = 0.003
    num_looks: int = 16

    @property
    def plan(self) -> Plan:
        """How much is measured."""
        return Plan(
            num_steps=self.num_steps,
            num_warm_up=self.num_warm_up,
            min_pairs=min(Plan().min_pairs, self.max_pairs),
            max_pairs=self.max_pairs,
            half_width=self.half_width,
            num_looks=self.num_looks,
        )


def run(options: Options, on_pair: Callable[[Comparison], None]) -> tuple[list[Study], dict[str, str]]:
    """Measure everything.

    Args:
        options: what.
        on_pair: told of what is known after each pair.

    Returns:
        A study a workload; hardware and versions.

    Raises:
        FlightrecError: the factory or the device cannot be used, or a recorder refuses the model.
    """
    studies, facts = [], {}
    for num_tokens in options.tokens:
        workload = _workload(options, num_tokens)
        _try_step(workload)
        found = [
            compare(Plain(workload), WithRecorder(workload, config, name), options.plan, workload.device, on_pair)
            for name, config in options.configs
        ]
        studies.append(Study(workload.name, tuple(found)))
        facts = machine(workload.device)
    return studies, facts


def _workload(options: Options, num_tokens: int | None) -> Workload:
    device = options.device
    if device not in (None, "cpu", "cuda"):
        raise AttachError(f"--device {device}: expected cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise AttachError("--device cuda: torch sees no GPU here; leave it out, or say --device cpu")
    if options.factory is not None:
        return build(options.factory, options.target, device, num_tokens)
    return builtin(device or ("cuda" if torch.cuda.is_available() else "cpu"), num_tokens)


def _try_step(workload: Workload) -> None:
    """One step before anything is attached: what fails here is not the recorder's."""
    try:
        workload.step()
    except AttachError as error:
        raise AttachError(f"{error}. It failed without a recorder") from error
