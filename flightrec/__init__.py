"""flightrec: a fault-triggered flight recorder for long PyTorch pretraining runs in low precision.

Names are loaded when first used, so that reading incidents needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flightrec.errors import (
    AttachError,
    ConfigError,
    FlightrecError,
    FormatError,
    IncidentError,
    MissingExtraError,
    RingMemoryError,
    WriterError,
)

if TYPE_CHECKING:
    from flightrec.analysis.incident import Incident as Incident
    from flightrec.analysis.incident import open_incident as open  # noqa: A004
    from flightrec.config.model import Config as Config
    from flightrec.inspection.paths import check_inspect as check_inspect
    from flightrec.inspection.paths import feature_directory as feature_directory
    from flightrec.inspection.session import inspect_recorder as inspect_recorder
    from flightrec.interop.tensors import to_torch as to_torch
    from flightrec.interop.tensors import to_torchao as to_torchao
    from flightrec.interop.tensors import to_transformer_engine as to_transformer_engine
    from flightrec.recorder import Recorder as Recorder
    from flightrec.sources.quantized import Quantized as Quantized

__version__ = "0.1.0"

_LAZY = {
    "Config": ("flightrec.config.model", "Config"),
    "Incident": ("flightrec.analysis.incident", "Incident"),
    "Quantized": ("flightrec.sources.quantized", "Quantized"),
    "Recorder": ("flightrec.recorder", "Recorder"),
    "check_inspect": ("flightrec.inspection.paths", "check_inspect"),
    "feature_directory": ("flightrec.inspection.paths", "feature_directory"),
    "inspect_recorder": ("flightrec.inspection.session", "inspect_recorder"),
    "open": ("flightrec.analysis.incident", "open_incident"),
    "to_torch": ("flightrec.interop.tensors", "to_torch"),
    "to_torchao": ("flightrec.interop.tensors", "to_torchao"),
    "to_transformer_engine": ("flightrec.interop.tensors", "to_transformer_engine"),
}
_RECORDING = frozenset({"Quantized", "Recorder", "inspect_recorder"})
_NEED_TORCH = _RECORDING | {"to_torch", "to_torchao", "to_transformer_engine"}

__all__ = [
    "AttachError",
    "Config",
    "ConfigError",
    "FlightrecError",
    "FormatError",
    "Incident",
    "IncidentError",
    "MissingExtraError",
    "Quantized",
    "Recorder",
    "RingMemoryError",
    "WriterError",
    "__version__",
    "check_inspect",
    "feature_directory",
    "inspect_recorder",
    "open",
    "to_torch",
    "to_torchao",
    "to_transformer_engine",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for.

    Raises:
        MissingExtraError: what was asked for needs torch, which is not installed.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'flightrec' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if name in _NEED_TORCH and error.name == "torch":
            does = "records a training run" if name in _RECORDING else "makes tensors"
            raise MissingExtraError(
                f"flightrec.{name} {does} and needs torch, which is not installed: pip install 'torch-flightrec[train]'"
            ) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
