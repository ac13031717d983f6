"""What a sink does with a tensor that is seen while a CUDA graph is captured.

On the thread that captures; called by ``Capture.capture``, behind its guard. What a graph hides is said here, at its
capture: a replay runs no code of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flightrec.engine import Engine
from flightrec.records import Key
from flightrec.ring.layout import QuantizedParts
from flightrec.ring.turns import Turn


def record_captured(
    engine: Engine,
    key: Key,
    high_precision: torch.Tensor | None,
    parts: QuantizedParts | None,
    valid_rows: int | torch.Tensor | None,
    splits: torch.Tensor | Sequence[int] | None,
    keep: frozenset[str],
    blind: Callable[[str, str, str], None],
    turn: Turn,
) -> None:
    """Record into the graph, or say why not.

    Args:
        engine: where to.
        key: as captured.
        high_precision: as of ``Capture.capture``, and so the following.
        parts: of the quantized form.
        valid_rows: a number holds for all replays.
        splits: rows of each expert; on the device.
        keep: which bytes.
        blind: told the layer, the tensor and the reason of what is not recorded.
        turn: what it takes turns with, in the replays.
    """
    counts = None
    if splits is not None:
        if isinstance(splits, torch.Tensor) and splits.device == engine.device:
            counts = splits.detach().to(torch.int64)
        else:
            blind(key.layer, f"{key.tensor} by expert", "inside a CUDA graph the splits must be on the device")
    if isinstance(valid_rows, torch.Tensor) and valid_rows.device != engine.device:
        valid_rows = int(valid_rows) if valid_rows.device.type == "cpu" else None
    reason = engine.ring.record_captured(
        key, high_precision=high_precision, quantized=parts, keep=keep, valid_rows=valid_rows, splits=counts,
        turn=turn,
    )  # fmt: skip
    if reason:
        blind(key.layer, key.tensor, reason)
    if counts is not None:
        part = ".".join(filter(None, (key.tensor, key.part, "splits")))
        engine.ring.record_captured(replace(key, tensor="metric", part=part), high_precision=counts, turn=turn)
