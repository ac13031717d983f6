"""The rules about quantization: what the codes and scales of a tensor say. No state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flightrec.config.fields import StrictFloat, StrictInt, TensorNames, refuse
from flightrec.config.rulebase import (
    MAX_WINDOW,
    MAY_BE_QUANTIZED,
    DeviceRule,
    WindowRule,
    kind_field,
    name_field,
    severity_field,
)
from flightrec.records import Severity


def _in_order(minimum: float | None, new_row: float, is_set: bool) -> None:
    """Refuse a ``minimum`` above ``new_row``."""
    if minimum is None or minimum <= new_row:
        return
    why = "at new_row the rule fires already"
    if is_set:
        refuse(f"expected at most new_row = {new_row:g}, got {minimum:g}: {why}", "minimum")
    default = f"minimum = {minimum:g} (its default)"
    refuse(f"expected at least {default}, got {new_row:g}: {why}; set minimum too", "new_row")


_PAIRS = "Tensors that the rule looks at, where both the high-precision tensor and its codes are recorded."


class RelativeRule(WindowRule):
    """A window rule that compares what quantization did to a tensor with what it did to it before."""

    tensors: TensorNames = Field(default=MAY_BE_QUANTIZED, description=_PAIRS)
    min_samples: StrictInt = Field(
        default=16, ge=1, description="Samples in the window before a value is compared with it instead of `new_row`."
    )
    factor: StrictFloat = Field(default=4.0, gt=1, description="Fires above this multiple of the window's maximum ...")
    minimum: StrictFloat | None
    new_row: StrictFloat

    @model_validator(mode="after")
    def _levels_in_order(self) -> RelativeRule:
        _in_order(self.minimum, self.new_row, "minimum" in self.model_fields_set)
        return self


class UnderflowRule(RelativeRule):
    """Quantization turned too large a share of a tensor's non-zero values into zero."""

    kind: Literal["underflow"] = kind_field(
        "underflow", "Fires when quantization turns non-zero values into zero, against the tensor's own history."
    )
    name: str = name_field("underflow")
    severity: Severity = severity_field(Severity.WARNING)
    minimum: StrictFloat = Field(
        default=0.25, ge=0, le=1, description="... and above this share of the non-zero values."
    )
    new_row: StrictFloat = Field(
        default=0.9, gt=0, le=1, description="Fires at this share whatever the history says, and without one."
    )


class QuantizationErrorRule(RelativeRule):
    """What the codes decode to is far from the tensor that they were made of."""

    kind: Literal["quantization_error"] = kind_field(
        "quantization_error", "Fires when the dequantized tensor is far from the original, against its own history."
    )
    name: str = name_field("quantization_error")
    severity: Severity = severity_field(Severity.WARNING)
    minimum: StrictFloat | None = Field(
        default=None,
        ge=0,
        description="... and above this error. Default by format: 0.1 for E4M3, 0.2 for E5M2, 0.35 for FP4.",
    )
    new_row: StrictFloat = Field(
        default=0.5, gt=0, description="Fires at this relative error whatever the history says, and without one."
    )


class SaturationRule(RelativeRule):
    """Too large a share of a tensor's values is beyond what its codes can hold."""

    kind: Literal["saturation"] = kind_field(
        "saturation", "Fires when quantization clips values, against the tensor's own history."
    )
    name: str = name_field("saturation")
    severity: Severity = severity_field(Severity.WARNING)
    minimum: StrictFloat | None = Field(
        default=None,
        ge=0,
        le=1,
        description="... and above this share of the values. Default by format: 0.05 for FP8, 0.2 for FP4.",
    )
    new_row: StrictFloat = Field(
        default=0.5, gt=0, le=1, description="Fires at this share whatever the history says, and without one."
    )


class InconsistentScaleRule(DeviceRule):
    """The words that scale a tensor contradict each other or its data."""

    kind: Literal["inconsistent_scale"] = kind_field(
        "inconsistent_scale",
        "Fires when scale times inverse scale is not 1, or a scale is NaN, infinite, or zero for non-zero data.",
    )
    name: str = name_field("inconsistent_scale")
    severity: Severity = severity_field(Severity.FAULT)
    tensors: TensorNames = Field(
        default=MAY_BE_QUANTIZED, description="Tensors that the rule looks at, where a scale is recorded."
    )
    min_samples: StrictInt = Field(
        default=0, ge=0, description="Samples of a row before the rule may fire on it; 0: from the first one."
    )
    tolerance: StrictFloat = Field(
        default=0.01, gt=0, description="Fires when scale times inverse scale differs from 1 by more than this."
    )


class StaleScaleRule(DeviceRule):
    """A scale stays where it is although its tensor has outgrown it."""

    kind: Literal["stale_scale"] = kind_field(
        "stale_scale", "Fires when a tensor is beyond the range that its scale leaves, in several samples in a row."
    )
    name: str = name_field("stale_scale")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=MAY_BE_QUANTIZED, description=_PAIRS)
    min_samples: StrictInt = Field(
        default=0, ge=0, description="Samples of a row before the rule may fire on it; 0: from the first one."
    )
    factor: StrictFloat = Field(
        default=2.0, gt=1, description="Fires when the scaled amax is above this multiple of the format's range ..."
    )
    consecutive: StrictInt = Field(default=4, ge=1, le=MAX_WINDOW, description="... in so many samples in a row.")
    margin: StrictInt | None = Field(
        default=None,
        ge=-16,
        le=16,
        description="Margin of a recipe that takes the scale from the largest of an amax history; if given, a recorded "
        "history counts like the tensor itself.",
    )
