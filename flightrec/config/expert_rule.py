"""The rule about experts, and how an expert is told from its name. No state."""

from __future__ import annotations

import functools
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from flightrec.config.fields import Phases, StrictFloat, StrictInt, TensorNames, refuse
from flightrec.config.rulebase import MAX_WINDOW, WindowRule, kind_field, name_field, severity_field
from flightrec.records import Key, Phase, Severity

EXPERT_LAYERS = r"(?<![^.])(?:local_)?experts\.(\d+)(?![^.])"
"""Finds an expert's number in a layer's name: ``mlp.experts.3.w1``, ``experts.local_experts.3``."""

EXPERT_PART = "expert."
"""What the part of one expert of a grouped product begins with; its number follows."""

_PARTS = r"(?:^|\.)expert\.(\d+)$"


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def expert_of(key: Key, layers: str = EXPERT_LAYERS) -> tuple[Key, int] | None:
    """Which expert a key belongs to: the key with an asterisk for the number (its siblings' too), and the number.

    Args:
        key: of a tensor.
        layers: regular expression that finds the number of an expert that is a layer of its own.

    Returns:
        None for a tensor that is no expert's.
    """
    found = _compiled(_PARTS).search(key.part)
    if found is not None:
        start, end = found.span(1)
        part = key.part[:start] + "*" + key.part[end:]
        group = Key(key.layer, key.tensor, part, key.microbatch, key.phase, key.call, key.stage)
        return group, int(found[1])
    found = _compiled(layers).search(key.layer)
    if found is None:
        return None
    start, end = found.span(1)
    layer = key.layer[:start] + "*" + key.layer[end:]
    return Key(layer, key.tensor, key.part, key.microbatch, key.phase, key.call, key.stage), int(found[1])


def whole_expert(key: Key) -> tuple[str, str] | None:
    """Which expert a tensor is of, whatever its name within the expert: layer and part; None for no expert's."""
    if _compiled(_PARTS).search(key.part) is not None:
        return key.layer, key.part
    found = _compiled(EXPERT_LAYERS).search(key.layer)
    return None if found is None else (key.layer[: found.end(1)], "")


def _check_pattern(pattern: str) -> str:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"expected a regular expression, but it is invalid ({error})") from None
    if compiled.groups != 1:
        raise ValueError(f"expected one group, around the expert's number, got {compiled.groups}")
    return pattern


class ExpertRule(WindowRule):
    """One expert of several goes wrong where the tensor of all of them looks as ever, or the router collapses."""

    kind: Literal["expert"] = kind_field(
        "expert", "Fires when one expert's largest magnitude jumps, or the experts' token counts collapse."
    )
    name: str = name_field("expert")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("activation", "gradient"), description="Tensors that the rule looks at.")
    phases: Phases = Field(
        default=(Phase.TRAIN,), description="Phases that the rule looks at. Only `train` feeds its history."
    )
    experts: Annotated[str, AfterValidator(_check_pattern)] = Field(
        default=EXPERT_LAYERS,
        description="Regular expression that finds, anywhere in a layer's name, the number of an expert that is a "
        "layer of its own; its one group is the number. Layers that differ only there are siblings. Experts that were "
        "recorded with `splits` need none.",
    )
    min_samples: StrictInt = Field(
        default=64, ge=1, description="Samples in an expert's history before the rule may compare with it."
    )
    factor: StrictFloat = Field(
        default=4.0, gt=1, description="Fires above this multiple of the largest magnitude in the expert's window ..."
    )
    siblings: StrictFloat = Field(
        default=64.0,
        gt=1,
        description="... or above this multiple of the largest of its siblings in the same iteration, whatever the "
        "history, if two of them have one.",
    )
    min_numel: StrictInt = Field(
        default=1024, ge=1, description="Magnitudes of experts with fewer elements are not looked at."
    )
    confirm: StrictInt = Field(
        default=2,
        ge=1,
        le=64,
        description="Samples in a row of one expert that must be so; until then a spike is only a `watch`.",
    )
    minimum_share: StrictFloat = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Fires when an expert that had at least this multiple of a uniform share gets no token ...",
    )
    max_share: StrictFloat = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="... or when one expert gets more than this share of all tokens, and half as much again as "
        "before ...",
    )
    consecutive: StrictInt = Field(
        default=64, ge=1, le=MAX_WINDOW, description="... in so many iterations in a row that had tokens."
    )

    @model_validator(mode="after")
    def _judges_what_experts_have(self) -> ExpertRule:
        if {"loss", "metric"} & set(self.tensors):
            refuse("expected tensors of layers: losses and metrics are no expert's", "tensors")
        return self
