"""The rules about how training goes: losses, metrics, gradients and parameters over time. No state."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from flightrec.config.fields import Phases, StrictFloat, StrictInt, TensorNames, refuse
from flightrec.config.patterns import LayerPatterns
from flightrec.config.rulebase import (
    MAX_WINDOW,
    DeviceRule,
    JumpRule,
    kind_field,
    name_field,
    severity_field,
)
from flightrec.records import Phase, Severity


def _only(rule: DeviceRule, tensor: str) -> None:
    """Refuse other tensors than the one that the rule is about."""
    if rule.tensors != (tensor,):
        refuse(f"expected [{tensor}], got [{', '.join(rule.tensors)}]: the rule looks at the {tensor} only", "tensors")


def _metrics_field(default: tuple[str, ...], description: str) -> Any:
    return Field(default=default, description=f"{description}: a glob, `re:` and a regular expression, or a list.")


_METRICS = "Names of the metrics, as given to `recorder.step(metrics=...)`"


class LossDriftRule(DeviceRule):
    """The loss climbs slowly, over many iterations."""

    kind: Literal["loss_drift"] = kind_field("loss_drift", "Fires when the loss climbs slowly.")
    name: str = name_field("loss_drift")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("loss",), description="Always the loss.")
    window: StrictInt = Field(default=64, ge=1, le=MAX_WINDOW, description="Samples whose median is judged.")
    history: StrictInt = Field(
        default=1024, ge=1, le=MAX_WINDOW, description="Samples among whose medians the smallest is looked for."
    )
    min_samples: StrictInt = Field(default=64, ge=1, description="Medians in the history before the rule may fire.")
    factor: StrictFloat = Field(default=1.05, gt=1, description="Fires above this multiple of the smallest median ...")
    sigma: StrictFloat = Field(
        default=10.0, ge=0, description="... and beyond it by more than this many standard errors of the median."
    )

    @model_validator(mode="after")
    def _can_fire(self) -> LossDriftRule:
        _only(self, "loss")
        if self.min_samples > self.history:
            key = "min_samples" if "min_samples" in self.model_fields_set else "history"
            why = "the rule could never fire, its history never holds so many medians"
            refuse(f"expected min_samples <= history, got {self.min_samples} and {self.history}: {why}", key)
        return self


class MetricJumpRule(JumpRule):
    """A metric leaves its recent range."""

    kind: Literal["metric_jump"] = kind_field("metric_jump", "Fires when a metric jumps against its own history.")
    name: str = name_field("metric_jump")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("metric",), description="Always metrics.")
    metrics: LayerPatterns = _metrics_field(("*",), _METRICS)

    @model_validator(mode="after")
    def _only_metrics(self) -> MetricJumpRule:
        _only(self, "metric")
        return self


class MetricThresholdRule(DeviceRule):
    """A metric is beyond a limit."""

    kind: Literal["metric_threshold"] = kind_field("metric_threshold", "Fires when a metric is beyond a limit.")
    name: str = name_field("metric_threshold")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("metric",), description="Always metrics.")
    metrics: LayerPatterns = _metrics_field(("*",), _METRICS)
    min_samples: StrictInt = Field(
        default=0, ge=0, description="Samples of a metric before the rule may fire on it; 0: from the first one."
    )
    above: StrictFloat | None = Field(default=None, description="Fires above this value.")
    below: StrictFloat | None = Field(default=None, description="Fires below this value.")
    consecutive: StrictInt = Field(
        default=1, ge=1, le=MAX_WINDOW, description="Samples in a row beyond a limit that it takes."
    )

    @model_validator(mode="after")
    def _can_fire(self) -> MetricThresholdRule:
        _only(self, "metric")
        if self.above is None and self.below is None:
            refuse("expected above or below or both, got neither: the rule could never fire", "above")
        if self.above is not None and self.below is not None and self.below > self.above:
            refuse(f"expected at most above = {self.above:g}, got {self.below:g}: every value would fire", "below")
        return self


class LossScaleCollapseRule(DeviceRule):
    """A gradient scaler has given up all of its scale and still skips steps."""

    kind: Literal["loss_scale_collapse"] = kind_field(
        "loss_scale_collapse", "Fires when the loss scale is below `minimum` and keeps falling."
    )
    name: str = name_field("loss_scale_collapse")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("metric",), description="Always metrics.")
    metrics: LayerPatterns = _metrics_field(("loss_scale",), "Name of the metric that is the loss scale")
    min_samples: StrictInt = Field(
        default=0, ge=0, description="Samples of the scale before the rule may fire; 0: from the first one."
    )
    minimum: StrictFloat = Field(default=1.0, gt=0, description="Fires when the scale is below this ...")
    consecutive: StrictInt = Field(
        default=4, ge=1, le=MAX_WINDOW, description="... and fell in so many samples in a row, a skipped step each."
    )

    @model_validator(mode="after")
    def _only_metrics(self) -> LossScaleCollapseRule:
        _only(self, "metric")
        return self


class ZeroGradientRule(DeviceRule):
    """A gradient that used to be something is all zero."""

    kind: Literal["zero_gradient"] = kind_field("zero_gradient", "Fires when a gradient stays zero that was not.")
    name: str = name_field("zero_gradient")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("gradient", "wgrad", "dgrad"), description="Tensors that the rule looks at.")
    min_samples: StrictInt = Field(
        default=16, ge=1, description="Samples that were not zero before the rule may fire on a tensor."
    )
    consecutive: StrictInt = Field(default=16, ge=1, le=MAX_WINDOW, description="Zero samples in a row that it takes.")


class MissingRecordRule(DeviceRule):
    """A tensor that used to be recorded no longer is."""

    kind: Literal["missing_record"] = kind_field("missing_record", "Fires when a tensor no longer comes.")
    name: str = name_field("missing_record")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("gradient", "wgrad", "dgrad"), description="Tensors that the rule looks at.")
    phases: Phases = Field(default=(Phase.TRAIN,), description="Phases that the rule looks at.")
    min_samples: StrictInt = Field(
        default=16, ge=1, description="Iterations with the tensor before the rule may miss it."
    )
    consecutive: StrictInt = Field(
        default=16, ge=1, le=MAX_WINDOW, description="Fires after more iterations than this without the tensor ..."
    )
    factor: StrictFloat = Field(
        default=4.0, ge=1, description="... and than this multiple of the longest absence that it came back from."
    )


class UnchangedParametersRule(DeviceRule):
    """A parameter that used to be trained stands still."""

    kind: Literal["unchanged_parameters"] = kind_field(
        "unchanged_parameters", "Fires when a parameter no longer changes that did."
    )
    name: str = name_field("unchanged_parameters")
    severity: Severity = severity_field(Severity.WARNING)
    tensors: TensorNames = Field(default=("parameter",), description="Tensors that the rule looks at.")
    min_samples: StrictInt = Field(default=16, ge=1, description="Changes before the rule may fire on a parameter.")
    consecutive: StrictInt = Field(
        default=32, ge=1, le=MAX_WINDOW, description="Samples in a row without a change that it takes."
    )
