"""Which series are the same tensor of several experts, and what is over them all: tables that the device gathers by."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flightrec.records import Key


@dataclass(frozen=True, slots=True)
class Siblings:
    """Series in groups of two or more; S series, G groups, M the most members of any. All on the device.

    No method synchronises; a series without siblings answers for itself.

    Attributes:
        members: int64 [G * M], series of each place, 0 where there is none.
        real: bool [G, M], padding is false.
        group: int64 [S], the group of each series, 0 for one without.
        grouped: bool [S], the series has siblings.
        size: float64 [S], members of its group, itself included.
    """

    members: Tensor
    real: Tensor
    group: Tensor
    grouped: Tensor
    size: Tensor

    def total(self, values: Tensor) -> Tensor:
        """Sum of float64 [S] over each series' group, [S]."""
        sums = self._spread(values, 0.0).sum(1)
        return self._answer(sums, values)

    def largest(self, values: Tensor) -> Tensor:
        """Largest of float64 [S] over each series' group, [S]."""
        return self._answer(self._spread(values, -torch.inf).amax(1), values)

    def others(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of the siblings of each series, without itself: the largest positive value, and how many are positive.

        Args:
            values: float64 [S], 0 where there is none.

        Returns:
            float64 [S], 0 where no sibling has one; int64 [S].
        """
        spread = self._spread(values, 0.0)
        top = spread.topk(2, dim=1).values
        first, second = self._answer(top[:, 0], values), self._answer(top[:, 1], values)
        largest = torch.where(values == first, second, first).masked_fill_(~self.grouped, 0.0)
        has_one = values > 0
        count = (spread > 0).sum(1).index_select(0, self.group) - has_one.to(torch.int64)
        return largest, count.masked_fill_(~self.grouped, 0)

    def _spread(self, values: Tensor, blank: float) -> Tensor:
        return values.index_select(0, self.members).view(self.real.shape).masked_fill_(~self.real, blank)

    def _answer(self, of_groups: Tensor, own: Tensor) -> Tensor:
        return torch.where(self.grouped, of_groups.index_select(0, self.group), own)


def build_siblings(
    series: Sequence[Key], group_of: Callable[[Key], Hashable | None], upload: Callable[[np.ndarray], Tensor]
) -> Siblings | None:
    """The tables of these series; None when none of them has a sibling.

    Args:
        series: in the order of their numbers.
        group_of: what a series has in common with its siblings, None for one that can have none.
        upload: copies to the device.
    """
    found: dict[Hashable, list[int]] = {}
    for number, key in enumerate(series):
        name = group_of(key)
        if name is not None:
            found.setdefault(name, []).append(number)
    groups = [numbers for numbers in found.values() if len(numbers) > 1]
    if not groups:
        return None
    members = np.zeros((len(groups), max(map(len, groups))), np.int64)
    real = np.zeros(members.shape, bool)
    group = np.zeros(len(series), np.int64)
    size = np.ones(len(series), np.float64)
    for at, numbers in enumerate(groups):
        members[at, : len(numbers)] = numbers
        real[at, : len(numbers)] = True
        group[numbers] = at
        size[numbers] = len(numbers)
    return Siblings(upload(members.reshape(-1)), upload(real), upload(group), upload(size > 1), upload(size))
