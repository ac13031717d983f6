"""How a replay of a captured graph finds its place: words on the device, and what the graph's first node does to them.

The kernels of a captured graph read the number of their slot from the device. A graph has a number of its own, and the
first thing that a replay does is to set it: ``slot x replays + replay``, a *virtual slot* in memory that holds the
records of several replays an iteration. ``step`` sets slot and tick for all graphs and zeroes their counts. Launches on
the caller's current stream, waits for nothing; the words never move.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

COUNT, SLOT, TICK, ORDERS = 0, 1, 2, 3
"""A graph's words: replays in this iteration, the virtual slot and stamp of the last one, and, from there on, the
position among the replays of all graphs, one word a replay. The head, for all graphs: how many replays there were in
this iteration, its slot, and its tick."""

BeginReplay = Callable[[torch.Tensor, torch.Tensor, int, int], None]


def reference(head: torch.Tensor, words: torch.Tensor, num_replays: int, overflow: int) -> None:
    """Begin one replay of a graph, in torch operations.

    A replay too many is counted, and goes with a stamp of no tick to the virtual slot ``overflow``, which nobody reads.

    Args:
        head: int64 ``[ORDERS]`` or more on the device.
        words: int64 ``[ORDERS + num_replays]`` likewise, of this graph.
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


def choose(device: torch.device) -> BeginReplay:
    """The implementation for ``device``: one Triton kernel on CUDA, ``reference`` elsewhere."""
    if device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("triton") is not None:
        try:
            from flightrec.kernels import replaying
        except Exception:  # told by ops.choose, which fails likewise
            return reference
        return replaying.begin_replay
    return reference
