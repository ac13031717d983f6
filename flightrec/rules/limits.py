"""Whether a rule that fired may write an incident: ``limit``, ``cooldown`` and the reserve for faults.

Host side, on the thread that calls ``step()``; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flightrec.config.rules import AnyRule
from flightrec.records import Severity


class Limits:
    """Counts incidents, per rule and severity.

    No rule's incidents count against another rule, so a noisy one silences only itself, and never ``nonfinite``,
    ``exception`` or ``manual``. A rule may write ``limit`` incidents in a run, of which ``reserve`` are kept for
    severity ``fault``; two of one rule and severity are at least ``cooldown`` iterations apart.

    Args:
        rules: the configuration's triggers, in the order of their numbers; a rule's own ``cooldown_iterations``, where
            not None, replaces ``cooldown``.
        limit: incidents of one rule, at least 1.
        cooldown: iterations from an incident's firing to the next one's.
        reserve: how much of ``limit`` only faults may use; a quarter, at least 1, unless given. One incident of a
            lower severity is allowed even if the reserve is all there is.
    """

    def __init__(self, rules: Sequence[AnyRule], limit: int, cooldown: int, reserve: int | None = None) -> None:
        self.rules = tuple(rules)
        self.limit = limit
        self.reserve = max(1, limit // 4) if reserve is None else reserve
        self._cooldowns = [
            cooldown if rule.cooldown_iterations is None else rule.cooldown_iterations for rule in self.rules
        ]
        self._unlimited = tuple(rule.severity is not Severity.WATCH for rule in self.rules)
        self._counts: dict[tuple[str, Severity], int] = {}
        self._last_tick: dict[tuple[str, Severity], int] = {}

    def allows(self, rule_index: int, tick: int, severity: Severity | None = None) -> bool:
        """Whether the rule may write an incident for a firing at ``tick``; of its own severity, if none is given."""
        return not self.reason(rule_index, tick, severity)

    def reason(self, rule_index: int, tick: int, severity: Severity | None = None) -> str:
        """Why the rule may not write an incident now, in a few words; empty when it may."""
        rule = self.rules[rule_index]
        severity = rule.severity if severity is None else severity
        if severity is Severity.WATCH:
            return "severity watch writes nothing"
        written = sum(count for (name, _), count in self._counts.items() if name == rule.name)
        if written >= self.limit:
            return f"limit: {written} of {self.limit} incidents of this rule are written"
        ordinary = max(1, self.limit - self.reserve)
        if severity is not Severity.FAULT and self._counts.get((rule.name, severity), 0) >= ordinary:
            return f"limit: {ordinary} of {self.limit} incidents are written, the rest is kept for faults"
        last = self._last_tick.get((rule.name, severity))
        cooldown = self._cooldowns[rule_index]
        if last is not None and tick - last < cooldown:
            return f"cooldown: {tick - last} of {cooldown} iterations have passed"
        return ""

    def allowed(self, tick: int) -> tuple[bool, ...]:
        """``allows`` for every rule, in the order of their numbers: what ``Evaluator.set_may_hold`` is told."""
        if not self._counts:  # in a healthy run, every iteration
            return self._unlimited
        return tuple(self.allows(number, tick) for number in range(len(self.rules)))

    def count(self, rule_index: int, tick: int, severity: Severity | None = None) -> None:
        """An incident of the rule, for a firing at ``tick``, is being written."""
        rule = self.rules[rule_index]
        slot = (rule.name, rule.severity if severity is None else severity)
        self._counts[slot] = self._counts.get(slot, 0) + 1
        self._last_tick[slot] = tick

    def state_dict(self) -> dict[str, Any]:
        """Counts by rule and severity, plain data. Cooldowns are not kept: ticks begin anew with a process."""
        return {"counts": [[name, severity.value, count] for (name, severity), count in self._counts.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave.

        Incidents that this process wrote since stay counted, and cooldowns run on: a loop that goes back to its
        checkpoint at each fault writes no more than any other.
        """
        for name, severity, count in state["counts"]:
            place = (name, Severity(severity))
            self._counts[place] = max(count, self._counts.get(place, 0))
