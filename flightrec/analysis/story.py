"""A verdict in one paragraph of plain English. Pure functions, no state."""

from __future__ import annotations

import re

from flightrec.analysis.blame import Finding
from flightrec.analysis.verdict import LIKELY, WEAK, Place, Verdict, name_of
from flightrec.records import NO_MICROBATCH, Firing

_HOW_SURE = {LIKELY: "Most likely ", WEAK: "Perhaps "}


def tell(verdict: Verdict, origin: Finding | None) -> str:
    """Tell a verdict.

    Args:
        verdict: all of it but the story.
        origin: the finding that it rests on; None if nothing is at fault.
    """
    return " ".join(filter(None, [*_began(verdict, origin), _why(verdict), *_more(verdict), _noticed(verdict.noticed)]))


def _began(verdict: Verdict, origin: Finding | None) -> list[str]:
    place = verdict.began.before
    if origin is None or place is None or place.key is None:
        return [_sentence(verdict.evidence[0])] if verdict.evidence else []
    # A rule's message ends with the iteration, which the sentence begins with.
    evidence = re.sub(rf", iteration {place.iteration}\b", "", origin.evidence)
    told = [f"In {_when(place)}, {_sentence(evidence)}"]
    after, between = verdict.began.after, verdict.began.between
    by = f"; between them, not recorded: {', '.join(between)}" if between else ""
    if after == place:
        told.append(f"Its high-precision side is clean, so it arose in the {between[0]}.")
    elif after is not None:
        when = "" if after.iteration == place.iteration else f" of iteration {after.iteration}"
        told.append(f"The last clean record before it is {after.name} ({after.key.stage.value}){when}{by}."
                    if after.key else "")  # fmt: skip
    return told


def _why(verdict: Verdict) -> str:
    sure = _HOW_SURE.get(verdict.confidence, "")
    cause = verdict.cause
    return _sentence(f"{sure}{cause}" if sure else f"The cause: {cause}")


def _more(verdict: Verdict) -> list[str]:
    told = []
    if verdict.elements is not None and verdict.elements.numel > 1:
        told.append(f"At fault: {verdict.elements.where}.")
    if verdict.precursors:
        told.append(f"Before it, {_sentence(verdict.precursors[0].sentence)}")
    return told + [_capital(sentence) for sentence in verdict.missing]


def _noticed(firing: Firing) -> str:
    where = f" at {name_of(firing.key)}" if firing.key else ""
    return f"It was noticed in iteration {firing.iteration} by the rule {firing.rule}{where}."


def _when(place: Place) -> str:
    words = [f"iteration {place.iteration}"]
    if place.key is not None and place.key.microbatch != NO_MICROBATCH:
        words.append(f"microbatch {place.key.microbatch}")
    if place.rank:
        words.append(f"rank {place.rank}")
    if place.attempt:
        words.append(f"attempt {place.attempt}")
    return ", ".join(words)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
