"""The rule ``metric_jump``: a metric leaves its recent range."""

from __future__ import annotations

from typing import ClassVar

from flightrec.records import Key
from flightrec.rules.loss_jump import LossJump
from flightrec.rules.scalars import is_metric


class MetricJump(LossJump):
    """What ``loss_jump`` does for the loss, for each metric given to ``step`` under one of the names ``metrics``."""

    kind: ClassVar[str] = "metric_jump"

    def accepts(self, key: Key) -> bool:
        """Metrics of the names that the rule looks at."""
        return is_metric(key, self.config.metrics)
