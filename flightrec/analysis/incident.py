"""The incident that users open: what storage reads, and the questions that analysis answers about it."""

from __future__ import annotations

from pathlib import Path

from flightrec.analysis.blame import Finding, blame
from flightrec.analysis.judge import judge
from flightrec.analysis.verdict import Verdict
from flightrec.storage import read


class Incident(read.Incident):
    """An incident opened for reading; see ``flightrec.storage.read.Incident``."""

    def blame(self) -> list[Finding]:
        """What went wrong first, and why: see ``flightrec.analysis.blame.blame``."""
        return blame(self)

    def verdict(self, *, elements: bool = False) -> Verdict:
        """Where it began, why, and how sure that is: see ``flightrec.analysis.verdict.Verdict``.

        Args:
            elements: also tell which elements of the first faulty tensor are at fault; reads its payload.
        """
        return judge(self, elements=elements)


def open_incident(path: str | Path) -> Incident:
    """Open an incident's folder, index, or one rank's file; see ``flightrec.storage.read.open_incident``."""
    return read.open_as(Incident, path)
