"""What rules share that judge one value an iteration: a loss or a metric."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flightrec.config.patterns import layer_predicate
from flightrec.records import LOSS_SCALE, NO_MICROBATCH, SKIPPED_STEP, Key, Stage, Statistic
from flightrec.rules.base import Samples


def one_series(key: Key) -> Key:
    """Values of one name are one series, wherever in the iteration they were given."""
    return replace(key.series, call=0, stage=Stage.LOSS)


def is_metric(key: Key, names: tuple[str, ...]) -> bool:
    """Whether a key is a metric that was given to ``step`` under one of the names (patterns).

    A scaler's own two are meant only by who names them: a scale jumps in health, and so do skipped steps.
    """
    if names == ("*",) and key.part in (LOSS_SCALE, SKIPPED_STEP):
        return False
    return key.microbatch == NO_MICROBATCH and layer_predicate(names)(key.part)


def row_values(samples: Samples) -> tuple[Tensor, Tensor]:
    """Value of each row, and which rows make up the iteration's, both [S, K].

    A value is NaN where any of its elements is not finite. The iteration's value is the record without a microbatch if
    there is one, else the mean over the microbatches' records.
    """
    column = samples.column
    not_finite = column(Statistic.NAN_COUNT) + column(Statistic.POSITIVE_INF_COUNT)
    not_finite = not_finite + column(Statistic.NEGATIVE_INF_COUNT)
    per_row = (column(Statistic.SUM) / column(Statistic.NUMEL)).masked_fill_(not_finite > 0, torch.nan)
    whole = samples.present & samples.tables.whole
    used = torch.where(whole.any(1, keepdim=True), whole, samples.present)
    return per_row, used


def iteration_value(per_row: Tensor, used: Tensor, zero: Tensor) -> Tensor:
    """The mean of the rows that make up the iteration's value, [S]; NaN where there is none or it is not finite."""
    return torch.where(used, per_row, zero).sum(1) / used.sum(1)


def furthest(distance: Tensor, used: Tensor, beyond: Tensor) -> Tensor:
    """One row a series: the used one that lies furthest out on the side of ``beyond``, bool [S, K]."""
    if used.shape[1] == 1:
        return used
    outward = torch.where(used, distance * beyond[:, None], -torch.inf)
    columns = torch.arange(used.shape[1], device=used.device)
    return (columns == outward.argmax(1, keepdim=True)) & used
