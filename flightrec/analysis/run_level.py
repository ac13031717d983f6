"""The cause of what a rule about the run saw (the loss, a metric): what moved before it, and the optimizer's settings.

Pure functions; tables only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flightrec.analysis.blame import Finding
from flightrec.analysis.causes import Cause
from flightrec.analysis.changes import Change
from flightrec.analysis.verdict import LIKELY, WEAK, name_of
from flightrec.storage.rank import Rank

RULES = ("loss_jump", "loss_drift", "metric_jump", "metric_threshold")
"""Rules about one number an iteration, whose cause lies in what is recorded elsewhere."""

UNLIKE = 10.0
"""Learning rates of groups that differ by this factor are told."""

_STATE = ("weight", "parameter")


def refine(rank: Rank, origin: Finding, cause: Cause, precursors: Sequence[Change]) -> Cause:
    """Tell what a loss alone cannot: which numbers moved before it.

    Args:
        rank: of the origin.
        origin: the first finding.
        cause: what its own record tells.
        precursors: what changed before it, in causal order.

    Returns:
        The same cause where nothing moved before.
    """
    if not precursors or (cause.kind != "loss" and origin.kind not in RULES):
        return cause
    first = precursors[0]
    evidence = (*cause.evidence, f"{first.sentence}.")
    if origin.kind in RULES and first.key.tensor in _STATE:
        rates = told_rates(rank)
        words = f"the optimizer moved {name_of(first.key)} before {name_of(origin.key)} told"
        return Cause("optimizer", LIKELY if rates else WEAK, words, (*evidence, *([rates] if rates else [])))
    return Cause("numbers", LIKELY, "the loss is not alone: numbers before it had grown", evidence)


def told_rates(rank: Rank) -> str:
    """A sentence if learning rates changed within the recorded iterations, or are unlike each other; else empty."""
    rates = [(entry.iteration, _rates(entry.optimizer.get("groups"))) for entry in rank.iterations]
    rates = [(iteration, values) for iteration, values in rates if values]
    for (_, before), (iteration, after) in itertools.pairwise(rates):
        for group, (one, two) in enumerate(zip(before, after, strict=False)):
            if one != two and max(one, two) >= UNLIKE * min(one, two):
                return f"the learning rate of group {group} went from {one:g} to {two:g} in iteration {iteration}."
    last = rates[-1][1] if rates else []
    if len(set(last)) > 1 and max(last) >= UNLIKE * min(last):
        return f"the groups of parameters have learning rates {', '.join(f'{rate:g}' for rate in last)}."
    return ""


def _rates(groups: object) -> list[float]:
    found = [group.get("lr") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [float(rate) for rate in found if isinstance(rate, (int, float))]
