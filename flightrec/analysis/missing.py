"""What the window of an incident does not hold of a fault, and the YAML lines that would have shown it. No state."""

from __future__ import annotations

from flightrec.analysis.blame import Finding
from flightrec.analysis.changes import Change
from flightrec.analysis.verdict import Interval, name_of
from flightrec.errors import ConfigError
from flightrec.records import Stage
from flightrec.storage.rank import Rank

_STATE = ("weight", "parameter")
"""Tensors that carry a fault from one iteration to the next."""

MORE = 4
"""How many times the ring's iterations are advised when the fault is older."""

MOST = 1024
"""Most iterations that a ring may have."""

_WATCH = "triggers:\n  - kind: nonfinite\n  - kind: exception\n"
_SELECT = (
    "budget: none\nselect:\n"
    '  - layers: "*"\n    tensors: "*"\n    phases: [train, recompute]\n'
    "    stages: [start, forward, loss, backward, reduced, unscaled, clipped, after_step]\n"
)


def find_missing(rank: Rank, origin: Finding | None, interval: Interval) -> tuple[tuple[str, ...], str]:
    """Tell what the window lacks.

    Args:
        rank: of the origin.
        origin: the first finding about numbers; None if there is none.
        interval: where it began.

    Returns:
        Sentences, and the YAML lines that would have shown the origin; both empty if the window holds it.

    Raises:
        IncidentError: a table is damaged.
    """
    if origin is None:
        return (), ""
    if origin.key is None or origin.record < 0:
        where = f"{name_of(origin.key)} in iteration {origin.iteration}"
        return (f"what the rule fired on ({where}) is not among the records: it was not selected.",), _SELECT + _WATCH
    window = [entry for entry in rank.iterations if entry.num_records]
    oldest = bool(window) and (origin.attempt, origin.iteration) == (window[0].attempt, window[0].iteration)
    if oldest and window[0].tick > 0 and _is_state(origin):
        words = (
            f"{name_of(origin.key)} is at fault already in the oldest iteration of the window ({origin.iteration}): "
            "the fault is older than the ring."
        )
        return (words,), _ring(rank) + _SELECT + _WATCH
    if interval.after is None:
        words = f"no record before {name_of(origin.key)} is in the window: what it was made of was not selected"
        if oldest and window[0].tick > 0:
            return (words + ", or the fault is older than the ring.",), _ring(rank) + _SELECT + _WATCH
        return (words + ".",), _SELECT + _WATCH
    if origin.key.stage is Stage.LOSS and not _has_layers(rank, origin):
        words = "no layer is recorded in this iteration: whether the logits were finite was not selected."
        return (words,), _SELECT + _WATCH
    return (), ""


def older_than_window(rank: Rank, first: Change) -> tuple[tuple[str, ...], str]:
    """As ``find_missing``, of a change that the history tells and the recorded iterations begin after."""
    oldest = min((entry.iteration for entry in rank.iterations if entry.num_records), default=first.iteration)
    if first.iteration >= oldest:
        return (), ""
    words = f"it began in iteration {first.iteration}, before the oldest recorded one ({oldest})."
    return (words,), _ring(rank, beyond=oldest - first.iteration)


def _is_state(origin: Finding) -> bool:
    assert origin.key is not None
    return origin.key.tensor in _STATE and origin.key.stage is not Stage.AFTER_STEP


def _has_layers(rank: Rank, origin: Finding) -> bool:
    table = rank.records
    here = table[(table["attempt"] == origin.attempt) & (table["iteration"] == origin.iteration)]
    return bool(((here["stage"] == b"forward") & (here["phase"] == b"train")).any())


def _ring(rank: Rank, *, beyond: int = 0) -> str:
    """Lines that keep more iterations than there were, at least so many more, as far as a ring goes."""
    from flightrec.config.load import load_text  # takes longer to import than all the rest, and is seldom needed

    try:
        iterations = load_text(rank.config_text).ring.iterations
    except ConfigError:  # of another version, say
        iterations = max(1, len(rank.iterations))
    return f"ring:\n  iterations: {min(MOST, max(MORE * iterations, iterations + beyond + 1))}\n"
