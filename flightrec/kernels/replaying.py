"""``replays.reference`` as one Triton kernel of one program: the first node of a captured graph, some 2 us a replay."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flightrec.kernels.replays import NO_SLOT, Groups

_NO_SLOT = tl.constexpr(NO_SLOT)
_BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_replays", "overflow"])
def _begin_replay(head, words, units, slots, turns, num_replays, overflow):  # type: ignore[no-untyped-def]
    count = tl.load(words)
    fits = count < num_replays
    slot = tl.where(fits, tl.load(head + 1) * num_replays + count, overflow)
    tl.store(words + 1, slot)
    tl.store(words + 2, tl.where(fits, tl.load(head + 2), -1))
    order = tl.atomic_add(head, 1)  # graphs on different streams may begin at once
    tl.store(words + 3 + count, order, mask=fits)
    tl.store(words, count + 1)
    num_groups = tl.load(units)
    for start in range(0, num_groups, _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        inside = at < num_groups
        unit = tl.load(units + 1 + at, mask=inside, other=0)
        has_turn = tl.load(turns + unit, mask=inside, other=0) != 0
        tl.store(slots + 2 * at, tl.where(has_turn, slot, _NO_SLOT), mask=inside)
        tl.store(slots + 2 * at + 1, tl.where(has_turn, slot, overflow), mask=inside)


def begin_replay(head: torch.Tensor, words: torch.Tensor, groups: Groups, num_replays: int, overflow: int) -> None:
    """See ``replays.reference``."""
    if head.device.type != "cuda":  # Triton's interpreter
        _begin_replay[(1,)](head, words, *groups, num_replays, overflow, num_warps=1)
        return
    with torch.cuda.device(head.device):
        _begin_replay[(1,)](head, words, *groups, num_replays, overflow, num_warps=1)
