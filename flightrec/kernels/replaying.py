"""``replays.reference`` as one Triton kernel of one program: the first node of a captured graph, some 2 us a replay."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_replays", "overflow"])
def _begin_replay(head, words, num_replays, overflow):  # type: ignore[no-untyped-def]
    count = tl.load(words)
    fits = count < num_replays
    slot = tl.load(head + 1) * num_replays + count
    tl.store(words + 1, tl.where(fits, slot, overflow))
    tl.store(words + 2, tl.where(fits, tl.load(head + 2), -1))
    order = tl.atomic_add(head, 1)  # graphs on different streams may begin at once
    tl.store(words + 3 + count, order, mask=fits)
    tl.store(words, count + 1)


def begin_replay(head: torch.Tensor, words: torch.Tensor, num_replays: int, overflow: int) -> None:
    """See ``replays.reference``."""
    if head.device.type != "cuda":  # Triton's interpreter
        _begin_replay[(1,)](head, words, num_replays, overflow, num_warps=1)
        return
    with torch.cuda.device(head.device):
        _begin_replay[(1,)](head, words, num_replays, overflow, num_warps=1)
