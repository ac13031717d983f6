"""Joins an operand of a Transformer Engine product with its quantizer's state into what a sink takes.

Owns nothing. Reads references only: never synchronises, launches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract import Extraction, with_facts
from flightrec.sources.te_state import LiveState


def parts_of(operand: Any, live: LiveState, facts: Mapping[str, Any]) -> Extraction:
    """Take an operand apart.

    Args:
        operand: one of Transformer Engine's quantized tensors or storage objects.
        live: the state of its quantizer.
        facts: more metadata.
    """
    codes = {7: "float8_e4m3fn", 8: "float8_e5m2"}
    components: dict[str, torch.Tensor] = {}
    data = operand._data if operand._data is not None else operand._transpose.movedim(0, -1)
    components["data"] = data.detach()
    components["scale_inv"] = operand._scale_inv.detach()
    for name in ("scale", "amax", "amax_history"):
        tensor = getattr(live, name)
        if tensor is not None:
            components[name] = tensor
    kind = type(operand)
    info = QuantizerInfo(
        f"{kind.__module__}.{kind.__qualname__}",
        codes[int(operand._fp8_dtype)],
        "multiply_to_decode",
        (),
        {"recipe": dict(live.recipe)},
    )
    parts = QuantizedParts(info, components, {"data": info.format}, pair_codes="data")
    return Extraction(with_facts(parts, facts) if facts else parts)
