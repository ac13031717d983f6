"""Why it went wrong: the kind of a fault, from what was clean beside it. Reads tables only; no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flightrec.analysis.blame import NONFINITE, Finding
from flightrec.analysis.elements import Elements
from flightrec.analysis.quantizing import tell_quantizing, tiny_amax
from flightrec.analysis.verdict import CERTAIN, LIKELY, WEAK, Interval, name_of
from flightrec.records import NO_MICROBATCH, Firing, Stage
from flightrec.storage.rank import Rank

HOST_KINDS = ("exception", "hang", "manual")
"""Kinds of rules about the run, not about its numbers."""

QUANTIZER_KINDS = ("underflow", "quantization_error", "saturation", "stale_scale")
"""Rules whose finding the statistics of its record may explain better."""

_OPERANDS = ("activation", "weight", "input", "gradient")
_TOKENS = ("input", "activation", "output", "gradient", "dgrad")
_COUNTS = (
    "nan_count",
    "positive_inf_count",
    "negative_inf_count",
    "quantized_nan_count",
    "quantized_inf_count",
    "scale_nonfinite_count",
)
_BY_RULE = {
    "amax_spike": ("numbers", LIKELY, "the high-precision tensor itself grew far beyond what it used to be"),
    "expert": ("numbers", LIKELY, "the router's choice of experts left what it used to be"),
    "zero_gradient": ("numbers", LIKELY, "a gradient became zero and stayed so"),
    "underflow": ("quantization", LIKELY, "quantization turned non-zero values into zero"),
    "quantization_error": ("quantization", LIKELY, "what the codes stand for is far from the tensor they were made of"),
    "saturation": ("quantization", LIKELY, "values beyond the format's range were cut off in quantization"),
    "stale_scale": ("scale", CERTAIN, "the scale stood still while the tensor moved"),
    "inconsistent_scale": ("scale", CERTAIN, "the quantizer's scale, its inverse and its amax contradict each other"),
    "unchanged_parameters": ("optimizer", LIKELY, "the optimizer's update left the parameters as they were"),
    "loss_jump": ("loss", WEAK, "the loss left what it used to be, and no record before it did"),
    "loss_drift": ("loss", WEAK, "the loss climbed, and no record before it left what it used to be"),
    "loss_scale_collapse": ("numbers", WEAK, "gradients overflow at every loss scale that was tried"),
    "missing_record": ("unknown", WEAK, "a tensor is no longer recorded; its values are not known"),
}
"""Kind of rule -> kind, confidence and cause of what it found, where nothing is NaN or Inf."""


@dataclass(frozen=True)
class Cause:
    """Kind, confidence, one sentence, and the sentences that it rests on; see ``verdict.Verdict``."""

    kind: str
    confidence: str
    sentence: str
    evidence: tuple[str, ...] = ()


def find_cause(ranks: Sequence[Rank], origin: Finding, interval: Interval, elements: Elements | None) -> Cause:
    """Tell why a finding arose.

    Args:
        ranks: all ranks of the incident.
        origin: the first finding.
        interval: where it began.
        elements: which elements are at fault, if that was looked at.

    Raises:
        IncidentError: a table is damaged.
    """
    rank = next(rank for rank in ranks if rank.rank == origin.rank)
    if origin.kind in HOST_KINDS:
        return Cause("host", CERTAIN, _host(origin.kind), (origin.evidence,))
    if origin.kind != NONFINITE:
        return _of_rule(rank, origin)
    if origin.key is None or origin.record < 0:
        return Cause("unknown", WEAK, "the record that the rule fired on is not in the incident", (origin.evidence,))
    if elements is not None and _is_unwritten_tail(origin, elements):
        last = elements.shape[0] - 1
        words = f"only the rows {elements.valid_rows} to {last} are bad: padding or a tail that no kernel wrote"
        whole = elements.num_faulty * elements.shape[0] == elements.numel * (last + 1 - elements.valid_rows)
        return Cause("padding", LIKELY if whole else WEAK, words, (origin.evidence, elements.where))
    if origin.side in ("quantized", "scale"):
        return _of_quantization(rank, origin)
    return _of_stage(ranks, rank, origin, interval)


def _is_unwritten_tail(origin: Finding, elements: Elements) -> bool:
    """Whether rows at the end are bad and none before, in a tensor whose rows are samples or tokens."""
    is_tokens = origin.key is not None and origin.key.tensor in _TOKENS and len(elements.shape) > 1
    if not is_tokens or not elements.is_tail or origin.side != "high_precision":
        return False
    num_rows = elements.shape[0] - elements.valid_rows
    return num_rows > 1 or elements.num_faulty * elements.shape[0] == elements.numel  # a part of one row: no tail


def _host(kind: str) -> str:
    return {
        "exception": "the training loop raised an exception; no recorded number is at fault",
        "manual": "the incident was asked for; no recorded number is at fault",
    }.get(kind, "the training loop stood still; no recorded number is at fault")


def _of_rule(rank: Rank, origin: Finding) -> Cause:
    kind, confidence, sentence = _BY_RULE.get(
        origin.kind, ("unknown", WEAK, f"the rule {origin.rule or origin.kind} fired; it does not tell a cause")
    )
    cause = Cause(kind, confidence, sentence, (origin.evidence,))
    if origin.key is not None and origin.key.stage is Stage.AFTER_STEP and kind == "numbers":
        return replace(cause, kind="optimizer", sentence="the optimizer's update made the parameter grow")
    told = tell_quantizing(rank, origin) if origin.kind in QUANTIZER_KINDS and origin.record >= 0 else None
    if told is not None:
        sure = CERTAIN if told.is_certain or (confidence == CERTAIN and kind == "scale" and told.is_scale) else LIKELY
        return Cause(
            "scale" if told.is_scale else "quantization", sure, told.sentence, (origin.evidence, *told.evidence)
        )
    return cause


def _of_quantization(rank: Rank, origin: Finding) -> Cause:
    clean = "" if np.isnan(rank.records[origin.record]["numel"]) else ", while the tensor before is finite"
    confidence = CERTAIN if clean else LIKELY
    if origin.side == "scale" or origin.numbers.get("scale_nonfinite_count"):
        why = tuple(filter(None, [origin.evidence, tiny_amax(rank.records[origin.record])]))
        return Cause("scale", confidence, f"the scale of {name_of(origin.key)} is NaN or Inf{clean}", why)
    return Cause("quantization", confidence, f"the codes of {name_of(origin.key)} are bad{clean}", (origin.evidence,))


def _of_stage(ranks: Sequence[Rank], rank: Rank, origin: Finding, interval: Interval) -> Cause:
    assert origin.key is not None
    stage = origin.key.stage
    if stage is Stage.LOSS:
        return _of_loss(rank, origin)
    if stage is Stage.START or origin.key.tensor == "weight":
        return _of_start(rank, origin, interval)
    if stage is Stage.REDUCED:
        return _of_communication(ranks, origin)
    if stage in (Stage.UNSCALED, Stage.CLIPPED, Stage.AFTER_STEP):
        return _of_optimizer(rank, origin)
    return _of_numbers(rank, origin, interval)


def _of_numbers(rank: Rank, origin: Finding, interval: Interval) -> Cause:
    name, key = name_of(origin.key), origin.key
    assert key is not None
    rows = _at(rank, origin, key.layer)
    rows = rows[rank.records["sequence"][rows] < origin.sequence]
    operands = [
        other for other in rank.keys(rows) if other.tensor in _OPERANDS and _goes_with(other.microbatch, origin)
    ]
    if key.tensor in ("output", "dgrad", "wgrad") and operands:
        clean = f"{_listed([other.tensor for other in operands])} of {key.layer or 'the model'} are finite."
        evidence = tuple(filter(None, [origin.evidence, clean, _overflow(rank, origin)]))
        return Cause("numbers", CERTAIN, f"{name} came out bad of operands that are clean", evidence)
    if interval.after is None:
        return Cause("numbers", WEAK, f"{name} is bad, and no record before it is clean", (origin.evidence,))
    clean = f"{interval.after.name} was recorded before it and is finite."
    return Cause(
        "numbers", LIKELY, f"{name} is bad in high precision, before any quantization", (origin.evidence, clean)
    )


def _overflow(rank: Rank, origin: Finding) -> str:
    """A sentence if the tensor holds Inf and no NaN in a format that ends early, else empty."""
    dtype = rank.names[int(rank.records["dtype"][origin.record])]
    infinite = origin.numbers.get("positive_inf_count", 0) + origin.numbers.get("negative_inf_count", 0)
    if dtype != "float16" or not infinite or origin.numbers.get("nan_count"):
        return ""
    return "it is float16, which ends at 65504: what is beyond is Inf."


def _of_loss(rank: Rank, origin: Finding) -> Cause:
    here = _in_iteration(rank, origin)
    keys = rank.keys(here)
    outputs = [
        (key, row)
        for key, row in zip(keys, here.tolist(), strict=True)
        if key.tensor == "output" and _goes_with(key.microbatch, origin)
    ]
    evidence = [origin.evidence]
    time = (origin.attempt, origin.iteration)
    data = next((entry.data for entry in rank.iterations if (entry.attempt, entry.iteration) == time), {})
    labels = {name: by for name, by in data.items() if "label" in name.lower()}
    confidence = LIKELY
    if outputs:
        key, row = next(((k, r) for k, r in outputs if not k.layer), outputs[-1])
        evidence.append(f"the last recorded output before it, {name_of(key)}, is finite{_amax(rank, row)}.")
        confidence = CERTAIN
    else:
        evidence.append("the logits are not recorded.")
    if labels:
        told = "; ".join(f"{name}: {', '.join(f'{v:g}' for v in by.values())}" for name, by in labels.items())
        evidence.append(f"of the labels is recorded: {told}.")
    else:
        evidence.append("the labels are not recorded.")
    return Cause("loss", confidence, "the loss alone is bad: its labels, its reduction or its logits", tuple(evidence))


def _amax(rank: Rank, row: int) -> str:
    amax = float(rank.records["amax"][row])
    return "" if np.isnan(amax) else f" (amax {amax:.4g})"


def _of_start(rank: Rank, origin: Finding, interval: Interval) -> Cause:
    name, first = name_of(origin.key), rank.iterations[0] if rank.iterations else None
    if first is not None and (first.attempt, first.iteration, first.tick) == (origin.attempt, origin.iteration, 0):
        words = f"{name} was bad when recording began: initialisation or a checkpoint"
        return Cause("numbers", CERTAIN, words, (origin.evidence,))
    updated = _updated(rank, origin, interval)
    if updated:
        words = (
            f"the optimizer's update behind iteration {interval.after.iteration if interval.after else 0} made it bad"
        )
        return Cause("optimizer", LIKELY, words, (origin.evidence, updated))
    if interval.after is not None:
        words = f"{name} became bad between two iterations, outside of what is recorded"
        return Cause("numbers", WEAK, words, (origin.evidence, f"{interval.after.name} was still finite."))
    return Cause("unknown", WEAK, f"{name} was bad already when the window begins", (origin.evidence,))


def _updated(rank: Rank, origin: Finding, interval: Interval) -> str:
    """A sentence if a state was clean in an iteration before, its gradients too, and only the update lies between."""
    after = interval.after
    assert origin.key is not None
    if after is None or after.key is None or after.iteration >= origin.iteration:
        return ""
    if after.key.layer != origin.key.layer or after.key.stage is Stage.AFTER_STEP:
        return ""
    then = replace(origin, iteration=after.iteration)
    if not len(_gradients(rank, then, before=Stage.AFTER_STEP)):
        return ""
    return f"{after.name} and its gradients are finite in iteration {after.iteration}."


def _of_optimizer(rank: Rank, origin: Finding) -> Cause:
    assert origin.key is not None
    what = {Stage.UNSCALED: "unscaling", Stage.CLIPPED: "clipping"}.get(origin.key.stage, "the optimizer's update")
    gradients = _gradients(rank, origin, before=origin.key.stage)
    words = f"{what} made {name_of(origin.key)} bad"
    if len(gradients):
        clean = f"the gradient of {origin.key.layer or 'the model'} was finite before it."
        return Cause("optimizer", CERTAIN, words, (origin.evidence, clean))
    return Cause("optimizer", LIKELY, words, (origin.evidence, "its gradient is not recorded."))


def _of_communication(ranks: Sequence[Rank], origin: Finding) -> Cause:
    assert origin.key is not None
    seen = [rank.rank for rank in ranks if len(_gradients(rank, origin, before=Stage.REDUCED))]
    words = f"{name_of(origin.key)} became bad in communication"
    if len(seen) == len(ranks):
        clean = f"it was finite before on {'every rank' if len(ranks) > 1 else 'this rank'} that is here."
        return Cause("communication", CERTAIN if len(ranks) > 1 else LIKELY, words, (origin.evidence, clean))
    return Cause("communication", WEAK, words, (origin.evidence, "what it was before is not recorded on every rank."))


def _gradients(rank: Rank, origin: Finding, *, before: Stage) -> npt.NDArray[np.intp]:
    """Rows of the layer's ``wgrad`` in the origin's iteration, of stages before one; empty if one of them is bad."""
    assert origin.key is not None
    rows = _at(rank, origin, origin.key.layer)
    keys = rank.keys(rows)
    mine = np.array([key.tensor == "wgrad" and key.stage.order < before.order for key in keys], bool)
    found: npt.NDArray[np.intp] = rows[mine]
    table = rank.records
    bad = any(np.nan_to_num(table[name][found]).any() for name in _COUNTS)
    return found[:0] if bad else found


def _in_iteration(rank: Rank, origin: Finding | Firing) -> npt.NDArray[np.intp]:
    table = rank.records
    return np.flatnonzero((table["attempt"] == origin.attempt) & (table["iteration"] == origin.iteration))


def _at(rank: Rank, origin: Finding, layer: str) -> npt.NDArray[np.intp]:
    """Rows of a layer in the origin's iteration."""
    rows = _in_iteration(rank, origin)
    texts, inverse = np.unique(rank.records["layer"][rows], return_inverse=True)
    same = np.array([rank.names[text] == layer for text in texts.tolist()], bool)
    chosen: npt.NDArray[np.intp] = rows[same[inverse.reshape(-1)]] if len(rows) else rows
    return chosen


def _goes_with(microbatch: int, origin: Finding) -> bool:
    assert origin.key is not None
    return microbatch in (origin.key.microbatch, NO_MICROBATCH) or origin.key.microbatch == NO_MICROBATCH


def _listed(words: Sequence[str]) -> str:
    unique = list(dict.fromkeys(words))
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]]))
