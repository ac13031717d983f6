"""The process-wide tap on torch's gradient clipping, and who listens to it.

While somebody listens, ``clip_grad_norm_``, ``clip_grads_with_norm_`` and ``clip_grad_value_`` of ``torch.nn.utils``
are replaced: they first tell whose gradients are about to be clipped, then call the originals with what they got.
``clip_grad_norm_`` calls ``_clip_grads_with_norm_`` through its module's names, so that it is seen too where it was
imported by name before. Owns the listeners and the originals. Runs on the thread that clips.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from flightrec.sources.stamps import must_not_record


class Listener(Protocol):
    """Who is told before gradients are clipped; must not raise an ``Exception``."""

    def before_clipping(self, parameters: Collection[torch.Tensor]) -> None:
        """The gradients of these parameters are about to be clipped, in place."""


_NAMES = (
    (clip_grad, "clip_grad_norm_"),
    (clip_grad, "clip_grad_value_"),
    (clip_grad, "_clip_grads_with_norm_"),
    (utils, "clip_grad_norm_"),
    (utils, "clip_grad_value_"),
    (utils, "clip_grads_with_norm_"),
)

_lock = threading.Lock()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()  # weak: a recorder that was dropped holds no model
_replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []  # where, name, original, ours


def listen(listener: Listener) -> None:
    """Tell ``listener`` from now on; it is held weakly. The first one replaces what this version of torch has."""
    with _lock:
        _listeners.add(listener)
        for module, name in () if _replaced else _NAMES:
            original = getattr(module, name, None)
            if callable(original):
                ours = _telling(original)
                _replaced.append((module, name, original, ours))
                setattr(module, name, ours)


def stop_listening(listener: Listener) -> None:
    """Stop to tell ``listener``; the last one puts back what is still ours. What lies over ours passes through it."""
    with _lock:
        _listeners.discard(listener)
        while not _listeners and _replaced:
            module, name, original, ours = _replaced.pop()
            if getattr(module, name, None) is ours:
                setattr(module, name, original)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if _listeners and not must_not_record():
            args, kwargs = _tell(args, kwargs)
        return original(*args, **kwargs)

    return clip


def _tell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell the listeners; gives the arguments back, with a new iterator where looking used one up."""
    given = args[0] if args else kwargs.get("parameters")
    if isinstance(given, torch.Tensor):
        parameters = [given]
    else:
        try:
            is_used_up = iter(given) is given  # type: ignore[arg-type]
        except TypeError:
            return args, kwargs  # the original complains better
        parameters = list(given)  # type: ignore[arg-type]
        if is_used_up:
            again = (parameter for parameter in parameters)  # torch looks whether it is a generator
            args, kwargs = ((again, *args[1:]), kwargs) if args else (args, {**kwargs, "parameters": again})
    tensors = [parameter for parameter in parameters if isinstance(parameter, torch.Tensor)]
    for listener in tuple(_listeners):
        listener.before_clipping(tensors)
    return args, kwargs
