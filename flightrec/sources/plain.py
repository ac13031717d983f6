"""Tells a plain tensor from all others in a few calls, once ``observe`` has seen its like.

What else a tensor may be (sparse, nested, quantized, lazily negated or zero, on meta, inside functorch, a wrapper)
stands in its dispatch keys, so that a set of keys that was plain once is plain always. Owns the sets seen so far, a
few a process; any thread.
"""

from __future__ import annotations

import torch

from flightrec.sources.memory import why_unreadable

_MAX_KEYS = 256
_plain_keys: set[tuple[int, torch.dtype]] = set()


def remember_plain(tensor: torch.Tensor) -> None:
    """Note that a tensor of torch's own class is recorded as it is."""
    if len(_plain_keys) < _MAX_KEYS:
        _plain_keys.add((torch._C._dispatch_keys(tensor).raw_repr(), tensor.dtype))


def forget_plain() -> None:
    """Look at every tensor in full again, until its like was seen."""
    _plain_keys.clear()


def is_known_plain(tensor: torch.Tensor) -> bool:
    """Say whether ``observe`` would take this tensor as it is: a no only means that it must look.

    True for tensors of torch's own classes whose keys and dtype were seen before, and whose memory is there. Never
    synchronises.
    """
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter and kind is not torch.nn.Buffer:
        return False
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    if (keys, tensor.dtype) not in _plain_keys:
        return False
    return has_memory(tensor) if tensor.is_contiguous() else not why_unreadable(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor is contiguous and all its elements lie inside its memory."""
    if not tensor.is_contiguous():
        return False
    offset_bytes = tensor.storage_offset()
    if offset_bytes:
        offset_bytes *= tensor.element_size()
    return offset_bytes + tensor.nbytes <= tensor.untyped_storage().nbytes()
