"""Python's hooks for uncaught exceptions, chained: ours first, then whoever was there.

One pair of hooks serves all recorders of the process: put in front for the first one, taken out after the last. They
run on the thread that raised.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from flightrec.boundary import contained


class Listener(Protocol):
    """Who is told of exceptions that nobody caught; neither method may raise."""

    def on_uncaught(self, error: BaseException) -> None:
        """The main thread raised: the process is about to end."""

    def on_thread_uncaught(self, error: BaseException) -> None:
        """Another thread raised, and ended; the process goes on. Called on that thread."""


class _Hooks:
    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._previous: Callable[..., object] = sys.excepthook
        self._previous_thread: Callable[..., object] = threading.excepthook
        self._installed = False

    def add(self, listener: Listener) -> None:
        self._listeners.add(listener)
        if not self._installed:
            self._previous, self._previous_thread = sys.excepthook, threading.excepthook
            sys.excepthook, threading.excepthook = self._hook, self._thread_hook
            self._installed = True

    def remove(self, listener: Listener) -> None:
        """Forget a listener. Behind hooks that somebody else put in front since, ours stay and only pass on."""
        self._listeners.discard(listener)
        if self._listeners or not self._installed:
            return
        if sys.excepthook == self._hook and threading.excepthook == self._thread_hook:
            sys.excepthook, threading.excepthook = self._previous, self._previous_thread
            self._installed = False

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contained("the hook for uncaught exceptions"):
            for listener in list(self._listeners):
                listener.on_uncaught(error)
        self._previous(kind, error, trace)

    def _thread_hook(self, args: threading.ExceptHookArgs) -> None:
        with contained("the hook for exceptions of threads"):
            if args.exc_value is not None:
                for listener in list(self._listeners):
                    listener.on_thread_uncaught(args.exc_value)
        self._previous_thread(args)


_hooks = _Hooks()


def listen(listener: Listener) -> None:
    """Tell ``listener`` of uncaught exceptions from now on; it is held weakly."""
    _hooks.add(listener)


def stop_listening(listener: Listener) -> None:
    """Stop to tell ``listener``; the previous hooks come back with the last one."""
    _hooks.remove(listener)


MAX_STACK = 64 * 1024
"""Characters of a traceback that are kept: its beginning and its end."""


def describe(error: BaseException) -> str:
    """Type and first line of an exception, short, printable, whatever its ``__str__`` does."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["(its message cannot be shown)"]
    return f"{type(error).__name__}: {_printable(lines[0][:200]) if lines else 'no message'}"


def stack_of(error: BaseException) -> str:
    """The traceback as text, printable and of bounded length."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _printable(text if len(text) <= MAX_STACK else f"{text[: MAX_STACK // 2]}\n...\n{text[-MAX_STACK // 2 :]}")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
