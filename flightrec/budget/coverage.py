"""Iterations in which everything is recorded because something announced itself.

Host only, training thread only. Counts ticks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flightrec.records import Firing, Severity

logger = logging.getLogger("flightrec")

RULE_SHARE = 0.1
"""Share of the iterations in which one rule's watches may raise the coverage."""

TOTAL_SHARE = 0.25
"""The same for all rules together."""

BURSTS = 4
"""How many raises a rule may ask for at once before its share counts."""

_ALL = ""


class Coverage:
    """Says until when everything is recorded.

    A firing of severity ``watch`` asks for the next ``watch_iterations``; a rule that asks more often than its share
    allows is not heard until it has been quiet for a while. An incident asks for the iterations that it still records.

    Args:
        watch_iterations: iterations of full coverage after a watch; 0 for none.
    """

    def __init__(self, watch_iterations: int) -> None:
        self._iterations = watch_iterations
        self._until = -1
        self._credit: dict[str, float] = {}
        self._credit_tick: dict[str, int] = {}
        self._told: set[str] = set()

    def everything(self, tick: int) -> bool:
        """Whether everything is recorded in ``tick``."""
        return tick <= self._until

    def see(self, firings: Iterable[Firing], next_tick: int, recording_until: int) -> str:
        """Take a verdict's firings.

        Args:
            firings: of one iteration.
            next_tick: the first tick whose coverage can still be chosen.
            recording_until: the last tick that an open incident records, -1 for none.

        Returns:
            What a user should be told once, or the empty text.
        """
        told = ""
        loud = False
        for firing in firings:
            if firing.severity is Severity.WATCH:
                told = self._watch(firing.rule, next_tick) or told
            else:
                loud = True
        if recording_until >= 0:
            # One whole iteration at least: the other layers' share of the same fault belongs to this incident.
            self._until = max(self._until, recording_until, next_tick if loud else -1)
        return told

    def _watch(self, rule: str, next_tick: int) -> str:
        until = next_tick + self._iterations - 1
        wanted = until - max(self._until, next_tick - 1)
        if wanted <= 0:
            return ""
        shares = {rule: RULE_SHARE, _ALL: TOTAL_SHARE}
        accounts = {name: self._available(name, share, next_tick) for name, share in shares.items()}
        if min(accounts.values()) < wanted:
            if rule in self._told:
                return ""
            self._told.add(rule)
            return (
                f"watches of rule {rule!r} come so often that they no longer raise the coverage each time: full "
                f"coverage is kept to {RULE_SHARE:.0%} of the iterations for a rule, {TOTAL_SHARE:.0%} for all"
            )
        for name, credit in accounts.items():
            self._credit[name] = credit - wanted
        self._until = until
        return ""

    def _available(self, name: str, share: float, tick: int) -> float:
        most = float(BURSTS * self._iterations)
        gained = (tick - self._credit_tick.get(name, tick)) * share
        self._credit_tick[name] = tick
        self._credit[name] = min(most, self._credit.get(name, most) + gained)
        return self._credit[name]
