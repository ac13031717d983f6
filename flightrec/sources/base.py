"""What all sources share: keeping a tensor safely, telling what cannot be kept, and failing without harm.

Owns the list of failed layers and of what was told as blind. Runs on the training thread and on autograd's threads.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from flightrec.boundary import contained
from flightrec.hosthooks import describe
from flightrec.records import Phase, Stage
from flightrec.sources.observe import observe
from flightrec.sources.plain import is_known_plain
from flightrec.sources.sink import Sink

_MAX_FAILED_LAYERS = 8
"""After failures in so many layers the cause is not the layer: the whole source is switched off."""

_log = logging.getLogger("flightrec")
_Tensor = torch.Tensor


class Source(Protocol):
    """Something that feeds a sink from ``attach`` until ``detach``."""

    def attach(self) -> None:
        """Start to observe. May raise ``AttachError``; from then on nothing raises."""

    def detach(self) -> None:
        """Stop to observe and leave no trace; may be called twice."""

    def after_step(self) -> None:
        """Record what belongs to the iteration's end and begin the next iteration; the optimizer has stepped."""

    def describe(self) -> str:
        """Say in a few words what it observes."""


class Keeper:
    """Hands tensors to the sink and takes all its troubles.

    Args:
        sink: where tensors go.
        part: what to name in logs when it fails.

    Attributes:
        wants: of the sink; ask it before looking at a tensor.
        wants_any: of the sink.
    """

    def __init__(self, sink: Sink, part: str) -> None:
        self.sink = sink
        self.wants, self.wants_any = sink.wants, sink.wants_any
        self.part = part
        self.armed = True
        self._failed: set[str] = set()
        self._told: set[tuple[str, str]] = set()

    def works(self, layer: str) -> bool:
        """Say whether this layer is still to be observed."""
        return self.armed and layer not in self._failed

    def keep(
        self,
        value: torch.Tensor,
        layer: str,
        tensor: str,
        *,
        part: str,
        microbatch: int,
        phase: Phase,
        call: int,
        stage: Stage,
    ) -> None:
        """Record one tensor of the run, or tell why not.

        Call it inside ``quiet``. May raise; the hook that calls it must catch.
        """
        if is_known_plain(value):  # as ``observe`` would, without its calls: this is most of what is seen
            plain: torch.Tensor | None = value.detach() if value.requires_grad or type(value) is not _Tensor else value
            quantized = None
        else:
            plain, quantized, reason = observe(value)
            if plain is None and quantized is None:
                self.blind(layer, tensor, reason)
                return
        self.sink.capture(
            layer,
            tensor,
            part=part,
            microbatch=microbatch,
            phase=phase,
            call=call,
            stage=stage,
            high_precision=plain,
            quantized=quantized,
        )

    def blind(self, layer: str, tensor: str, reason: str) -> None:
        """Tell once that a tensor cannot be recorded; an empty ``tensor`` means the whole layer."""
        if (layer, tensor) not in self._told:
            self._told.add((layer, tensor))
            self.sink.blind(layer, tensor, reason)

    def fail(self, layer: str, error: Exception) -> None:
        """Switch a layer off after ``error``; after several layers, the source. Never raises an ``Exception``."""
        with contained(f"the {self.part} source"):
            self._fail(layer, error)

    def _fail(self, layer: str, error: Exception) -> None:
        self._failed.add(layer)
        if len(self._failed) >= _MAX_FAILED_LAYERS:
            self.armed = False
        try:
            with self.sink.guard(self.part):
                raise error
        except Exception:
            _log.exception("flightrec: %s failed in layer %r and no longer observes it", self.part, layer)
        try:
            self.blind(layer, "", f"the {self.part} source failed here: {describe(error)}")
        except Exception:
            _log.exception("flightrec: could not note that layer %r is no longer observed", layer)
