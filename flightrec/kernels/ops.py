"""The one place that chooses an implementation of capture; all of them share ``reference.capture``'s signature."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from flightrec.hosthooks import describe
from flightrec.kernels import host, reference
from flightrec.kernels.plan import CapturePlan, Destination

_log = logging.getLogger("flightrec")


class Capture(Protocol):
    """Copies a record into its slot and writes its statistics row: see ``reference.capture``."""

    def __call__(
        self,
        plan: CapturePlan,
        destination: Destination,
        high_precision: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None = None,
    ) -> None:
        """Launch it; nothing is waited for."""


def choose(device: torch.device) -> Capture:
    """The implementation for ``device``: ``host`` on the CPU, Triton's kernels on CUDA, ``reference`` elsewhere."""
    if device.type == "cpu":
        return host.capture
    if device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("triton") is not None:
        try:
            from flightrec.kernels import device as fused
        except Exception as error:  # a foreign package may raise anything: a recorder that is slow is one all the same
            _log.warning(
                "flightrec: Triton cannot be imported, records will cost many times as much: %s", describe(error)
            )
            return reference.capture
        return fused.capture
    return reference.capture


def own_scratch(device: torch.device, sets: dict[Any, Any]) -> AbstractContextManager[None]:
    """Context in which captures on this thread use the working memory in ``sets``, as a graph does that holds them."""
    lend = _of_kernels(device, "own_scratch")
    return nullcontext() if lend is None else lend(sets)


def make_scratch(device: torch.device, sets: dict[Any, Any], stream: int) -> None:
    """Put working memory for the stream of this handle into ``sets``, allocated on the current stream, another one."""
    make = _of_kernels(device, "make_scratch")
    if make is not None:
        make(device, sets, stream)


def _of_kernels(device: torch.device, name: str) -> Any:
    """A function of the kernels on ``device``; None where they see to their working memory themselves."""
    return getattr(sys.modules[choose(device).__module__], name, None)
