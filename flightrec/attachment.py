"""What hangs on the user's objects between ``attach`` and the end: the sources of one model.

Training thread only. ``attach`` may refuse; afterwards each part stands behind a guard of its own, so that one that
fails leaves the others running.
"""

from __future__ import annotations

import torch

from flightrec.capture import Capture
from flightrec.errors import AttachError
from flightrec.sources.choose import AnySource, choose_sources
from flightrec.startup import device_of


class Attachment:
    """A model that is watched.

    Args:
        model: whose modules are the layers.
        capture: where tensors go.

    Raises:
        AttachError: no parameters on one real device, or nothing of the model is selected.
    """

    def __init__(self, model: torch.nn.Module, capture: Capture) -> None:
        self._capture = capture
        self._sources: list[AnySource] = choose_sources(model, capture)
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

    def after_step(self) -> None:
        """The optimizer has stepped: record what belongs to the iteration's end. Never raises."""
        for source in self._sources:
            with self._capture.guard(f"the end of the iteration of {type(source).__name__}"):
                source.after_step()

    def detach(self) -> None:
        """Remove all hooks. Never raises; may be called twice."""
        for source in self._sources:
            with self._capture.guard("detach"):
                source.detach()

    def describe(self) -> str:
        """Say in a few words what is observed."""
        return " and ".join(source.describe() for source in self._sources)
