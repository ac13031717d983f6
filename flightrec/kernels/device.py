"""Copy and statistics on the GPU by Triton kernels: the same results as ``reference``, in one launch.

For values of any number type, however they lie, and for codes of the formats that training uses: FP8 with float32
scales for a tensor or for blocks, MXFP8, MXFP4 and NVFP4. Everything else goes to ``reference``. Launches on the
caller's current stream and waits for nothing. What a place in the ring needs is worked out at its first record and kept
on its ``Destination`` (``prepared``); from then on a record is a look at its tensors' layout and a launch.

A kernel that cannot be compiled or launched (no compiler on the machine) ends the use of all of them, once and for all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from flightrec.hosthooks import describe
from flightrec.kernels import reference
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.kernels.prepared import Prepared

_PREPARED = -1
"""Key of a destination's ``cache``."""

_log = logging.getLogger("flightrec")
_gave_up = False


def capture(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> None:
    """Copy a record into its slot and write its statistics row and stamp: see ``reference.capture``."""
    if not _gave_up:
        try:
            prepared: Prepared | None = destination.cache.get(_PREPARED)
            queued = None if prepared is None else prepared(plan, high_precision, parts, slot, tick, valid_rows)
            if queued is None:
                prepared = prepare(plan, destination, high_precision, parts, valid_rows)
                queued = prepared(plan, high_precision, parts, slot, tick, valid_rows)
            if queued:
                return
        except Exception as error:
            _give_up(error)
    reference.capture(plan, destination, high_precision, parts, slot, tick, valid_rows)


def prepare(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    valid_rows: int | torch.Tensor | None = None,
) -> Prepared:
    """What all records like this one need, kept on ``destination``; launches and compiles nothing.

    The result may be called in the place of ``capture`` as long as it gives back true.
    """
    prepared = Prepared(plan, destination, high_precision, parts, valid_rows)
    destination.cache[_PREPARED] = prepared
    return prepared


def warm_up(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> bool:
    """Compile and load what ``capture`` of such a record launches, before a CUDA graph is captured.

    It is a capture: ``slot`` names a place that may be overwritten (scrap). A capture that meets an unknown kernel
    loads it all the same; this only keeps the seconds that compiling takes out of it.

    Returns:
        whether the kernels know the record; otherwise ``reference`` was called.
    """
    capture(plan, destination, high_precision, parts, slot, tick, valid_rows)
    prepared: Prepared | None = destination.cache.get(_PREPARED)
    return not _gave_up and prepared is not None and prepared.is_known


def _give_up(error: Exception) -> None:
    global _gave_up  # noqa: PLW0603  what one kernel lacks, all lack
    _gave_up = True
    why = describe(error)
    _log.warning("flightrec: Triton kernels do not work here, records will cost many times as much: %s", why)
