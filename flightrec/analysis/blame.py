"""What went wrong first: non-finite records and fired rules in blame order. Reads tables only, never payload.

Blame order is (attempt, iteration, microbatch, stage, sequence). Within a microbatch that is causal order. Two
microbatches, and two ranks before their gradients are reduced, depend on each other only through parameters and scale
state: their first findings of an iteration are a tie, and are reported as one. Pure functions, no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from flightrec.analysis.elements import Elements
from flightrec.errors import ConfigError
from flightrec.records import NO_MICROBATCH, Firing, Key, Phase, Severity, Stage
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident

NONFINITE = "nonfinite"

_LAST = 1 << 40
_JUDGED_PHASES = (Phase.TRAIN, Phase.RECOMPUTE)
_SHARED_TENSORS = {"weight", "parameter"}
_TIED_STAGES = (Stage.START, Stage.FORWARD, Stage.LOSS, Stage.BACKWARD)
_PRODUCT_COLUMNS = ["attempt", "iteration", "layer", "microbatch"]
_INFINITIES = {"+inf": "positive_inf_count", "-inf": "negative_inf_count"}
_HIGH_PRECISION_COUNTS = ("nan_count", "positive_inf_count", "negative_inf_count")
_QUANTIZED_COUNTS = ("quantized_nan_count", "quantized_inf_count")
_DESCRIBING = ("attempt", "iteration", "sequence", "numel", "amax", "quantized_numel")
_WORDS = {
    "nan_count": "NaN",
    "positive_inf_count": "+Inf",
    "negative_inf_count": "-Inf",
    "quantized_nan_count": "NaN",
    "quantized_inf_count": "Inf",
}


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong.

    Attributes:
        kind: ``nonfinite``, or the kind of the rule that fired.
        rule: name of the rule that fired here; empty for a non-finite record on which none fired.
        severity: of the firing, None without one.
        rank: whose.
        attempt: when.
        iteration: when.
        key: where; None for a rule about the run (``exception``, ``manual``).
        sequence: of the record in its iteration, -1 when there is none.
        record: row of the rank's ``/records``, -1 for none.
        side: ``high_precision``, ``quantized`` (the codes are non-finite, the tensor before is not), ``scale``, or
            empty for a rule that is not about non-finite values.
        evidence: one plain sentence with the numbers.
        numbers: the numbers of the sentence by name.
        position: 1 for what is blamed first; findings in a tie share their position.
        tied_with: (rank, microbatch) of the other findings in the tie.
        elements: which elements are at fault; None if nobody asked, or its bytes are not there.
    """

    kind: str
    rule: str
    severity: Severity | None
    rank: int
    attempt: int
    iteration: int
    key: Key | None
    sequence: int
    record: int
    side: str
    evidence: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    position: int = 0
    tied_with: tuple[tuple[int, int], ...] = ()
    elements: Elements | None = None


def blame(incident: Incident) -> list[Finding]:
    """Find what went wrong, first things first.

    Records of the phases ``train`` and ``recompute`` with NaN or Inf in the tensor, its codes or its scales are
    findings, unless the configuration allows their infinities; so is every firing, whatever its phase. A firing of
    ``nonfinite`` and the record that it fired on are one finding.

    Args:
        incident: an open incident.

    Returns:
        Findings in blame order, across ranks; empty when nothing fired and nothing is non-finite.

    Raises:
        IncidentError: a table is damaged.
    """
    allowed = _allowances(incident.config_text)
    found: list[tuple[tuple[int, ...], Finding]] = []
    for rank in incident.ranks:
        findings = _nonfinite(rank, allowed)
        _add_firings(rank, findings)
        read = _read_by_wgrad(rank, findings)
        found.extend((_order(rank, finding, read), finding) for finding in findings)
    found.sort(key=lambda entry: entry[0])
    return _with_positions([finding for _, finding in found])


