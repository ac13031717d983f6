"""The rules of ``triggers``, one frozen class a kind. What they mean is implemented elsewhere; here are their numbers.

Design words: a rule fires when its row goes from clean to faulty; ``window`` and ``min_samples`` count samples, one an
iteration in which the tensor was recorded.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from flightrec.config.expert_rule import ExpertRule
from flightrec.config.fields import StrictFloat, StrictInt, TensorNames, refuse
from flightrec.config.quantizer_rules import (
    InconsistentScaleRule,
    QuantizationErrorRule,
    SaturationRule,
    StaleScaleRule,
    UnderflowRule,
)
from flightrec.config.rulebase import (
    DeviceRule,
    JumpRule,
    RuleBase,
    WindowRule,
    kind_field,
    name_field,
    severity_field,
)
from flightrec.config.training_rules import (
    LossDriftRule,
    LossScaleCollapseRule,
    MetricJumpRule,
    MetricThresholdRule,
    MissingRecordRule,
    UnchangedParametersRule,
    ZeroGradientRule,
)
from flightrec.records import TENSORS, Severity

LATER_KINDS = ("hang",)
"""Kinds that are named in the documentation of later versions and refused by this one."""


def _infinity(value: Any) -> Any:
    if value in ("inf", "+inf", float("inf")):
        return "+inf"
    return "-inf" if value == float("-inf") else value


Infinity = Annotated[Literal["-inf", "+inf"], BeforeValidator(_infinity), WithJsonSchema({"enum": ["-inf", "+inf"]})]


class NonfiniteRule(DeviceRule):
    """NaN or infinity in the logical region of a tensor or in its codes."""

    kind: Literal["nonfinite"] = kind_field("nonfinite", "Fires on NaN or infinity.")
    name: str = name_field("nonfinite")
    severity: Severity = severity_field(Severity.FAULT)
    tensors: TensorNames = Field(default=TENSORS, description="Tensors that the rule looks at. Default: all.")
    min_samples: StrictInt = Field(
        default=0, ge=0, description="Samples of a row before the rule may fire on it; 0: from the first one."
    )
    allow: tuple[Infinity, ...] = Field(
        default=(),
        description="Infinities that are legal in these layers, such as `-inf` in attention masks. NaN never is.",
    )


class LossJumpRule(JumpRule):
    """The loss leaves its recent range."""

    kind: Literal["loss_jump"] = kind_field("loss_jump", "Fires when the loss jumps against its own history.")
    name: str = name_field("loss_jump")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("loss",), description="Always the loss.")

    @model_validator(mode="after")
    def _only_the_loss(self) -> LossJumpRule:
        if self.tensors != ("loss",):
            refuse(f"expected [loss], got [{', '.join(self.tensors)}]: the rule looks at the loss only", "tensors")
        return self


class AmaxSpikeRule(WindowRule):
    """The largest magnitude of a tensor is far above its recent maximum."""

    kind: Literal["amax_spike"] = kind_field(
        "amax_spike", "Fires when a tensor's largest magnitude jumps against its own history."
    )
    name: str = name_field("amax_spike")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("activation", "gradient"), description="Tensors that the rule looks at.")
    min_samples: StrictInt = Field(
        default=64, ge=1, description="Non-empty, non-zero samples in the window before the rule may fire."
    )
    factor: StrictFloat = Field(default=4.0, gt=1, description="Fires above this multiple of the window's maximum.")
    min_numel: StrictInt = Field(default=1024, ge=1, description="Smaller tensors are not looked at (elements).")
    confirm: StrictInt = Field(
        default=2,
        ge=1,
        le=64,
        description="Tensors, or iterations of one tensor, that must spike; until then a spike is only a `watch`.",
    )


class _HostRule(RuleBase):
    is_host: ClassVar[bool] = True

    @model_validator(mode="after")
    def _writes_something(self) -> _HostRule:
        if self.severity is Severity.WATCH:
            refuse("expected warning or fault, got watch: a host rule only writes incidents", "severity")
        return self


class ExceptionRule(_HostRule):
    """The training loop raised: what the ring holds is written before the exception goes on."""

    kind: Literal["exception"] = kind_field("exception", "Fires when the training loop raises.")
    name: str = name_field("exception")
    severity: Severity = severity_field(Severity.FAULT)


class ManualRule(_HostRule):
    """``recorder.trigger("why")`` was called. Always there, listed or not; who asks gets an incident: no cooldown."""

    kind: Literal["manual"] = kind_field("manual", "Fires when `recorder.trigger(...)` is called.")
    cooldown_iterations: StrictInt | None = Field(
        default=0, ge=0, alias="cooldown", description="Iterations after an incident in which triggers write no other."
    )
    name: str = name_field("manual")
    severity: Severity = severity_field(Severity.FAULT)


AnyRule = Union[  # noqa: UP007
    NonfiniteRule,
    LossJumpRule,
    AmaxSpikeRule,
    UnderflowRule,
    QuantizationErrorRule,
    SaturationRule,
    InconsistentScaleRule,
    StaleScaleRule,
    LossDriftRule,
    MetricJumpRule,
    MetricThresholdRule,
    ZeroGradientRule,
    MissingRecordRule,
    UnchangedParametersRule,
    LossScaleCollapseRule,
    ExpertRule,
    ExceptionRule,
    ManualRule,
]
"""Any rule of this version."""

Rule = Annotated[AnyRule, Field(discriminator="kind")]
"""Field type: a rule, chosen by its ``kind``."""

RULE_CLASSES: dict[str, type[RuleBase]] = {
    "nonfinite": NonfiniteRule,
    "loss_jump": LossJumpRule,
    "amax_spike": AmaxSpikeRule,
    "underflow": UnderflowRule,
    "quantization_error": QuantizationErrorRule,
    "saturation": SaturationRule,
    "inconsistent_scale": InconsistentScaleRule,
    "stale_scale": StaleScaleRule,
    "loss_drift": LossDriftRule,
    "metric_jump": MetricJumpRule,
    "metric_threshold": MetricThresholdRule,
    "zero_gradient": ZeroGradientRule,
    "missing_record": MissingRecordRule,
    "unchanged_parameters": UnchangedParametersRule,
    "loss_scale_collapse": LossScaleCollapseRule,
    "expert": ExpertRule,
    "exception": ExceptionRule,
    "manual": ManualRule,
}
"""Rule class of each kind."""


def default_rules() -> tuple[AnyRule, ...]:
    """The rules of a configuration that lists none."""
    return (
        NonfiniteRule(),
        LossJumpRule(),
        AmaxSpikeRule(),
        UnderflowRule(),
        QuantizationErrorRule(),
        SaturationRule(),
        InconsistentScaleRule(),
        StaleScaleRule(),
        LossDriftRule(),
        ZeroGradientRule(),
        MissingRecordRule(),
        LossScaleCollapseRule(),
        ExceptionRule(),
        ManualRule(),
    )
