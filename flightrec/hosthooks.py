"""Python's hooks for uncaught exceptions, chained: ours first, then whoever was there.

Installed for the life of a recorder. Called on the thread that raised.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType


class ExceptionHooks:
    """Calls ``flush`` with an exception that nobody caught, before the previous hooks.

    Args:
        flush: must not raise.
    """

    def __init__(self, flush: Callable[[BaseException], None]) -> None:
        self._flush = flush
        self._previous = sys.excepthook
        self._previous_thread = threading.excepthook
        self._installed = False

    def install(self) -> None:
        """Put our hooks in front."""
        self._previous, self._previous_thread = sys.excepthook, threading.excepthook
        sys.excepthook = self._hook
        threading.excepthook = self._thread_hook
        self._installed = True

    def remove(self) -> None:
        """Restore the previous hooks, unless somebody else has put theirs in front since: then ours only pass on."""
        self._installed = False
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous
        if threading.excepthook == self._thread_hook:
            threading.excepthook = self._previous_thread

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._installed:
            self._flush(error)
        self._previous(kind, error, trace)

    def _thread_hook(self, args: threading.ExceptHookArgs) -> None:
        if self._installed and args.exc_value is not None:
            self._flush(args.exc_value)
        self._previous_thread(args)
