"""The byte bound: what keeping the same bytes costs at least, measured on this device.

The time of ``copy_`` of each record, and of one read of each that is kept as statistics only; launches do not count,
since the device is kept busy until all are queued. Waits for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from flightrec.bench.timing import wait

NUM_REPETITIONS = 5
WAIT_CYCLES_PER_CALL = 40_000
"""Some 20 us of a busy device for each call that is queued behind."""

MAX_SHARE = 0.3
"""Of the device's free memory: larger records than that share places."""


def byte_bound_s(copied: Sequence[int], read: Sequence[int], device: torch.device) -> float:
    """Seconds, the median of some repetitions.

    Args:
        copied: bytes of each component that is kept.
        read: bytes of each tensor that is read and not kept.
        device: where.
    """
    sizes = [num_bytes for num_bytes in (*copied, *read) if num_bytes]
    if not sizes:
        return 0.0
    room = min(sum(-(-num_bytes // 256) * 256 for num_bytes in sizes), _most_bytes(device))
    room = max(room, *sizes)
    source = torch.zeros(room, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pairs = [(target[at : at + size], source[at : at + size]) for at, size in _places(copied, room)]
    reads = [source[at : at + size // 8 * 8].view(torch.int64) for at, size in _places(read, room) if size >= 8]

    def work() -> None:
        for to, of in pairs:
            to.copy_(of)
        for of in reads:
            of.sum()

    work()
    return statistics.median(_timed(work, len(pairs) + len(reads), device) for _ in range(NUM_REPETITIONS))


def _most_bytes(device: torch.device) -> int:
    """What one of the two buffers may take."""
    if device.type == "cuda":
        return int(MAX_SHARE * torch.cuda.mem_get_info(device)[0])
    return 1 << 30


def _places(sizes: Sequence[int], room: int) -> list[tuple[int, int]]:
    """(offset, size) one behind the other, from the beginning again where the buffer ends: no cache holds them all."""
    found, at = [], 0
    for size in sizes:
        if at + size > room:
            at = 0
        if size:
            found.append((at, size))
        at += -(-size // 256) * 256
    return found


def _timed(work: object, num_calls: int, device: torch.device) -> float:
    assert callable(work)
    wait(device)
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(WAIT_CYCLES_PER_CALL * (num_calls + 10))
    begin.record()
    work()
    end.record()
    wait(device)
    return float(begin.elapsed_time(end)) / 1e3
