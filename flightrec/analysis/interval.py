"""Where a fault began: between the last clean record and the first faulty one. Reads tables only; no state."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from flightrec.analysis.blame import Finding
from flightrec.analysis.verdict import Interval, Place, name_of
from flightrec.records import NO_MICROBATCH, Key, Phase, Stage
from flightrec.storage import files
from flightrec.storage.rank import Rank

_STAGES = {stage.value.encode(): stage.order for stage in Stage}
_PHASES = [phase.value.encode() for phase in (Phase.TRAIN, Phase.RECOMPUTE)]

_ONLY = {
    Stage.START: ("whatever wrote the parameters before the iteration (initialisation, checkpoint, other code)",),
    Stage.LOSS: ("softmax of the logits", "loss"),
    Stage.REDUCED: ("communication of the gradients",),
    Stage.UNSCALED: ("unscaling of the gradients",),
    Stage.CLIPPED: ("clipping of the gradients",),
    Stage.AFTER_STEP: ("optimizer update",),
}
"""What lies before a stage of its own."""

_SIDE_OF_RULE = {
    "underflow": "quantized",
    "quantization_error": "quantized",
    "saturation": "quantized",
    "stale_scale": "scale",
    "inconsistent_scale": "scale",
}

_STATE = ("weight", "parameter")

_ATTENTION_IN = re.compile(r"(qkv|[qkv]_proj|query|key|value|c_attn)\w*$")
_ATTENTION_OUT = re.compile(r"(proj|o_proj|out_proj|c_proj|dense|to_out)(\.\d+)?$")
_MLP_IN = re.compile(r"(fc1|up_proj|gate_proj|gate_up_proj|c_fc|w1|w3|dense_h_to_4h)$")
_MLP_OUT = re.compile(r"(fc2|down_proj|c_proj|w2|dense_4h_to_h)$")
_ROUTER = re.compile(r"router|experts?\b|moe", re.IGNORECASE)
_NORM = re.compile(r"norm|\bln", re.IGNORECASE)


def find_interval(rank: Rank, origin: Finding, faulty: Collection[int]) -> Interval:
    """Find the last clean record before a finding.

    Args:
        rank: on which it was found.
        origin: the finding.
        faulty: rows of the rank's ``/records`` that are findings themselves.

    Returns:
        The interval; without ``after`` if the window holds nothing before it.

    Raises:
        IncidentError: a table is damaged.
    """
    before = Place(rank.rank, origin.attempt, origin.iteration, origin.key, origin.sequence, origin.record)
    if origin.key is None or origin.record < 0:
        return Interval(None, before)
    side = side_of(origin)
    if side in ("quantized", "scale") and not np.isnan(rank.records[origin.record]["numel"]):
        return Interval(before, before, operations(origin.key, origin.key, side))
    with files.reading(rank.facts_path, "/records"):
        row = _state_before(rank, origin, faulty)
        row = _last_clean(rank, origin.record, faulty) if row is None else row
    if row is None:
        return Interval(None, before, operations(None, origin.key, side))
    after = place_of(rank, row)
    return Interval(after, before, operations(after.key, origin.key, side))


def side_of(finding: Finding) -> str:
    """The side that a finding is about, of rules about quantization too; see ``Finding.side``."""
    return finding.side or _SIDE_OF_RULE.get(finding.kind, "")


def place_of(rank: Rank, row: int) -> Place:
    """The place of a row of a rank's ``/records``."""
    record = rank.records[row]
    return Place(
        rank.rank, int(record["attempt"]), int(record["iteration"]), rank.key(record), int(record["sequence"]), row
    )


def _last_clean(rank: Rank, record: int, faulty: Collection[int]) -> int | None:
    """Row of the last clean record of the same microbatch, else of the newest iteration before."""
    table = rank.records
    one = table[record]
    clean = np.isin(table["phase"], [*_PHASES, one["phase"]]) & (table["attempt"] == one["attempt"])
    clean[list(faulty)] = False
    if one["stage"] == Stage.LOSS.value.encode():  # another form of the same number is no operand
        clean &= table["stage"] != one["stage"]
    here = np.flatnonzero(clean & (table["iteration"] == one["iteration"]))
    microbatch = table["microbatch"][here]
    if one["microbatch"] != NO_MICROBATCH:
        here = here[(microbatch == one["microbatch"]) | (microbatch == NO_MICROBATCH)]
    order = _order(rank, np.append(here, record))
    place = int(np.flatnonzero(order == len(here))[0])
    if place:
        return int(here[order[place - 1]])
    earlier = np.flatnonzero(clean & (table["iteration"] < one["iteration"]))
    earlier = earlier[table["iteration"][earlier] == table["iteration"][earlier].max(initial=-1)]
    return int(earlier[_order(rank, earlier)[-1]]) if len(earlier) else None


