"""How a task that reads an incident in a child process tells how far it is: JSON lines into a pipe, if there is one.

Offline, any thread; the descriptor is the command's, named by an environment variable.
"""

from __future__ import annotations

import json
import os

VARIABLE = "FLIGHTREC_PROGRESS_FD"
"""Environment variable with the number of an open descriptor; without it nothing is told."""


def tell(what: str, done: int, total: int) -> None:
    """Tell that ``done`` of ``total`` steps are done, and ``what`` comes next; errors are swallowed."""
    try:
        line = json.dumps({"what": what, "done": done, "total": total}) + "\n"
        os.write(int(os.environ[VARIABLE]), line.encode("ascii"))
    except (KeyError, ValueError, OSError):  # nobody asked, or nobody listens any more
        return
