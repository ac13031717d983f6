"""How a replay of a captured graph finds its place: words on the device, and what the graph's first node does to them.

The kernels of a captured graph read the number of their slot from the device. A graph has a number of its own, and the
first thing that a replay does is to set it: ``slot x replays + replay``, a *virtual slot* in memory that holds the
records of several replays an iteration. ``step`` sets slot and tick for all graphs and zeroes their counts. What takes
turns has a slot of its own in each graph, which the same launch sets: that of the replay, or none when it is not its
turn. Launches on the caller's current stream, waits for nothing; the words never move.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

COUNT, SLOT, TICK, ORDERS = 0, 1, 2, 3
"""A graph's words: replays in this iteration, the virtual slot and stamp of the last one, and, from there on, the
position among the replays of all graphs, one word a replay. The head, for all graphs: how many replays there were in
this iteration, its slot, and its tick."""

NO_SLOT = -1
"""The slot of what is not recorded now: a kernel that reads it leaves at once."""


class Groups(NamedTuple):
    """What takes turns in one graph.

    Attributes:
        units: int64 ``[1 + G]`` on the device: how many groups there are, and the unit of each.
        slots: int64 ``[G, 2]`` likewise, of each group: its virtual slot, ``NO_SLOT`` when it is not its turn; and, for
            operations that cannot leave, one that always exists, ``overflow`` then.
        turns: int8 ``[U]`` likewise, for all graphs: by unit whether it has its turn in this iteration.
    """

    units: torch.Tensor
    slots: torch.Tensor
    turns: torch.Tensor


BeginReplay = Callable[[torch.Tensor, torch.Tensor, Groups, int, int], None]


def place_of(slot: torch.Tensor) -> torch.Tensor:
    """int64 ``[1]``, a view: the place that exists of a slot, int64 ``[1]``, or of a group's, int64 ``[2]``."""
    return slot if slot.shape[0] == 1 else slot[1:]


def reference(head: torch.Tensor, words: torch.Tensor, groups: Groups, num_replays: int, overflow: int) -> None:
    """Begin one replay of a graph, in torch operations.

    A replay too many is counted, and goes with a stamp of no tick to the virtual slot ``overflow``, which nobody reads.

    Args:
        head: int64 ``[ORDERS]`` or more on the device.
        words: int64 ``[ORDERS + num_replays]`` likewise, of this graph.
        groups: what takes turns in it.
        num_replays: that have a place in an iteration.
        overflow: the virtual slot of those that have none.
    """
    count, order = words[COUNT : COUNT + 1], head[COUNT : COUNT + 1]
    slot, tick = head[SLOT : SLOT + 1], head[TICK : TICK + 1]
    fits = count < num_replays
    words[SLOT : SLOT + 1].copy_(torch.where(fits, slot * num_replays + count, overflow))
    words[TICK : TICK + 1].copy_(torch.where(fits, tick, -1))
    orders = words[ORDERS : ORDERS + num_replays]
    is_this = torch.arange(num_replays, device=words.device) == count
    orders.copy_(torch.where(is_this, order, orders))
    count.add_(1)
    order.add_(1)
    if groups.slots.shape[0]:  # those that no record uses yet are set too
        has_turn = groups.turns.index_select(0, groups.units[1:]) != 0
        at = words[SLOT : SLOT + 1]
        groups.slots[:, 0].copy_(torch.where(has_turn, at, NO_SLOT))
        groups.slots[:, 1].copy_(torch.where(has_turn, at, overflow))


def choose(device: torch.device) -> BeginReplay:
    """The implementation for ``device``: one Triton kernel on CUDA, ``reference`` elsewhere."""
    if device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("triton") is not None:
        try:
            from flightrec.kernels import replaying
        except Exception:  # told by ops.choose, which fails likewise
            return reference
        return replaying.begin_replay
    return reference
