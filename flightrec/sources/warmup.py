"""Knows when a model only runs to be captured: the eager warm-up of ``make_graphed_callables``, and what it leaves.

A forward belongs to a warm-up if torch's or Transformer Engine's function stands below it on the stack, whatever name
it was imported under; a flag or a wrapper would be missed by some callers, and stay behind after an exception. Asked
only where a forward begins from outside. Owns nothing; the training thread.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import torch

_MAKERS = (
    ("torch.cuda.graphs", "make_graphed_callables"),
    ("transformer_engine.pytorch.graph", "_make_graphed_callables"),
)
_FORWARD = "make_graphed_callables.<locals>.make_graphed_forward.<locals>"
_MODE = "graph_training_state"
_HAS_CUDA = torch.version.cuda is not None or torch.version.hip is not None


def is_capturing() -> bool:
    """Say whether this thread's current stream is captured into a CUDA graph. Does not synchronise."""
    return (_is_cuda_used or _is_cuda_used_now()) and _is_stream_capturing()


_is_stream_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
_is_cuda_used = False
"""Asked at every module: torch's own question takes two Python calls, and once it is a yes it stays one."""


def _is_cuda_used_now() -> bool:
    global _is_cuda_used  # noqa: PLW0603  of the process, as CUDA's context is
    _is_cuda_used = _HAS_CUDA and torch.cuda.is_initialized()
    return _is_cuda_used


def _forget_cuda() -> None:
    global _is_cuda_used  # noqa: PLW0603
    _is_cuda_used = False


os.register_at_fork(after_in_child=_forget_cuda)  # there torch refuses CUDA


def is_warming_up() -> bool:
    """Say whether ``make_graphed_callables`` runs below, so that a forward outside of a capture means nothing."""
    codes = _codes()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _codes() -> set[CodeType]:
    """Code of the functions that warm up, as far as they are loaded."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _MAKERS)
    functions = (inspect.unwrap(function) for function in found if callable(function))
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


def graphed_for(module: torch.nn.Module) -> bool | None:
    """Mode (``training`` or not) for which a module was graphed: its forward replays then. None if it was not."""
    forward = module.__dict__.get("forward")
    code = getattr(forward, "__code__", None)
    if forward is None or code is None or _FORWARD not in forward.__qualname__ or _MODE not in code.co_freevars:
        return None
    return bool(forward.__closure__[code.co_freevars.index(_MODE)].cell_contents)


def replays(module: torch.nn.Module) -> bool:
    """Say whether a call of this module, as it is now, replays a graph."""
    return "forward" in module.__dict__ and graphed_for(module) is module.training
