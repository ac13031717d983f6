"""What a device rule is: the class each rule of the table derives from, and what passes between it and ``Evaluator``.

A rule that is new is one class: it declares its state, and judges a sample with torch operations on the current
stream. It never reads a value back (no ``.item()``, no ``nonzero``, no boolean-mask indexing, no branch on a tensor),
uses nothing that ``torch.use_deterministic_algorithms`` refuses on CUDA (no ``cumsum``, no matrix product, no
``scatter_reduce``), and keeps out of its window what its docstring says. Arming, mapping back to rows, severities,
phases and layer patterns are the evaluator's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from flightrec.records import Key, Statistic
from flightrec.rules.series import SeriesTables
from flightrec.rules.skips import Skip
from flightrec.rules.state import SeriesState


@dataclass(frozen=True, slots=True)
class Samples:
    """What one rule sees of one tick; S series, K the most rows (microbatches) of any.

    Attributes:
        statistics: float64 [S, K, NUM_STATISTICS] on the device, read-only.
        present: bool [S, K], the row was recorded in this tick.
        tables: the series' static properties.
        skip: whether a gradient scaler skipped this iteration's step; None without one.
        left_out: bool [S, K], the row was not recorded because it was not its turn; None where nothing takes turns, and
            for rules that do not want to know.
    """

    statistics: Tensor
    present: Tensor
    tables: SeriesTables
    skip: Skip | None = None
    left_out: Tensor | None = None

    def took_no_turn(self) -> Tensor | None:
        """Bool [S], the series was not recorded because it was not its turn; None if nothing was left out."""
        return None if self.left_out is None else self.left_out.any(1) & ~self.present.any(1)

    def column(self, statistic: Statistic) -> Tensor:
        """One statistic, float64 [S, K], a view."""
        return self.statistics[..., int(statistic)]

    def excused(self) -> Tensor | None:
        """Bool [S], series that have no sample because the step was skipped; None without a scaler."""
        if self.skip is None:
            return None
        rows = self.skip.excused.index_select(0, self.tables.rows).view(self.tables.shape)
        return (rows if self.tables.real is None else rows & self.tables.real).any(1)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A rule's answer for one tick, all on the device; none of it may alias the rule's state.

    Attributes:
        sampled: bool [S], the series had a sample.
        faulty: bool [S], the series is faulty now (whether it may fire is the evaluator's); implies ``sampled``.
        rows: bool [S, K], the rows that show it.
        value: float64 [S, K] or [S, 1], what was judged.
        threshold: float64 [S], or a number: what ``value`` was judged against.
        watch: bool [S], suspicious but not (yet) faulty: noted, never written. None for a rule without that.
    """

    sampled: Tensor
    faulty: Tensor
    rows: Tensor
    value: Tensor
    threshold: Tensor | float
    watch: Tensor | None = None


class DeviceRule(ABC):
    """One rule of the configuration, evaluated on the device.

    Args:
        config: the rule's configuration.
        state: where ``__init__`` declares fields and windows; the evaluator grows it.
    """

    kind: ClassVar[str]
    wants_left_out: ClassVar[bool] = False
    """Whether ``Samples.left_out`` is wanted: by rules that conclude from an absence, or from neighbouring samples."""

    def __init__(self, config: Any, state: SeriesState) -> None:
        self.config = config
        self.state = state

    @staticmethod
    def grouping(key: Key) -> Key:
        """The series of a key; a rule may merge more than microbatches."""
        return key.series

    def accepts(self, key: Key) -> bool:
        """Whether a row that the configuration's layers, tensors and phases cover is looked at."""
        del key
        return True

    def relatives(self, key: Key) -> Hashable | None:
        """What a series has in common with its siblings (``tables.siblings``); None for one that can have none."""
        del key
        return None

    @abstractmethod
    def judge(self, samples: Samples) -> Judgement:
        """Judge one tick and update the rule's windows. No synchronisation."""

    @abstractmethod
    def explain(self, key: Key, value: float, threshold: float, statistics: Mapping[Statistic, float]) -> str:
        """One plain sentence with the numbers, for a row that fired. On the host.

        Args:
            key: the row's key.
            value: its value in the verdict.
            threshold: its threshold in the verdict.
            statistics: the row's statistics that are not absent.
        """


def twinned(values: Tensor, tables: SeriesTables) -> Tensor:
    """``values`` [S, ...] of the series whose history judges each series."""
    return values if tables.twin is None else values.index_select(0, tables.twin)


def statistics_of(row: Sequence[float] | Mapping[Statistic, float] | Any) -> dict[Statistic, float]:
    """The statistics of one row (a sequence, array or CPU tensor in column order) that are not absent (NaN)."""
    if isinstance(row, Mapping):
        return {statistic: float(value) for statistic, value in row.items()}
    values = {statistic: float(value) for statistic, value in zip(Statistic, row, strict=True)}
    return {statistic: value for statistic, value in values.items() if value == value}


def number(value: float) -> str:
    """A number for a sentence: whole numbers in full up to a million million, others with four digits."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e12 else f"{value:.4g}"


def subject(key: Key) -> str:
    """Names a record in a sentence: ``activation of blocks.0.fc1 (microbatch 2, backward)``."""
    name = f"{key.tensor}.{key.part}" if key.part else key.tensor
    where = [f"microbatch {key.microbatch}"] if key.microbatch >= 0 else []
    where += [f"call {key.call}"] if key.call else []
    where += [key.phase.value] if key.phase.value != "train" else []
    where.append(key.stage.value)
    return f"{name} of {key.layer} ({', '.join(where)})" if key.layer else f"{name} ({', '.join(where)})"