def _state_before(rank: Rank, origin: Finding, faulty: Collection[int]) -> int | None:
    """Row of the same weight or parameter in the newest iteration before, if it is clean there; of others None.

    A state is made of nothing in its own iteration: what was recorded before it there tells nothing.
    """
    key, table = origin.key, rank.records
    assert key is not None
    if key.tensor not in _STATE or key.stage is Stage.AFTER_STEP:
        return None
    one = table[origin.record]
    same = (table["attempt"] == one["attempt"]) & (table["iteration"] < one["iteration"])
    for column in ("layer", "tensor", "part", "phase"):
        same &= table[column] == one[column]
    rows = np.flatnonzero(same)
    rows = rows[table["iteration"][rows] == table["iteration"][rows].max(initial=-1)]
    if not len(rows):
        return None
    last = int(rows[_order(rank, rows)[-1]])
    return None if last in faulty else last


def _order(rank: Rank, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Indices that sort rows of one iteration in blame order: ``Key.blame_order``, for many at once."""
    table = rank.records[rows]
    words, inverse = np.unique(table["stage"], return_inverse=True)
    stages = np.array([_STAGES[word] for word in words.tolist()], np.int64)[inverse.reshape(-1)]
    last = (
        rank.num_microbatches.get((int(table["attempt"][0]), int(table["iteration"][0])), 1 << 30) if len(rows) else 0
    )
    whole = np.select([stages == Stage.LOSS.order, stages == Stage.START.order], [last - 1, -1], last)
    microbatch = np.where(table["microbatch"] == NO_MICROBATCH, whole, table["microbatch"])
    return np.lexsort((table["sequence"], stages, microbatch))


def operations(after: Key | None, before: Key, side: str = "") -> tuple[str, ...]:
    """Name what lies between two records and is not recorded itself, from stages, kinds of tensors and layer names.

    Args:
        after: the last clean record, None if none is known.
        before: the first faulty one.
        side: of the finding, as in ``Finding``.
    """
    if side == "quantized":
        return (f"quantization of {name_of(before)}",)
    if side == "scale":
        return (f"computation of the scale of {name_of(before)}",)
    if before.stage in _ONLY:
        return _ONLY[before.stage]
    if before.tensor == "weight":
        return ("whatever wrote the weight since it was clean (optimizer update, checkpoint, other code)",)
    if after is None or after.stage not in (Stage.FORWARD, Stage.BACKWARD, Stage.LOSS):
        if before.tensor in ("input", "activation") and before.stage is Stage.FORWARD:
            return ("the data, or what comes before the first recorded layer",)
        return (f"the operation of {before.layer or 'the model'}, or what is before it",)
    if before.stage is Stage.BACKWARD:
        return _backward(after, before)
    if after.layer == before.layer and before.tensor == "output":
        return (f"the operation of {before.layer or 'the model'}",)
    found = _named(after.layer, before.layer)
    if before.tensor == "output":
        found = (*found, f"the operation of {before.layer or 'the model'}")
    return found or (_unnamed(after.layer, before.layer),)


def _backward(after: Key, before: Key) -> tuple[str, ...]:
    if after.stage is Stage.LOSS:
        return ("backward of the loss", f"backward of what follows {before.layer or 'the model'}")
    if after.layer == before.layer:
        return (f"backward of the operation of {before.layer or 'the model'}",)
    found = tuple(f"backward of {name}" for name in _named(before.layer, after.layer))
    if before.tensor in ("dgrad", "wgrad"):
        return (*found, f"backward of the operation of {before.layer or 'the model'}")
    return found or (f"backward of {_unnamed(before.layer, after.layer)}",)


def _named(first: str, second: str) -> tuple[str, ...]:
    """What the names of two layers tell of what lies between them."""
    found = []
    if _ATTENTION_IN.search(first) and _ATTENTION_OUT.search(second):
        found.append("softmax of the attention")
    if _MLP_IN.search(first) and _MLP_OUT.search(second):
        found.append("activation function")
    if _ROUTER.search(second) and not _ROUTER.search(first):
        found.append("router")
    if _NORM.search(second):
        found.append("norm")
    return tuple(found)


def _unnamed(first: str, second: str) -> str:
    first, second = first or "the model", second or "the model"
    between = f"whatever is between {first} and {second}" if first != second else f"whatever is outside of {first}"
    return f"{between} (such as an activation function, norm, softmax, router or residual addition)"
