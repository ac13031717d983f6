"""Where the feature's file is, and whether a configuration is sound: what a run needs before it initializes.

No torch, no nvdlfw_inspect. Runs before training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flightrec.config.inspection import load_inspect
from flightrec.errors import AttachError

if TYPE_CHECKING:
    import torch


def feature_directory(config_file: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> str:
    """The folder to add to ``feature_dirs`` of ``nvdlfw_inspect.api.initialize``.

    Args:
        config_file: what ``initialize`` will be given as ``config_file``; it is checked here, where a refusal costs
            nothing. None: not checked before the feature's first use, which then switches itself off.

    Returns:
        An absolute path.

    Raises:
        ConfigError: see ``load_inspect``.
    """
    if config_file is not None:
        load_inspect(config_file)
    return str(Path(__file__).resolve().parent / "features")


def check_inspect(
    config_file: str | os.PathLike[str] | Mapping[str, Any], model: torch.nn.Module | None = None
) -> None:
    """Refuse, before training, what the feature ``FlightRecorder`` could only answer by switching itself off.

    Args:
        config_file: what ``nvdlfw_inspect.api.initialize`` is given.
        model: the model to be trained; then what debug mode cannot do with it is found too.

    Raises:
        ConfigError: see ``load_inspect``.
        AttachError: a module of the model delays its weight gradients, with which debug mode ends in an error.
    """
    load_inspect(config_file)
    delayed = [] if model is None else [name for name, module in model.named_modules() if _delays_wgrad(module)]
    if delayed:
        shown = ", ".join(name or "the model itself" for name in delayed[:5])
        raise AttachError(
            f"{len(delayed)} modules were made with delay_wgrad_compute=True ({shown}), which Transformer Engine's "
            "debug mode refuses in the first forward, whatever the feature. Make them without it, or leave "
            "nvdlfw_inspect out and use flightrec.Recorder.attach(model), which taps Transformer Engine's products "
            "outside debug mode"
        )


def _delays_wgrad(module: torch.nn.Module) -> bool:
    """Whether a module of Transformer Engine keeps its weight gradients for later."""
    store = getattr(module, "wgrad_store", None)
    delays = getattr(store, "delay_wgrad_compute", None)
    return callable(delays) and bool(delays())
