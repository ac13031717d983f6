"""The rules of ``triggers``, one frozen class a kind. What they mean is implemented elsewhere; here are their numbers.

Design words: a rule fires when its row goes from clean to faulty; ``window`` and ``min_samples`` count samples, one an
iteration in which the tensor was recorded.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from flightrec.config.fields import ConfigModel, Phases, StrictFloat, StrictInt, TensorNames, refuse
from flightrec.config.patterns import LayerPatterns, layer_predicate
from flightrec.records import TENSORS, Phase, Severity

MAX_WINDOW = 4096
"""Longest history window, in samples: windows live on the device, one a row and rule."""

LATER_KINDS = (
    "loss_drift",
    "saturation",
    "quantization_error",
    "stale_scale",
    "inconsistent_scale",
    "zero_gradient",
    "missing_record",
    "unchanged_parameters",
    "loss_scale_collapse",
    "expert",
    "metric_jump",
    "metric_threshold",
    "hang",
)
"""Kinds that are named in the documentation of later versions and refused by this one."""

MAY_BE_QUANTIZED = ("activation", "weight", "gradient", "output", "wgrad", "dgrad", "input")


class RuleBase(ConfigModel):
    """What every rule has, those of the host too."""

    is_host: ClassVar[bool] = False
    """Whether the rule is raised by the host (an exception, a call) instead of being evaluated on the device."""

    kind: str
    name: str
    severity: Severity
    cooldown_iterations: StrictInt | None = Field(
        default=None,
        ge=0,
        alias="cooldown",
        description="Iterations after an incident of this rule in which it writes no other one. Default: the value of "
        "`incident.cooldown`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_cooldown(cls, data: Any) -> Any:
        if isinstance(data, dict) and {"cooldown", "cooldown_iterations"} <= data.keys():
            refuse("expected either cooldown or cooldown_iterations, got both", "cooldown_iterations")
        return data


class DeviceRule(RuleBase):
    """A rule that looks at statistics of recorded tensors, on the device."""

    layers: LayerPatterns = Field(
        default=("*",), description="Layers that the rule looks at: a glob, `re:` and a regular expression, or a list."
    )
    tensors: TensorNames
    phases: Phases = Field(
        default=(Phase.TRAIN, Phase.RECOMPUTE),
        description="Phases that the rule looks at. Only `train` feeds its history.",
    )
    min_samples: StrictInt
    rearm: StrictInt = Field(
        default=8,
        ge=1,
        description="Clean samples in a row after which a row that has fired may fire again.",
    )

    def sees(self, layer: str, tensor: str, phase: Phase | str) -> bool:
        """Whether the rule looks at a tensor of this layer, name and phase."""
        return tensor in self.tensors and phase in self.phases and layer_predicate(self.layers)(layer)


class WindowRule(DeviceRule):
    """A rule that compares a value with a window of its own history."""

    window: StrictInt = Field(
        default=128, ge=1, le=MAX_WINDOW, description="Length of the history that a value is compared with, in samples."
    )

    @model_validator(mode="after")
    def _samples_fit_window(self) -> WindowRule:
        if self.min_samples > self.window:
            why = "the rule could never fire, its window never holds so many samples"
            if "min_samples" in self.model_fields_set:
                refuse(f"expected at most window = {self.window}, got {self.min_samples}: {why}", "min_samples")
            default = f"min_samples = {self.min_samples} (its default)"
            refuse(f"expected at least {default}, got {self.window}: {why}; set min_samples too", "window")
        return self


def _infinity(value: Any) -> Any:
    if value in ("inf", "+inf", float("inf")):
        return "+inf"
    return "-inf" if value == float("-inf") else value


Infinity = Annotated[Literal["-inf", "+inf"], BeforeValidator(_infinity), WithJsonSchema({"enum": ["-inf", "+inf"]})]

_NAME_FIELD_HELP = "Name of the rule in messages and incident names; unique. Default: the kind."


def _name_field(default: str) -> Any:
    return Field(default=default, pattern=r"^[A-Za-z0-9_-]{1,64}$", description=_NAME_FIELD_HELP)


def _severity_field(default: Severity) -> Any:
    return Field(
        default=default,
        description="`watch`: noted only, writes nothing; `warning` and `fault`: write an incident, `fault` first.",
    )


def _kind_field(default: str, description: str) -> Any:
    return Field(default=default, description=description)


class NonfiniteRule(DeviceRule):
    """NaN or infinity in the logical region of a tensor or in its codes."""

    kind: Literal["nonfinite"] = _kind_field("nonfinite", "Fires on NaN or infinity.")
    name: str = _name_field("nonfinite")
    severity: Severity = _severity_field(Severity.FAULT)
    tensors: TensorNames = Field(default=TENSORS, description="Tensors that the rule looks at. Default: all.")
    min_samples: StrictInt = Field(
        default=0, ge=0, description="Samples of a row before the rule may fire on it; 0: from the first one."
    )
    allow: tuple[Infinity, ...] = Field(
        default=(),
        description="Infinities that are legal in these layers, such as `-inf` in attention masks. NaN never is.",
    )


class LossJumpRule(WindowRule):
    """The loss leaves its recent range."""

    kind: Literal["loss_jump"] = _kind_field("loss_jump", "Fires when the loss jumps against its own history.")
    name: str = _name_field("loss_jump")
    severity: Severity = _severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("loss",), description="Always the loss.")
    min_samples: StrictInt = Field(default=64, ge=1, description="Samples in the window before the rule may fire.")
    sigma: StrictFloat = Field(
        default=6.0,
        gt=0,
        description="Fires beyond this many standard deviations from the window's mean; a deviation counts as at least "
        "0.1% of the mean.",
    )
    factor: StrictFloat | None = Field(
        default=None, gt=1, description="Fires also when the loss is beyond this multiple of the window's mean."
    )
    direction: Literal["up", "down", "both"] = Field(default="up", description="Which jumps count.")
    consecutive: StrictInt = Field(default=1, ge=1, le=MAX_WINDOW, description="Jumped samples in a row that it takes.")

    @model_validator(mode="after")
    def _only_the_loss(self) -> LossJumpRule:
        if self.tensors != ("loss",):
            refuse(f"expected [loss], got [{', '.join(self.tensors)}]: the rule looks at the loss only", "tensors")
        return self


class AmaxSpikeRule(WindowRule):
    """The largest magnitude of a tensor is far above its recent maximum."""

    kind: Literal["amax_spike"] = _kind_field(
        "amax_spike", "Fires when a tensor's largest magnitude jumps against its own history."
    )
    name: str = _name_field("amax_spike")
    severity: Severity = _severity_field(Severity.WARNING)
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


class UnderflowRule(WindowRule):
    """Quantization turned too large a share of a tensor's non-zero values into zero."""

    kind: Literal["underflow"] = _kind_field(
        "underflow", "Fires when quantization turns non-zero values into zero, against the tensor's own history."
    )
    name: str = _name_field("underflow")
    severity: Severity = _severity_field(Severity.WARNING)
    tensors: TensorNames = Field(
        default=MAY_BE_QUANTIZED,
        description="Tensors that the rule looks at, where both the high-precision tensor and its codes are recorded.",
    )
    min_samples: StrictInt = Field(
        default=16, ge=1, description="Samples in the window before a value is compared with it instead of `new_row`."
    )
    factor: StrictFloat = Field(default=4.0, gt=1, description="Fires above this multiple of the window's maximum ...")
    minimum: StrictFloat = Field(
        default=0.25, ge=0, le=1, description="... and above this share of the non-zero values."
    )
    new_row: StrictFloat = Field(
        default=0.9, gt=0, le=1, description="Fires at this share whatever the history says, and without one."
    )

    @model_validator(mode="after")
    def _shares_in_order(self) -> UnderflowRule:
        if self.minimum > self.new_row:
            why = "at new_row the rule fires already"
            if "minimum" in self.model_fields_set:
                refuse(f"expected at most new_row = {self.new_row:g}, got {self.minimum:g}: {why}", "minimum")
            default = f"minimum = {self.minimum:g} (its default)"
            refuse(f"expected at least {default}, got {self.new_row:g}: {why}; set minimum too", "new_row")
        return self


