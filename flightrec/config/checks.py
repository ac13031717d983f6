"""Combinations of settings that are each valid and cannot work together. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flightrec.config.problems import Problem
from flightrec.config.rulebase import DeviceRule
from flightrec.config.rules import AnyRule
from flightrec.config.selection import ALWAYS_RECORDED, Selection


def cross_check(select: Sequence[Selection], triggers: Sequence[AnyRule]) -> tuple[Problem, ...]:
    """Everything that cannot work, told at the key to change; empty when all is well."""
    problems = [*_entries_that_never_match(select), *_names_given_twice(triggers)]
    return (*problems, *_rules_that_see_nothing(select, triggers))


def _entries_that_never_match(select: Sequence[Selection]) -> Iterator[Problem]:
    for index, entry in enumerate(select):
        for earlier, candidate in enumerate(select[:index]):
            if candidate.covers(entry):
                yield Problem(
                    ("select", index),
                    f"this entry can never match: the first matching entry counts, and select[{earlier}] already takes "
                    "all of its layers and tensors; put the more specific entry first",
                )
                break


def _names_given_twice(triggers: Sequence[AnyRule]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, rule in enumerate(triggers):
        if rule.name not in first:
            first[rule.name] = index
        elif "manual" in (rule.kind, triggers[first[rule.name]].kind) and rule.name == "manual":
            other = index if triggers[first[rule.name]].kind == "manual" else first[rule.name]
            yield Problem(
                ("triggers", other, "name"), "the name manual belongs to the rule that is always there; give another"
            )
        else:
            yield Problem(
                ("triggers", index, "name"),
                f"expected a name of its own, got {rule.name!r}, the name of triggers[{first[rule.name]}]; "
                "a rule without a name is called by its kind",
            )


def _rules_that_see_nothing(select: Sequence[Selection], triggers: Sequence[AnyRule]) -> Iterator[Problem]:
    for index, rule in enumerate(triggers):
        if (reason := blind_reason(select, rule)) is not None:
            key, message = reason
            yield Problem(("triggers", index, key), message)


def blind_reason(select: Sequence[Selection], rule: AnyRule) -> tuple[str, str] | None:
    """Why a rule can see nothing of what ``select`` records: the key to change and a message; None when it can."""
    if not isinstance(rule, DeviceRule) or ALWAYS_RECORDED & set(rule.tensors):
        return None
    recorded = {tensor for entry in select for tensor in entry.tensors if entry.records(tensor)}
    if not recorded & set(rule.tensors):
        return "tensors", (
            f"the rule {rule.name} looks at {', '.join(rule.tensors)}, but select records only "
            f"{', '.join(sorted(recorded))}; add one of them to select, with keep: [statistics] if bytes do not matter"
        )
    seen = [entry for entry in select if any(entry.records(tensor) for tensor in rule.tensors)]
    phases = {phase for entry in seen for phase in entry.phases}
    if not phases & set(rule.phases):
        wanted, there = (", ".join(sorted(phase.value for phase in some)) for some in (rule.phases, phases))
        return "phases", (
            f"the rule {rule.name} looks at the phases {wanted}, but select records its tensors only in {there}; "
            "add one of them to select"
        )
    return None
