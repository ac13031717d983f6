"""``select``: which tensors are recorded, what is kept of them, and the lookup that hooks use.

The cache of a ``Matcher`` is the only state; threads may share a matcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from flightrec.config.fields import ConfigModel, Phases, Stages, StrictInt, TensorNames, refuse
from flightrec.config.patterns import LayerPatterns, as_tuple, layer_predicate
from flightrec.records import TENSORS, Phase, Stage

ALWAYS_RECORDED = frozenset({"loss", "metric"})
"""Tensors that are recorded in every iteration, whatever ``select`` says: rules and reports need them."""

DEFAULT_TENSORS = ("input", "activation", "weight", "gradient", "output", "dgrad", "wgrad")
"""Tensors of a selection that names none: everything that a matrix product reads and writes."""

DEFAULT_STAGES = tuple(s for s in Stage if s not in (Stage.REDUCED, Stage.UNSCALED, Stage.CLIPPED))
"""Stages of a selection that names none: all but those that cost one more copy of all gradients each."""

_OPERAND = (Stage.FORWARD, Stage.BACKWARD)  # torchao quantizes some operands afresh for the backward
STAGES_OF: dict[str, tuple[Stage, ...]] = {
    "activation": _OPERAND,
    "weight": _OPERAND,
    "input": (Stage.FORWARD,),
    "output": (Stage.FORWARD,),
    "gradient": (Stage.BACKWARD,),
    "dgrad": (Stage.BACKWARD,),
    "wgrad": (Stage.BACKWARD, Stage.REDUCED, Stage.UNSCALED, Stage.CLIPPED),
    "parameter": (Stage.START, Stage.AFTER_STEP),
    "loss": (Stage.LOSS,),
    "metric": (Stage.START, Stage.AFTER_STEP),
}
"""Where in an iteration each tensor can be seen."""

Keep = Literal["high_precision", "quantized", "statistics"]
"""What may be kept of a tensor."""


def _something(value: frozenset[Keep]) -> frozenset[Keep]:
    if not value:
        raise ValueError("expected at least one of high_precision, quantized, statistics")
    return value


_KEEP_SCHEMA: dict[str, Any] = {"type": "string", "enum": ["high_precision", "quantized", "statistics"]}

KeepSet = Annotated[
    frozenset[Keep],
    BeforeValidator(as_tuple),
    AfterValidator(_something),
    PlainSerializer(sorted, return_type=list[str]),
    WithJsonSchema({"anyOf": [_KEEP_SCHEMA, {"type": "array", "items": _KEEP_SCHEMA, "minItems": 1}]}),
]
"""Field type: one or several of ``Keep``."""


class Selection(ConfigModel):
    """One entry of ``select``: which tensors are recorded, and what is kept of them."""

    layers: LayerPatterns = Field(
        default=("*",), description="Layers: a glob, `re:` and a regular expression, or a list of them."
    )
    tensors: TensorNames = Field(
        default=DEFAULT_TENSORS, description="Tensors of these layers; `*` is all that there are."
    )
    keep: KeepSet = Field(
        default=frozenset({"high_precision", "quantized"}),
        description="Bytes to keep: the high-precision tensor, its quantized form, or `statistics` alone. Statistics "
        "are always kept.",
        json_schema_extra={"default": ["high_precision", "quantized"]},  # a set has no order of its own
    )
    every: StrictInt = Field(default=1, ge=1, description="Record in every n-th iteration only.")
    phases: Phases = Field(
        default=(Phase.TRAIN,), description="Phases to record: `train`, `recompute` (activation checkpointing), `eval`."
    )

    stages: Stages = Field(
        default=DEFAULT_STAGES,
        description="Where in the iteration to record: `start`, `forward`, `loss`, `backward`, `reduced`, `unscaled`, "
        "`clipped`, `after_step`. `reduced`, `unscaled` and `clipped` are of `wgrad` alone and have to be asked for.",
    )

    @model_validator(mode="after")
    def _stages_that_tensors_have(self) -> Selection:
        """Refuse a stage asked for that shows none of the tensors, and a named tensor that none of the stages shows."""
        if "stages" not in self.model_fields_set:
            return self
        for stage in self.stages:
            if stage not in DEFAULT_STAGES and "wgrad" not in self.tensors:
                refuse(f"the stage {stage.value} shows wgrad, but tensors has only {', '.join(self.tensors)}", "stages")
        named = "tensors" in self.model_fields_set and set(self.tensors) != set(TENSORS)
        for tensor in self.tensors if named else ():
            if tensor not in ALWAYS_RECORDED and not self.records(tensor):
                seen = ", ".join(stage.value for stage in STAGES_OF[tensor])
                refuse(
                    f"{tensor} is seen at {seen}, but this entry records only at "
                    f"{', '.join(stage.value for stage in self.stages)}; add a stage, or leave {tensor} out",
                    "stages",
                )
        return self

    @model_validator(mode="after")
    def _loss_in_every_iteration(self) -> Selection:
        if self.every > 1 and set(self.tensors) <= ALWAYS_RECORDED:
            refuse(f"expected 1, got {self.every}: the loss and metrics are recorded in every iteration", "every")
        return self

    def records(self, tensor: str) -> bool:
        """Whether the entry names the tensor, and a stage at which it is seen."""
        return tensor in self.tensors and any(stage in self.stages for stage in STAGES_OF[tensor])

    def covers(self, other: Selection) -> bool:
        """Whether ``other`` can match nothing that this entry does not match (told for equal patterns and ``*``)."""
        layers_covered = "*" in self.layers or set(other.layers) <= set(self.layers)
        return layers_covered and set(other.tensors) <= set(self.tensors)


_LOSS_SELECTION = Selection(tensors=tuple(sorted(ALWAYS_RECORDED)))


class Matcher:
    """Looks up the selection of a tensor; remembers each answer."""

    def __init__(self, select: Sequence[Selection]) -> None:
        self._select = tuple(select)
        self._entries = [(layer_predicate(entry.layers), frozenset(entry.tensors), entry) for entry in select]
        self._cache: dict[tuple[str, str, str], Selection | None] = {}

    def selects(
        self, layer: str, tensor: str, phase: Phase | str = Phase.TRAIN, stage: Stage | None = None
    ) -> Selection | None:
        """The entry that decides about a tensor, or None when it is not recorded.

        Args:
            layer: qualified module name; ``""`` for what belongs to no layer, such as the loss.
            tensor: one of ``records.TENSORS``.
            phase: what the model was doing.
            stage: where in the iteration; None: at any stage.
        """
        key = (layer, tensor, phase)
        try:
            selection = self._cache[key]
        except KeyError:
            selection = self._cache[key] = self._decide(layer, tensor, phase)
        return selection if selection is None or stage is None or stage in selection.stages else None

    def __reduce__(self) -> tuple[type[Matcher], tuple[tuple[Selection, ...]]]:
        return Matcher, (self._select,)

    def _decide(self, layer: str, tensor: str, phase: Phase | str) -> Selection | None:
        always = tensor in ALWAYS_RECORDED
        for matches, tensors, entry in self._entries:
            if tensor in tensors and matches(layer):
                if phase in entry.phases and (always or entry.records(tensor)):
                    return entry.model_copy(update={"every": 1, "stages": tuple(Stage)}) if always else entry
                break
        return _LOSS_SELECTION if always and phase == Phase.TRAIN else None
