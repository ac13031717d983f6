"""The last wall between an error of ours and the training loop, for places that know no recorder to tell.

Everything of ours that the loop, autograd, the interpreter or another library calls catches ``Exception`` and disarms
the part that failed, which logs it once and notes it for the incident (``Capture.guard``). What is here comes after
that: it says a last word if even the disarming failed. ``KeyboardInterrupt`` and its like are never caught. Owns
nothing; any thread.
"""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType

_log = logging.getLogger("flightrec")


def last_word(part: str, error: BaseException) -> None:
    """Log an error that nothing else took. Never raises an ``Exception``, whatever the handlers of the log do."""
    with contextlib.suppress(Exception):
        _log.error("flightrec: %s failed; training goes on", part, exc_info=error)


class contained:  # noqa: N801  used like a function: ``with contained("part"):``
    """Context that swallows an ``Exception`` raised in it and says a last word."""

    __slots__ = ("_part",)

    def __init__(self, part: str) -> None:
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            last_word(self._part, error)
            return True
        return False


def shown(value: object) -> str:
    """A user's value for a name in a message: its ``repr``, short, whatever its own code does."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 100
