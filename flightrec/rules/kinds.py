"""The device rules by kind: a rule that is new is imported and listed here."""

from __future__ import annotations

from flightrec.rules.amax_spike import AmaxSpike
from flightrec.rules.base import DeviceRule
from flightrec.rules.loss_jump import LossJump
from flightrec.rules.nonfinite import Nonfinite
from flightrec.rules.underflow import Underflow

DEVICE_RULES: dict[str, type[DeviceRule]] = {rule.kind: rule for rule in (Nonfinite, LossJump, AmaxSpike, Underflow)}
"""Class of each kind that has a part on the device; ``exception`` and ``manual`` have none."""