class _HostRule(RuleBase):
    is_host: ClassVar[bool] = True

    @model_validator(mode="after")
    def _writes_something(self) -> _HostRule:
        if self.severity is Severity.WATCH:
            refuse("expected warning or fault, got watch: a host rule only writes incidents", "severity")
        return self


class ExceptionRule(_HostRule):
    """The training loop raised: what the ring holds is written before the exception goes on."""

    kind: Literal["exception"] = _kind_field("exception", "Fires when the training loop raises.")
    name: str = _name_field("exception")
    severity: Severity = _severity_field(Severity.FAULT)


class ManualRule(_HostRule):
    """``recorder.trigger("why")`` was called. Always there, listed or not; who asks gets an incident: no cooldown."""

    kind: Literal["manual"] = _kind_field("manual", "Fires when `recorder.trigger(...)` is called.")
    cooldown_iterations: StrictInt | None = Field(
        default=0, ge=0, alias="cooldown", description="Iterations after an incident in which triggers write no other."
    )
    name: str = _name_field("manual")
    severity: Severity = _severity_field(Severity.FAULT)


AnyRule = Union[NonfiniteRule, LossJumpRule, AmaxSpikeRule, UnderflowRule, ExceptionRule, ManualRule]  # noqa: UP007
"""Any rule of this version."""

Rule = Annotated[AnyRule, Field(discriminator="kind")]
"""Field type: a rule, chosen by its ``kind``."""

RULE_CLASSES: dict[str, type[RuleBase]] = {
    "nonfinite": NonfiniteRule,
    "loss_jump": LossJumpRule,
    "amax_spike": AmaxSpikeRule,
    "underflow": UnderflowRule,
    "exception": ExceptionRule,
    "manual": ManualRule,
}
"""Rule class of each kind."""


def default_rules() -> tuple[AnyRule, ...]:
    """The rules of a configuration that lists none."""
    return (NonfiniteRule(), LossJumpRule(), AmaxSpikeRule(), UnderflowRule(), ExceptionRule(), ManualRule())
