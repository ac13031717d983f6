"""The incident that users open: what storage reads, and the questions that analysis answers about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flightrec.analysis.blame import Finding, blame
from flightrec.analysis.elements import find_elements
from flightrec.analysis.judge import judge
from flightrec.analysis.verdict import Verdict
from flightrec.storage import read
from flightrec.storage.record import Record


class Incident(read.Incident):
    """An incident opened for reading; see ``flightrec.storage.read.Incident``."""

    def blame(self, *, elements: bool = False) -> list[Finding]:
        """What went wrong first, and why: see ``flightrec.analysis.blame.blame``.

        Args:
            elements: also tell which elements are at fault of each finding that is non-finite; reads their payload.

        Raises:
            IncidentError: a table is damaged, or bytes that are read.
        """
        found = blame(self)
        if not elements:
            return found
        ranks = {rank.rank: rank for rank in self.ranks}
        return [
            replace(finding, elements=find_elements(Record(ranks[finding.rank], finding.record), finding.side))
            if finding.record >= 0 and finding.side
            else finding
            for finding in found
        ]

    def verdict(self, *, elements: bool = False) -> Verdict:
        """Where it began, why, and how sure that is: see ``flightrec.analysis.verdict.Verdict``.

        Args:
            elements: also tell which elements of the first faulty tensor are at fault; reads its payload.
        """
        return judge(self, elements=elements)


def open_incident(path: str | Path) -> Incident:
    """Open an incident's folder, index, or one rank's file; see ``flightrec.storage.read.open_incident``."""
    return read.open_as(Incident, path)
