"""How much memory the ring takes, what is left out when the selection does not fit, and the table that tells it.

Host arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DEFAULT_SHARE = 0.05
"""Share of the device's free memory that the ring takes when ``ring.memory`` is not given."""

_CPU_LIMIT_BYTES = 4 << 30
_FALLBACK_BYTES = 4 << 30  # where the machine does not tell what is free


@dataclass(frozen=True, slots=True)
class Contributor:
    """One tensor's part of the ring, all its microbatches, phases and calls together.

    Attributes:
        layer, tensor, part: whose.
        num_bytes: bytes an iteration, kept or wanted.
        share: of all bytes that are wanted an iteration.
        num_records: keys that make it up.
        what: ``kept``, or why (some of) its bytes are not.
    """

    layer: str
    tensor: str
    part: str
    num_bytes: int
    share: float
    num_records: int
    what: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy makes of a selection.

    Attributes:
        iterations: complete iterations up to a fault that the ring will hold.
        microbatches: whose microbatches' bytes are kept.
        dropped: groups kept as statistics only.
    """

    iterations: int
    microbatches: str
    dropped: frozenset[Hashable]


def decide(
    sizes_of: Callable[[str], Mapping[Hashable, int]],
    *,
    budget_bytes: int,
    policy: str,
    iterations: int,
    more_slots: int,
    microbatches: str,
) -> Decision | None:
    """Apply ``ring.on_out_of_memory``.

    Args:
        sizes_of: bytes a slot of each group under a setting of ``ring.microbatches``.
        budget_bytes: for all slots together.
        policy: ``fewer_microbatches``, ``fewer_iterations``, ``statistics_only`` or ``error``.
        iterations: N as asked for.
        more_slots: slots beside N: after, latency and scrap.
        microbatches: the setting asked for.

    Returns:
        the decision, or None when it does not fit and the policy is ``error``.
    """
    sizes = sizes_of(microbatches)

    def fits() -> bool:
        return sum(sizes.values()) * (iterations + more_slots) <= budget_bytes

    if not fits() and policy == "error":
        return None
    if not fits() and policy == "fewer_microbatches" and microbatches == "all":
        microbatches = "first"
        sizes = sizes_of(microbatches)
    if not fits() and policy == "fewer_iterations":
        iterations = max(1, budget_bytes // sum(sizes.values()) - more_slots)
    if fits():
        return Decision(iterations, microbatches, frozenset())
    return Decision(iterations, microbatches, keep_smallest(sizes, budget_bytes // (iterations + more_slots)))


def default_memory_bytes(device: torch.device) -> int:
    """5% of what is free now; on a CPU no more than 4 GiB."""
    share = int(free_memory_bytes(device) * DEFAULT_SHARE)
    return share if device.type == "cuda" else min(share, _CPU_LIMIT_BYTES)


def free_memory_bytes(device: torch.device) -> int:
    """What a device has free now; for a CPU the host's ``MemAvailable``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return _FALLBACK_BYTES


def keep_smallest(sizes: Mapping[Hashable, int], room_bytes: int) -> frozenset[Hashable]:
    """Groups to drop so that the rest fits into ``room_bytes`` a slot: the largest ones, equal ones from the end."""
    dropped, used = [], 0
    for group, size in sorted(sizes.items(), key=lambda item: item[1]):
        used += size
        if used > room_bytes:
            dropped.append(group)
    return frozenset(dropped)


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_table(contributors: Sequence[Contributor], limit: int) -> list[str]:
    """The largest contributors as lines of text."""
    lines = [f"{'an iteration':>12}  {'share':>6}  tensor"]
    for row in contributors[:limit]:
        name = " ".join(word for word in (row.layer or "(no layer)", row.tensor, row.part) if word)
        times = f" x{row.num_records}" if row.num_records > 1 else ""
        note = "" if row.what == "kept" else f"  [{row.what}]"
        lines.append(f"{format_bytes(row.num_bytes):>12}  {row.share:>6.1%}  {name}{times}{note}")
    rest = contributors[limit:]
    if rest:
        num_bytes, share = sum(row.num_bytes for row in rest), sum(row.share for row in rest)
        lines.append(f"{format_bytes(num_bytes):>12}  {share:>6.1%}  ({len(rest)} more)")
    return lines
