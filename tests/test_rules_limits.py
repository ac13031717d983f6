from __future__ import annotations

import pytest

from flightrec.config.rules import AmaxSpikeRule, ExceptionRule, LossJumpRule, ManualRule, NonfiniteRule
from flightrec.records import Severity
from flightrec.rules.limits import Limits

RULES = (
    NonfiniteRule(),
    AmaxSpikeRule(),
    LossJumpRule(cooldown=0),
    ExceptionRule(),
    ManualRule(),
    LossJumpRule(name="quiet", severity="watch"),
)
NONFINITE, AMAX, LOSS, EXCEPTION, MANUAL, QUIET = range(6)


def write(limits: Limits, rule: int, tick: int, severity: Severity | None = None) -> bool:
    """What the recorder does at a firing: ask, and count if an incident is written."""
    allowed = limits.allows(rule, tick, severity)
    if allowed:
        limits.count(rule, tick, severity)
    return allowed


def test_noisy_rule_silences_only_itself():
    limits = Limits(RULES, limit=20, cooldown=50)
    written = [tick for tick in range(0, 5000, 10) if write(limits, AMAX, tick)]
    assert written == list(range(0, 750, 50))  # 15 of 20: a quarter is kept for faults
    assert limits.allowed(5000) == (True, False, True, True, True, False)


def test_cooldown_is_the_rules_own_or_the_common_one():
    limits = Limits(RULES, limit=20, cooldown=50)
    for rule in (AMAX, LOSS, NONFINITE):
        assert write(limits, rule, 100)
    assert [limits.allows(AMAX, tick) for tick in (100, 149, 150)] == [False, False, True]
    assert limits.allows(LOSS, 100)  # cooldown: 0
    assert not limits.allows(NONFINITE, 149)
    assert limits.allows(EXCEPTION, 101)


def test_reserve_is_for_faults():
    limits = Limits(RULES, limit=8, cooldown=0)
    assert [write(limits, AMAX, tick) for tick in range(8)] == [True] * 6 + [False] * 2
    assert [write(limits, AMAX, tick, Severity.FAULT) for tick in range(8)] == [True] * 2 + [False] * 6
    assert not limits.allows(AMAX, 99)
    assert [write(limits, NONFINITE, tick) for tick in range(9)] == [True] * 8 + [False]


@pytest.mark.parametrize(
    ("limit", "reserve", "warnings"), [(1, None, 1), (2, None, 1), (4, None, 3), (4, 0, 4), (4, 3, 1)]
)
def test_small_limits(limit, reserve, warnings):
    limits = Limits(RULES, limit=limit, cooldown=0, reserve=reserve)
    assert sum(write(limits, LOSS, tick) for tick in range(10)) == warnings


def test_severities_cool_down_apart():
    limits = Limits(RULES, limit=20, cooldown=50)
    assert write(limits, AMAX, 0)
    assert not limits.allows(AMAX, 10)
    assert limits.allows(AMAX, 10, Severity.FAULT)


def test_reasons():
    limits = Limits(RULES, limit=4, cooldown=50)
    assert limits.reason(AMAX, 0) == ""
    assert limits.reason(QUIET, 0) == "severity watch writes nothing"
    limits.count(AMAX, 0)
    assert limits.reason(AMAX, 12) == "cooldown: 12 of 50 iterations have passed"
    limits.count(AMAX, 50)
    limits.count(AMAX, 100)
    assert limits.reason(AMAX, 500) == "limit: 3 of 4 incidents are written, the rest is kept for faults"
    limits.count(AMAX, 500, Severity.FAULT)
    assert limits.reason(AMAX, 900, Severity.FAULT) == "limit: 4 of 4 incidents of this rule are written"


def test_counts_survive_a_restart_and_cooldowns_do_not():
    limits = Limits(RULES, limit=4, cooldown=50)
    for tick in (0, 50, 100):
        assert write(limits, AMAX, tick)
    assert write(limits, NONFINITE, 120)
    again = Limits(RULES, limit=4, cooldown=50)
    again.load_state_dict(limits.state_dict())
    assert not again.allows(AMAX, 1000)
    assert again.allows(AMAX, 0, Severity.FAULT)
    assert again.allows(NONFINITE, 0)
