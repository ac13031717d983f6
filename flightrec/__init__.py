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
}
_NEED_TORCH = frozenset({"Quantized", "Recorder", "inspect_recorder"})

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
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for.

    Raises:
        MissingExtraError: recording was asked for and torch is not installed.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'flightrec' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if name in _NEED_TORCH and error.name == "torch":
            raise MissingExtraError(
                f"flightrec.{name} records a training run and needs torch, which is not installed: "
                "pip install 'torch-flightrec[train]'"
            ) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
