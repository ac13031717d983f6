"""The device rules by kind: a rule that is new is imported and listed here."""

from __future__ import annotations

from flightrec.rules.amax_spike import AmaxSpike
from flightrec.rules.base import DeviceRule
from flightrec.rules.expert import Expert
from flightrec.rules.inconsistent_scale import InconsistentScale
from flightrec.rules.loss_drift import LossDrift
from flightrec.rules.loss_jump import LossJump
from flightrec.rules.loss_scale_collapse import LossScaleCollapse
from flightrec.rules.metric_jump import MetricJump
from flightrec.rules.metric_threshold import MetricThreshold
from flightrec.rules.missing_record import MissingRecord
from flightrec.rules.nonfinite import Nonfinite
from flightrec.rules.quantization_error import QuantizationError
from flightrec.rules.saturation import Saturation
from flightrec.rules.stale_scale import StaleScale
from flightrec.rules.unchanged_parameters import UnchangedParameters
from flightrec.rules.underflow import Underflow
from flightrec.rules.zero_gradient import ZeroGradient

_RULES: tuple[type[DeviceRule], ...] = (
    Nonfinite,
    LossJump,
    AmaxSpike,
    Underflow,
    QuantizationError,
    Saturation,
    InconsistentScale,
    StaleScale,
    LossDrift,
    MetricJump,
    MetricThreshold,
    ZeroGradient,
    MissingRecord,
    UnchangedParameters,
    LossScaleCollapse,
    Expert,
)

DEVICE_RULES: dict[str, type[DeviceRule]] = {rule.kind: rule for rule in _RULES}
"""Class of each kind that has a part on the device; ``exception`` and ``manual`` have none."""
