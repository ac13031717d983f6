"""What happens to the recorders of a process when it forks and when it ends.

Holds them weakly. ``follow`` belongs to the training thread; the rest is called by the interpreter, and never raises.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from flightrec.boundary import contained


class Living(Protocol):
    """What is followed."""

    def forget_in_child(self) -> None:
        """This is a forked process: record nothing, close nothing."""

    def close(self) -> None:
        """The interpreter ends."""


_followed: weakref.WeakSet[Living] = weakref.WeakSet()


def follow(living: Living) -> None:
    """Close it when the interpreter ends, before whatever was registered earlier; tell it in forked processes."""
    _followed.add(living)
    atexit.register(_close_at_exit, weakref.ref(living))


def _after_fork_in_child() -> None:
    with contained("forgetting recorders in a forked process"):
        for living in list(_followed):
            living.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _close_at_exit(reference: weakref.ref[Living]) -> None:
    living = reference()
    if living is not None:
        with contained("closing a recorder at exit"):
            living.close()