def _order(rank: Rank, finding: Finding, read: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
    time = (finding.attempt, finding.iteration)
    severity = -finding.severity.order if finding.severity else 0
    if finding.key is None:
        return (*time, _LAST, _LAST, _LAST, rank.rank, severity)
    sequence = 2 * finding.sequence if finding.sequence >= 0 else _LAST
    if finding.key.tensor == "wgrad":  # right behind the gradient that it was made from
        sequence = max(sequence, 2 * read.get(_product(rank, finding.record), -1) + 1)
    num_microbatches = rank.num_microbatches.get(time, _LAST)
    return (*time, *finding.key.blame_order(sequence, num_microbatches), rank.rank, severity)


def _read_by_wgrad(rank: Rank, findings: Sequence[Finding]) -> dict[tuple[int, ...], int]:
    """``_product`` -> last sequence of the gradient that a ``wgrad`` was made from, where it is recorded.

    A bias's gradient is accumulated before a product's backward tells what it read, though it comes from the same.
    """
    if not any(finding.key is not None and finding.key.tensor == "wgrad" for finding in findings):
        return {}
    rows = rank.records[[*_PRODUCT_COLUMNS, "tensor", "sequence"]]
    read: dict[tuple[int, ...], int] = {}
    for *product, tensor, sequence in rows.tolist():
        if rank.names[tensor] == "gradient":
            read[tuple(product)] = max(sequence, read.get(tuple(product), -1))
    return read


def _product(rank: Rank, record: int) -> tuple[int, ...]:
    return () if record < 0 else tuple(rank.records[record][_PRODUCT_COLUMNS].tolist())


def _nonfinite(rank: Rank, allowed: Callable[[Key], set[str]]) -> list[Finding]:
    """Findings of records with non-finite values."""
    table = rank.records
    counts = {name: np.nan_to_num(table[name]) for name in (*_HIGH_PRECISION_COUNTS, *_QUANTIZED_COUNTS)}
    scales = np.nan_to_num(table["scale_nonfinite_count"])
    suspect = sum(counts.values(), start=scales) > 0
    suspect &= np.isin(table["phase"], [phase.value.encode() for phase in _JUDGED_PHASES])
    rows = np.flatnonzero(suspect)
    columns = {name: table[name][rows].tolist() for name in _DESCRIBING}
    found = {name: count[rows].astype(np.int64).tolist() for name, count in counts.items()}
    bad_scales = scales[rows].astype(np.int64).tolist()
    findings = []
    for position, (row, key) in enumerate(zip(rows.tolist(), rank.keys(rows), strict=True)):
        numbers = {name: count[position] for name, count in found.items() if count[position]}
        if numbers and not bad_scales[position] and set(numbers) <= allowed(key):
            continue
        if bad_scales[position]:
            numbers["scale_nonfinite_count"] = bad_scales[position]
        described = {name: column[position] for name, column in columns.items()}
        findings.append(_nonfinite_finding(rank, row, key, numbers, described))
    return findings


def _nonfinite_finding(
    rank: Rank, record: int, key: Key, counts: Mapping[str, int], described: Mapping[str, Any]
) -> Finding:
    if any(name in counts for name in _HIGH_PRECISION_COUNTS):
        side = "high_precision"
    else:
        side = "quantized" if any(name in counts for name in _QUANTIZED_COUNTS) else "scale"
    numbers: dict[str, float] = dict(counts)
    for name in ("numel", "amax", "quantized_numel"):
        value = described[name]
        if not math.isnan(value):
            numbers[name] = value if name == "amax" else int(value)
    return Finding(
        kind=NONFINITE,
        rule="",
        severity=None,
        rank=rank.rank,
        attempt=described["attempt"],
        iteration=described["iteration"],
        key=key,
        sequence=described["sequence"],
        record=record,
        side=side,
        evidence=_nonfinite_sentence(key, side, numbers),
        numbers=numbers,
    )


def _nonfinite_sentence(key: Key, side: str, numbers: Mapping[str, float]) -> str:
    name = f"{key.layer or 'the run'} {key.tensor}" + (f" ({key.part})" if key.part else "")
    amax = f"amax {numbers['amax']:.6g}" if "amax" in numbers else ""
    codes = _counted(numbers, _QUANTIZED_COUNTS, "quantized_numel")
    scales = numbers.get("scale_nonfinite_count", 0)
    parts = []
    if side == "high_precision":
        largest = f", {amax} over the finite ones" if amax else ", none of them finite"
        parts.append(f"{name} holds {_counted(numbers, _HIGH_PRECISION_COUNTS, 'numel')} values{largest}")
        if codes:
            parts.append(f"its codes hold {codes}")
    elif side == "quantized":
        finite = f"while the tensor before is finite{f' ({amax})' if amax else ''}" if "numel" in numbers else ""
        parts.append(" ".join(filter(None, [f"the quantized {name} holds {codes} codes", finite])))
    if scales:
        parts.append(f"{'its' if parts else name + ': its'} scales hold {scales} NaN or Inf")
    return "; ".join(parts) + "."


def _counted(numbers: Mapping[str, float], names: Sequence[str], total: str) -> str:
    """For example ``3 NaN and 1 +Inf of 512``; empty when there are none."""
    found = [f"{numbers[name]} {_WORDS[name]}" for name in names if numbers.get(name)]
    text = " and ".join(found)
    return f"{text} of {numbers[total]}" if found and total in numbers else text


def _add_firings(rank: Rank, findings: list[Finding]) -> None:
    """Add a rank's firings; one of ``nonfinite`` joins the record that it fired on."""
    positions = {finding.record: position for position, finding in enumerate(findings)}
    for firing in rank.firings:
        record = _record_of(rank, firing)
        position = positions.get(record) if firing.kind == NONFINITE and record >= 0 else None
        if position is not None:
            known = findings[position]
            if known.severity is None or firing.severity.order > known.severity.order:
                findings[position] = replace(known, rule=firing.rule, severity=firing.severity)
            continue
        sequence = firing.sequence
        if record >= 0:
            sequence = int(rank.records[record]["sequence"])
        findings.append(_firing_finding(rank, firing, record, sequence))


def _firing_finding(rank: Rank, firing: Firing, record: int, sequence: int) -> Finding:
    where = f" at {firing.key.layer} {firing.key.tensor}" if firing.key else ""
    numbers = {"value": firing.value, "threshold": firing.threshold}
    numbers = {name: value for name, value in numbers.items() if not np.isnan(value)}
    return Finding(
        kind=firing.kind,
        rule=firing.rule,
        severity=firing.severity,
        rank=rank.rank,
        attempt=firing.attempt,
        iteration=firing.iteration,
        key=firing.key,
        sequence=sequence,
        record=record,
        side="",
        evidence=firing.message or f"rule {firing.rule} fired{where}.",
        numbers=numbers,
    )


def _record_of(rank: Rank, firing: Firing) -> int:
    if firing.record >= 0 or firing.key is None:
        return firing.record if firing.record < len(rank.records) else -1
    table = rank.records
    rows = np.flatnonzero((table["attempt"] == firing.attempt) & (table["iteration"] == firing.iteration))
    return next((row for row, key in zip(rows.tolist(), rank.keys(rows), strict=True) if key == firing.key), -1)


def _with_positions(findings: Sequence[Finding]) -> list[Finding]:
    """Number the findings, and join those that no order can be told between."""
    placed: list[Finding] = []
    for _, group in groupby(findings, key=lambda finding: (finding.attempt, finding.iteration)):
        members = list(group)
        first = len(placed) + 1
        tie = _tie(members)
        chains = [_chain(members[index]) for index in sorted(tie)]
        for index, finding in enumerate(members):
            if index not in tie:
                placed.append(replace(finding, position=first + index))
                continue
            others = tuple(chain for chain in chains if chain != _chain(finding))
            placed.append(replace(finding, position=first, tied_with=others))
    return placed


def _tie(members: Sequence[Finding]) -> set[int]:
    """Indices of the findings of one iteration that are first on their rank and in their microbatch.

    Empty when there is one only. What a microbatch without number or a shared state has spoiled comes before the later
    microbatches of its rank.
    """
    heads: dict[tuple[int, int], int] = {}
    spoiled: set[int] = set()
    for index, finding in enumerate(members):
        key = finding.key
        if key is None or key.stage not in _TIED_STAGES or finding.rank in spoiled:
            continue
        chain = _chain(finding)
        if chain in heads:
            continue
        if key.microbatch == NO_MICROBATCH and key.stage is not Stage.START:
            continue
        heads[chain] = index
        if key.stage is Stage.START or key.tensor in _SHARED_TENSORS or finding.side == "scale":
            spoiled.add(finding.rank)
    return set(heads.values()) if len(heads) > 1 else set()


def _chain(finding: Finding) -> tuple[int, int]:
    return (finding.rank, finding.key.microbatch if finding.key else NO_MICROBATCH)


def _allowances(config_text: str) -> Callable[[Key], set[str]]:
    """Give the function that tells which infinity counts of a key the ``nonfinite`` rules allow.

    A configuration that this version does not understand allows nothing.
    """
    if "allow" not in config_text:  # the models of the YAML take longer to import than all the rest
        return lambda _: set()
    from flightrec.config.load import load_text
    from flightrec.config.rules import NonfiniteRule

    try:
        rules = [rule for rule in load_text(config_text).triggers if isinstance(rule, NonfiniteRule)]
    except ConfigError:
        rules = []

    def allowed(key: Key) -> set[str]:
        sets = [
            {_INFINITIES[word] for word in rule.allow} for rule in rules if rule.sees(key.layer, key.tensor, key.phase)
        ]
        return set.intersection(*sets) if sets else set()

    return allowed
