"""The incident that users open: what storage reads, and the questions that analysis answers about it."""

from __future__ import annotations

from pathlib import Path

from flightrec.analysis.blame import Finding, blame
from flightrec.storage import read


class Incident(read.Incident):
    """An incident opened for reading; see ``flightrec.storage.read.Incident``."""

    def blame(self) -> list[Finding]:
        """What went wrong first, and why: see ``flightrec.analysis.blame.blame``."""
        return blame(self)


def open_incident(path: str | Path) -> Incident:
    """Open an incident's folder, index, or one rank's file; see ``flightrec.storage.read.open_incident``."""
    return read.open_as(Incident, path)
