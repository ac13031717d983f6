"""Distributed tensors: this rank's part of one, and where in the whole it lies.

Never communicates and never waits: everything is read from what the tensor object already holds. Imports nothing of
torch.distributed: a distributed tensor can only exist if that is loaded already. Owns a cache of metadata.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from flightrec.records import QuantizerInfo

_UTILITIES = "torch.distributed.tensor._utils"


def is_dtensor(value: object) -> bool:
    """Say whether this is a ``DTensor`` (or of a subclass)."""
    return isinstance(value, torch.Tensor) and any(base.__name__ == "DTensor" for base in type(value).__mro__)


def local_part(value: Any) -> torch.Tensor:
    """This rank's part of a ``DTensor``: its own memory, without a collective and without waiting for one."""
    local: torch.Tensor = value._local_tensor
    return local


def facts_of(value: Any) -> dict[str, Any]:
    """Where a ``DTensor``'s local part lies, as JSON-able metadata.

    ``placements`` (``Shard(dim=0)``, ``Replicate()``, ``Partial(sum)``), ``mesh_shape``, ``mesh_axes`` (names),
    ``mesh_coordinate`` of this rank, ``global_shape``, and ``local_offset`` of the first local element in the whole
    (left out where a placement does not tell). Cached by the tensor's specification.
    """
    return _facts(value._spec)


def info_of(value: Any, element_format: str) -> QuantizerInfo:
    """Metadata of a ``DTensor`` whose local part is a plain tensor of ``element_format``."""
    return _info(value._spec, element_format)


@functools.lru_cache(maxsize=4096)
def _info(spec: Any, element_format: str) -> QuantizerInfo:
    return QuantizerInfo("torch.distributed.tensor.DTensor", element_format, "none", (), _facts(spec))


@functools.lru_cache(maxsize=4096)
def _facts(spec: Any) -> dict[str, Any]:
    mesh = spec.mesh
    coordinate = mesh.get_coordinate()
    facts: dict[str, Any] = {
        "placements": [repr(placement) for placement in spec.placements],
        "mesh_shape": list(mesh.shape),
        "mesh_axes": list(mesh.mesh_dim_names or ()),
        "mesh_coordinate": None if coordinate is None else list(coordinate),
        "global_shape": list(spec.shape),
    }
    utilities = sys.modules.get(_UTILITIES)
    try:
        if utilities is not None:
            _, offset = utilities.compute_local_shape_and_global_offset(spec.shape, mesh, spec.placements)
            facts["local_offset"] = [int(start) for start in offset]
    except Exception:  # another version's function, or a placement that it does not know: the offset is a convenience
        facts.pop("local_offset", None)
    return facts
