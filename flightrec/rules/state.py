"""Per-series state of one rule on the device: growing fields, windows of past samples, arming.

A *series* is a key without its microbatch. Everything here is tensors of shape ``[num_series, ...]`` on the recorder's
device, changed by torch operations on the current stream from ``step()``; nothing here reads a value back, except
``export`` and ``assign``, which serve ``state_dict`` and synchronise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SERIES = 256
"""Fields grow by whole blocks, so that a series that joins during a run seldom costs an allocation."""


@dataclass(frozen=True, slots=True)
class _Field:
    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float


class SeriesState:
    """Named fields with one row a series.

    Args:
        device: where the fields live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_series = 0
        self._capacity = 0
        self._fields: dict[str, _Field] = {}
        self._storage: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._windows: dict[str, int] = {}

    def declare(self, name: str, *, dtype: torch.dtype, initial: float = 0, shape: tuple[int, ...] = ()) -> None:
        """Add a field of ``[num_series, *shape]``; new series start at ``initial``. Before the first ``grow``."""
        assert self._capacity == 0
        self._fields[name] = _Field(shape, dtype, initial)

    def declare_window(self, name: str, size: int) -> Window:
        """Add a window of the last ``size`` samples a series."""
        self.declare(name, dtype=torch.float64, shape=(size,))
        self.declare(_count_name(name), dtype=torch.int64)
        self._windows[name] = size
        return Window(self, name, size)

    def __getitem__(self, name: str) -> Tensor:
        """The field of the series known so far, ``[num_series, *shape]``, a view that may be written in place."""
        return self._views[name]

    def grow(self, num_series: int) -> None:
        """Make room for ``num_series`` series; those that exist keep their values. No synchronisation."""
        if num_series > self._capacity:
            self._capacity = -(-num_series // BLOCK_SERIES) * BLOCK_SERIES
            for name, field in self._fields.items():
                storage = torch.full(
                    (self._capacity, *field.shape), field.initial, dtype=field.dtype, device=self.device
                )
                if self.num_series:
                    storage[: self.num_series].copy_(self._storage[name][: self.num_series])
                self._storage[name] = storage
        if num_series > self.num_series:
            self.num_series = num_series
            self._views = {name: storage[:num_series] for name, storage in self._storage.items()}

    def export(self) -> dict[str, Tensor]:
        """CPU copies of all fields, windows oldest sample first. Synchronises."""
        if self.num_series == 0:
            return {name: self._initial(field, 0) for name, field in self._fields.items()}
        fields = {name: view.detach().to("cpu", copy=True) for name, view in self._views.items()}
        for name, size in self._windows.items():
            count = fields[_count_name(name)]
            start = torch.where(count > size, count % size, torch.zeros_like(count))
            order = (start[:, None] + torch.arange(size, device="cpu")[None, :]) % size
            fields[name] = fields[name].gather(1, order)
            fields[_count_name(name)] = count.clamp(max=size)
        return fields

    def adapt(self, fields: Mapping[str, Tensor], num_series: int) -> dict[str, Tensor]:
        """Fit what an ``export`` gave, perhaps under another configuration, to these fields. On the CPU.

        A field that is missing, or whose shape no longer fits, starts afresh; of a longer window the newest samples
        stay.
        """
        adapted = dict(fields)
        for name, size in self._windows.items():
            if name in adapted and _count_name(name) in adapted:
                adapted[name], adapted[_count_name(name)] = _resize(adapted[name], adapted[_count_name(name)], size)
        for name, field in self._fields.items():
            if name not in adapted or tuple(adapted[name].shape) != (num_series, *field.shape):
                adapted[name] = self._initial(field, num_series)
        return {name: adapted[name].to(field.dtype) for name, field in self._fields.items()}

    def assign(self, series: list[int], fields: Mapping[str, Tensor]) -> None:
        """Overwrite the given series with rows of what ``adapt`` gave, in that order. Synchronises."""
        where = torch.tensor(series, dtype=torch.int64, device="cpu").to(self.device)
        for name, view in self._views.items():
            view.index_copy_(0, where, fields[name].to(self.device))

    def reset(self) -> None:
        """Let every series start afresh. No synchronisation."""
        for name, view in self._views.items():
            view.fill_(self._fields[name].initial)

    @staticmethod
    def _initial(field: _Field, num_series: int) -> Tensor:
        return torch.full((num_series, *field.shape), field.initial, dtype=field.dtype, device="cpu")


class Window:
    """The last ``size`` samples of each series, in a ring of their own a series: a turn without a sample moves nothing.

    Made by ``SeriesState.declare_window``.
    """

    def __init__(self, state: SeriesState, name: str, size: int) -> None:
        self.size = size
        self._state = state
        self._name = name
        self._count_name = _count_name(name)
        self._columns = torch.arange(size, dtype=torch.int64, device=state.device)[None, :]

    @property
    def count(self) -> Tensor:
        """Samples ever taken, int64 ``[num_series]`` (may exceed ``size``)."""
        return self._state[self._count_name]

    def maximum(self) -> Tensor:
        """Largest sample, float64 ``[num_series]``; 0 without one. For samples that are never negative."""
        return self._state[self._name].amax(1)

    def minimum(self) -> Tensor:
        """Smallest sample, float64 ``[num_series]``; infinite without one."""
        return self._filled().amin(1)

    def median(self) -> Tensor:
        """Median of a full window, float64 ``[num_series]``; infinite or NaN while it is filling."""
        ordered = self._filled().sort(1).values
        return (ordered[:, (self.size - 1) // 2] + ordered[:, self.size // 2]) / 2

    def _filled(self) -> Tensor:
        """The samples, infinity where there is none yet."""
        return self._state[self._name].masked_fill(self._columns >= self.count[:, None], torch.inf)

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (of the population), float64 ``[num_series]`` each; 0 without a sample."""
        count = self.count
        divisor = count.clamp(1, self.size)
        values = self._state[self._name]
        mean = values.sum(1) / divisor  # what is not filled holds 0
        deviation = (values - mean[:, None]).masked_fill_(self._columns >= count[:, None], 0.0)
        return mean, (deviation.square_().sum(1) / divisor).sqrt_()

    def push(self, values: Tensor, where: Tensor) -> None:
        """Take ``values`` (float64 ``[num_series]``) as the newest sample where ``where`` (bool) is true."""
        window, count = self._state[self._name], self.count
        position = (count % self.size)[:, None]
        value = torch.where(where[:, None], values[:, None], window.gather(1, position))
        window.scatter_(1, position, value)
        count.add_(where)


class Arming:
    """Fires on the step from clean to faulty, and again only after ``rearm`` clean samples.

    Args:
        state: holds the field.
        name: of the field.
        rearm: clean samples before a series that was faulty may fire again, at least 1.
    """

    def __init__(self, state: SeriesState, name: str, rearm: int) -> None:
        state.declare(name, dtype=torch.int32)  # minus the clean samples still needed; 0 is armed
        self._state = state
        self._name = name
        self._rearm = max(1, rearm)

    def fire(self, sampled: Tensor, faulty: Tensor) -> Tensor:
        """Which series fire now, bool ``[num_series]``; ``faulty`` implies ``sampled`` (both bool)."""
        lacking = self._state[self._name]
        fires = faulty & (lacking == 0)
        lacking.add_(sampled).clamp_(max=0).masked_fill_(faulty, -self._rearm)
        return fires


def _count_name(window: str) -> str:
    return f"{window}_count"


def _resize(values: Tensor, count: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Fit exported windows ``[n, old]``, oldest first, into ``[n, size]``; returns them with their counts."""
    held = count.clamp(max=values.shape[1])
    kept = held.clamp(max=size)
    columns = torch.arange(size, device="cpu")[None, :]
    order = (columns + (held - kept)[:, None]).clamp(max=values.shape[1] - 1)
    nothing = torch.zeros((), dtype=values.dtype, device=values.device)
    resized = torch.where(columns < kept[:, None], values.gather(1, order), nothing)
    return resized, kept
