"""Tells Transformer Engine's quantized objects by the names of their classes, which need not be imported for it.

The one way in which its objects are recognised; the answer is looked for once a class. Pure functions; any thread.
"""

from __future__ import annotations

_PACKAGE = "transformer_engine"
STORAGES = ("QuantizedTensorStorage", "QuantizedTensorBase")
"""Base of all quantized tensors and storage objects, in this version and in older ones."""

_GROUPED = "GroupedTensorStorage"
_MAX_CLASSES = 4096
_known: dict[type, frozenset[str]] = {}


def te_classes(kind: type) -> frozenset[str]:
    """Names of the classes of Transformer Engine that ``kind`` is, or is made from; empty for a stranger's."""
    try:
        return _known[kind]
    except KeyError:
        if len(_known) >= _MAX_CLASSES:
            _known.clear()
        found = {base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == _PACKAGE}
        return _known.setdefault(kind, frozenset(found))


def is_storage(value: object) -> bool:
    """Say whether this is one of Transformer Engine's quantized tensors or storage objects, not one for several."""
    names = te_classes(type(value))
    return bool(names) and not names.isdisjoint(STORAGES)


def is_grouped(value: object) -> bool:
    """Say whether this is one buffer for several experts (``GroupedTensorStorage``)."""
    return _GROUPED in te_classes(type(value))
