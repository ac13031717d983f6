"""Firings that the host raises: triggers by hand, exceptions that ended the loop or another thread.

``add_error`` may be called on any thread; everything else belongs to the training thread. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from flightrec.config.rules import AnyRule
from flightrec.hosthooks import describe
from flightrec.records import Firing, Severity

MAX_THREAD_ERRORS = 16


class HostRules:
    """What host rules have to tell, until a ``step`` takes it.

    Args:
        rules: the configuration's triggers.
    """

    def __init__(self, rules: Sequence[AnyRule]) -> None:
        self._rules = rules
        self._reasons: list[str] = []
        self._errors: list[BaseException] = []

    @property
    def has_reasons(self) -> bool:
        """Whether a trigger by hand waits."""
        return bool(self._reasons)

    def add_reason(self, reason: str) -> None:
        """Somebody triggers by hand."""
        self._reasons.append(reason)

    def add_error(self, error: BaseException) -> None:
        """Another thread ended with an exception."""
        if len(self._errors) < MAX_THREAD_ERRORS:
            self._errors.append(error)

    def take(self, attempt: int, iteration: int) -> list[Firing]:
        """Firings since the last call."""
        reasons, self._reasons = self._reasons, []
        errors, self._errors = self._errors, []
        told = [("manual", f"triggered by hand: {reason}") for reason in reasons]
        told += [("exception", f"a thread ended with {describe(error)}") for error in errors]
        firings = [self.firing(kind, text, attempt, iteration) for kind, text in told]
        return [firing for firing in firings if firing is not None]

    def firing(self, kind: str, message: str, attempt: int, iteration: int) -> Firing | None:
        """A firing of the first rule of this kind; None if the configuration has none."""
        rule = next((rule for rule in self._rules if rule.kind == kind), None)
        if rule is None:
            return None
        return Firing(
            rule=rule.name,
            kind=kind,
            severity=Severity(rule.severity),
            attempt=attempt,
            iteration=iteration,
            key=None,
            sequence=-1,
            value=float("nan"),
            threshold=float("nan"),
            message=f"{message}, iteration {iteration}",
        )
