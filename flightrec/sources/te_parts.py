"""Joins an operand of a Transformer Engine product with what the tap knows of it into what a sink takes.

Owns a cache of metadata. Reads references only: never synchronises.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flightrec.records import QuantizerInfo
from flightrec.sources.extract_base import Extraction, with_facts
from flightrec.sources.extract_te import QuantizerState, extract_te

_MAX_INFOS = 4096
_infos: dict[tuple[int, tuple[tuple[str, Any], ...]], tuple[QuantizerInfo, QuantizerInfo]] = {}


def parts_of(operand: Any, state: QuantizerState, facts: tuple[tuple[str, Any], ...] = ()) -> Extraction:
    """Take an operand apart.

    Args:
        operand: one of Transformer Engine's quantized tensors or storage objects.
        state: of its quantizer.
        facts: more metadata; the same facts give the same metadata object.
    """
    parts, reason = extract_te(operand, state=state)
    if parts is None or not facts:
        return Extraction(parts, reason)
    key = (id(parts.info), facts)
    known = _infos.get(key)
    if known is None or known[0] is not parts.info:
        if len(_infos) >= _MAX_INFOS:
            _infos.clear()
        known = _infos[key] = (parts.info, with_facts(parts, dict(facts)).info)  # the first keeps its id its own
    return Extraction(dataclasses.replace(parts, info=known[1]))
