"""What all configuration models share: the base class and the field types. No state."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from flightrec.config.patterns import as_tuple
from flightrec.records import TENSORS, Phase, Stage


class ConfigModel(BaseModel):
    """Frozen, without unknown keys, without NaN or infinity, every field documented."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        populate_by_name=True,
        validate_default=False,
        use_attribute_docstrings=False,
    )


def refuse(message: str, key: str) -> NoReturn:
    """Refuse a combination of values from inside a model's validator; ``key`` is the key to point at."""
    raise PydanticCustomError("combination", "{message}", {"message": message, "key": key})


def _tensor_name(name: str) -> str:
    if name not in TENSORS:
        raise PydanticCustomError(
            "unknown_word", "{expected}", {"expected": " or ".join(map(repr, TENSORS)), "words": list(TENSORS)}
        )
    return name


def _all_or_tuple(value: Any) -> Any:
    return TENSORS if value in ("*", ["*"], ("*",)) else as_tuple(value)


def _unique_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise ValueError(f"expected at least one of {', '.join(TENSORS)}")
    return tuple(dict.fromkeys(names))


def _selectable_phase(phase: Phase) -> Phase:
    if phase is Phase.WARMUP:
        words = [Phase.TRAIN.value, Phase.RECOMPUTE.value, Phase.EVAL.value]
        raise PydanticCustomError("unknown_word", "{expected}", {"expected": ", ".join(words), "words": words})
    return phase


def _unique_phases(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    if not phases:
        raise ValueError("expected at least one of train, recompute, eval")
    return tuple(dict.fromkeys(phases))


def _unique_stages(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    if not stages:
        raise ValueError(f"expected at least one of {', '.join(_STAGES)}")
    return tuple(dict.fromkeys(stages))


_STAGES = [stage.value for stage in Stage]
_STAGE_SCHEMA = {"type": "string", "enum": _STAGES}
_NAME_SCHEMA = {"type": "string", "enum": list(TENSORS)}
_PHASE_SCHEMA = {"type": "string", "enum": ["train", "recompute", "eval"]}

TensorNames = Annotated[
    tuple[Annotated[str, AfterValidator(_tensor_name)], ...],
    BeforeValidator(_all_or_tuple),
    AfterValidator(_unique_names),
    WithJsonSchema({"anyOf": [{"const": "*"}, _NAME_SCHEMA, {"type": "array", "items": _NAME_SCHEMA, "minItems": 1}]}),
]
"""Field type: names out of ``records.TENSORS``, one or several, ``*`` for all."""

Phases = Annotated[
    tuple[Annotated[Phase, AfterValidator(_selectable_phase)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(_unique_phases),
    WithJsonSchema({"anyOf": [_PHASE_SCHEMA, {"type": "array", "items": _PHASE_SCHEMA, "minItems": 1}]}),
]
"""Field type: phases, one or several, without ``warmup``, which is never recorded for its own sake."""

Stages = Annotated[
    tuple[Stage, ...],
    BeforeValidator(as_tuple),
    AfterValidator(_unique_stages),
    WithJsonSchema({"anyOf": [_STAGE_SCHEMA, {"type": "array", "items": _STAGE_SCHEMA, "minItems": 1}]}),
]
"""Field type: stages, one or several."""

StrictInt = Annotated[int, Field(strict=True)]
"""Field type: an integer; neither text, nor a boolean, nor a float."""

StrictFloat = Annotated[float, Field(strict=True)]
"""Field type: a finite number; neither text nor a boolean."""
