"""What hangs on the user's objects between ``attach`` and the end: the sources of one model.

Training thread only. ``attach`` may refuse; afterwards each part stands behind a guard of its own, so that one that
fails leaves the others running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from flightrec.capture import Capture
from flightrec.errors import AttachError
from flightrec.sources.choose import AnySource, choose_sources
from flightrec.sources.gradients import GradientStages
from flightrec.sources.scaler import ScalerWatch
from flightrec.startup import device_of


class Attachment:
    """A model that is watched.

    Attributes:
        device: of the model.
        optimizers: that were given.
        watches_scaler: an enabled gradient scaler was given.

    Args:
        model: whose modules are the layers.
        capture: where tensors go.
        optimizer: one or several, for gradients at stages ``reduced`` and ``clipped``.
        scaler: a gradient scaler, for its skipped steps and the stage ``unscaled``.

    Raises:
        AttachError: no parameters on one real device, or nothing of the model is selected.
    """

    def __init__(
        self, model: torch.nn.Module, capture: Capture, optimizer: object | None = None, scaler: object | None = None
    ) -> None:
        self._capture = capture
        self._sources: list[AnySource] = choose_sources(model, capture)
        self._scaler = None if scaler is None else ScalerWatch(scaler, capture)
        self.watches_scaler = self._scaler is not None and self._scaler.is_enabled
        self.optimizers = _several(optimizer)
        gradients = GradientStages(model, capture, self.optimizers, self.watches_scaler)
        if gradients.has_work:
            self._sources.append(gradients)
            if self._scaler is not None:
                self._scaler.listener = gradients
        self.device = device_of(model)
        if not self._sources:
            names = [name for name, _ in model.named_modules() if name][:5]
            raise AttachError(
                f"attach: no entry of select matches any tensor of {type(model).__name__}. Its layers are, for "
                f"example, {', '.join(names) or 'the model itself, whose name is empty'}; patterns match whole names."
            )

    def attach(self) -> None:
        """Install all hooks. May raise ``AttachError``."""
        for source in self._sources:
            source.attach()
        if self._scaler is not None:
            self._scaler.attach()

    def after_step(self) -> None:
        """The optimizer has stepped: record what belongs to the iteration's end. Never raises."""
        for source in self._sources:
            with self._capture.guard(f"the end of the iteration of {type(source).__name__}"):
                source.after_step()

    def scalars(self) -> Mapping[str, torch.Tensor]:
        """Metrics of the iteration that no user gave: what the scaler did. On the device; never raises."""
        return {} if self._scaler is None else self._scaler.take()

    def detach(self) -> None:
        """Remove all hooks. Never raises; may be called twice."""
        if self._scaler is not None:
            with self._capture.guard("detach"):
                self._scaler.detach()
        for source in self._sources:
            with self._capture.guard("detach"):
                source.detach()

    def describe(self) -> str:
        """Say in a few words what is observed."""
        return " and ".join(source.describe() for source in self._sources)


def _several(optimizer: object | None) -> list[object]:
    """The optimizers that were given: none, one, or several."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
