"""Chooses the sources that a model calls for.

Owns nothing. Called on the training thread, when a model is attached.
"""

from __future__ import annotations

from torch import nn

from flightrec.errors import AttachError
from flightrec.sources.base import Source as AnySource
from flightrec.sources.modules import ModulesSource
from flightrec.sources.sink import Sink
from flightrec.sources.stamps import Stamps
from flightrec.sources.te import TeSource
from flightrec.sources.torchao import TorchaoSource

__all__ = ["AnySource", "choose_sources"]


def choose_sources(model: nn.Module, sink: Sink) -> list[AnySource]:
    """Make the sources for a model: ``te`` and ``torchao`` for their products, ``modules`` for the rest.

    Args:
        model: the model to observe.
        sink: where tensors go; its ``selects`` is asked here, once for every layer, tensor and phase.

    Returns:
        The sources, not attached yet; use all of them or none. Empty if nothing of the model is selected.

    Raises:
        AttachError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach: expected a torch.nn.Module, got {type(model).__qualname__}")
    stamps = Stamps(model, sink)
    torchao = TorchaoSource(model, sink, stamps)
    te = TeSource(model, sink, stamps)
    modules = ModulesSource(model, sink, skip={**torchao.claims, **te.claims}, stamps=stamps)
    taps: list[AnySource] = [tap for tap in (torchao, te) if tap.has_work]
    return [*taps, modules] if taps or modules.has_work else []
