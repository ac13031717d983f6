"""What the configuration classes of all rules share: names, severities, layers, windows. No state."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from flightrec.config.fields import ConfigModel, Phases, StrictFloat, StrictInt, TensorNames, refuse
from flightrec.config.patterns import LayerPatterns, layer_predicate
from flightrec.records import Phase, Severity

MAX_WINDOW = 4096
"""Longest history window, in samples: windows live on the device, one a row and rule."""

MAY_BE_QUANTIZED = ("activation", "weight", "gradient", "output", "wgrad", "dgrad", "input")
"""Tensors that may have a quantized form."""


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


class JumpRule(WindowRule):
    """A window rule about one number an iteration, which leaves its recent range."""

    min_samples: StrictInt = Field(default=64, ge=1, description="Samples in the window before the rule may fire.")
    sigma: StrictFloat = Field(
        default=6.0,
        gt=0,
        description="Fires beyond this many standard deviations from the window's mean; a deviation counts as at least "
        "0.1% of the mean.",
    )
    factor: StrictFloat | None = Field(
        default=None, gt=1, description="Fires also when the value is beyond this multiple of the window's mean."
    )
    direction: Literal["up", "down", "both"] = Field(default="up", description="Which jumps count.")
    consecutive: StrictInt = Field(default=1, ge=1, le=MAX_WINDOW, description="Jumped samples in a row that it takes.")


_NAME_FIELD_HELP = "Name of the rule in messages and incident names; unique. Default: the kind."


def name_field(default: str) -> Any:
    """Field of a rule's name."""
    return Field(default=default, pattern=r"^[A-Za-z0-9_-]{1,64}$", description=_NAME_FIELD_HELP)


def severity_field(default: Severity) -> Any:
    """Field of a rule's severity."""
    return Field(
        default=default,
        description="`watch`: noted only, writes nothing; `warning` and `fault`: write an incident, `fault` first.",
    )


def kind_field(default: str, description: str) -> Any:
    """Field of a rule's kind."""
    return Field(default=default, description=description)
