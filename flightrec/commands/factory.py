"""Finds the model factory that a user names on the command line: ``package.module:factory``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from flightrec.errors import AttachError, MissingExtraError


def find_factory(target: str, form: str) -> Callable[..., Any]:
    """Import a factory; the current folder is searched first, as with ``python -m``.

    Args:
        target: ``package.module:factory``.
        form: what is expected of it, for messages.

    Raises:
        AttachError: no such module or function, or importing it fails.
        MissingExtraError: torch is not installed.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise AttachError(f"--model {target}: {form}")
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("--model needs torch: pip install 'torch-flightrec[train]'") from error
    sys.path.insert(0, os.getcwd())  # the user's own module
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise AttachError(f"--model {target}: {type(error).__name__}: {error}; {form}") from error
    if not callable(factory):
        raise AttachError(f"--model {target}: {name} is a {type(factory).__name__}; {form}")
    found: Callable[..., Any] = factory
    return found
