from __future__ import annotations

from flightrec.budget.coverage import RULE_SHARE, TOTAL_SHARE, Coverage
from flightrec.records import Firing, Severity


def firing(rule: str = "amax", severity: Severity = Severity.WATCH) -> Firing:
    return Firing(rule, "amax_spike", severity, 0, 0, None, -1, 1.0, 1.0, "")


def covered(coverage: Coverage, ticks) -> list[int]:
    return [tick for tick in ticks if coverage.everything(tick)]


def test_a_watch_raises_coverage_for_the_next_iterations():
    coverage = Coverage(8)
    assert coverage.see([firing()], 5, -1) == ""
    assert covered(coverage, range(40)) == list(range(13))  # what is past does not matter
    assert not coverage.everything(13)
    assert coverage.see([firing(), firing("other")], 7, -1) == ""
    assert coverage.everything(14) and not coverage.everything(15)


def test_none_are_asked_for_with_zero():
    coverage = Coverage(0)
    coverage.see([firing()], 5, -1)
    assert not coverage.everything(5)


def test_an_incident_is_recorded_whole_and_for_one_iteration_at_least():
    coverage = Coverage(8)
    coverage.see([firing(severity=Severity.FAULT)], 5, 7)
    assert coverage.everything(7) and not coverage.everything(8)
    coverage.see([firing(severity=Severity.WARNING)], 20, 19)
    assert coverage.everything(20) and not coverage.everything(21)


def test_a_warning_that_writes_no_incident_raises_nothing():
    coverage = Coverage(8)
    coverage.see([firing(severity=Severity.WARNING)], 5, -1)
    assert not coverage.everything(5)


def test_a_rule_that_watches_all_the_time_is_bounded_and_told_once():
    coverage, told, seen = Coverage(8), [], 0
    for tick in range(4000):
        seen += coverage.everything(tick)
        told += filter(None, [coverage.see([firing()], tick + 1, -1)])
    assert RULE_SHARE / 2 <= seen / 4000 <= RULE_SHARE + 0.02
    assert len(told) == 1 and "'amax'" in told[0]


def test_many_rules_together_are_bounded_too():
    coverage, seen = Coverage(8), 0
    for tick in range(4000):
        seen += coverage.everything(tick)
        coverage.see([firing(f"rule {tick // 7 % 12}")], tick + 1, -1)
    assert seen / 4000 <= TOTAL_SHARE + 0.02


def test_a_quiet_rule_is_heard_beside_a_loud_one_once_there_is_room():
    coverage = Coverage(4)
    for tick in range(400):
        coverage.see([firing("loud")], tick + 1, -1)
    coverage.see([firing("quiet")], 500, -1)
    assert coverage.everything(503) and not coverage.everything(504)
