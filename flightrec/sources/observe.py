"""Decides how any tensor of the run can be recorded: as it is, with parts beside it, quantized, or not at all.

Owns nothing. Called inside ``quiet`` on the training thread and on autograd's threads. Never synchronises, and changes
no tensor of the run: a sparse gradient is taken as it is, coalesced or not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flightrec.kernels.formats import as_bits
from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources import sharded
from flightrec.sources.extract import dtype_name, extract, is_quantized, with_facts
from flightrec.sources.extract_te import identity_data
from flightrec.sources.memory import why_unreadable
from flightrec.sources.plain import is_known_plain, remember_plain
from flightrec.sources.quantized import Quantized


class Observed(NamedTuple):
    """What ``observe`` found: ``plain``, ``quantized`` or both; or the reason for neither.

    Attributes:
        plain: detached plain tensor, on the original's memory where that holds the values as they are, or None.
        quantized: what ``extract`` takes: the quantized tensor itself, or finished parts; or None.
        reason: why the tensor cannot be recorded.
    """

    plain: torch.Tensor | None = None
    quantized: object | None = None
    reason: str = ""


def observe(tensor: torch.Tensor) -> Observed:
    """Decide how ``tensor`` can be recorded.

    Call it inside ``quiet``. The result shares the tensor's memory wherever possible, has no autograd history, and must
    not outlive the hook. Never synchronises.

    Returns:
        For a plain tensor itself. For a sparse, jagged or masked one its values as ``plain``, with positions as parts.
        For a ``DTensor`` the same of its local part, with the placement as metadata. Quantized tensors and unknown
        wrappers as ``quantized``.
    """
    kind = type(tensor)
    if is_known_plain(tensor):
        return Observed(tensor if kind is torch.Tensor and not tensor.requires_grad else tensor.detach())
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
        return _native(tensor)
    if isinstance(tensor, FakeTensor):
        return Observed(reason="fake tensor without data")
    if is_lazy(tensor):
        return Observed(reason="lazy parameter without data yet")
    if sharded.is_dtensor(tensor):
        return _dtensor(tensor)
    if _is_named(kind, "AsyncCollectiveTensor"):
        return Observed(reason="a collective that has not been waited for: its memory does not hold the result yet")
    if tensor.is_nested:
        return _jagged(tensor)
    if _is_named(kind, "MaskedTensor"):
        return _masked(tensor)
    held = identity_data(tensor)
    if held is not None:
        return _native(held)
    if is_quantized(tensor):
        return Observed(quantized=tensor)
    if _has_own_memory(kind):
        return _native(tensor.detach().as_subclass(torch.Tensor))
    return Observed(reason=f"tensor subclass {kind.__module__}.{kind.__qualname__} is not known")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Say whether this is a parameter or buffer of a lazy module that has no data yet."""
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def _native(tensor: torch.Tensor) -> Observed:
    """A tensor of torch's own class."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return Observed(reason="inside a functorch transform (vmap, grad, jvp): it holds no values of its own")
    if tensor.device.type == "meta":
        return Observed(reason="meta tensor without data")
    if tensor.is_nested:
        return _nested(tensor)
    if tensor.layout is not torch.strided:
        return _sparse(tensor)
    if tensor.is_quantized:
        return Observed(quantized=tensor)
    plain = tensor.detach()
    if plain._is_zerotensor():
        plain = plain.clone()
    elif plain.is_neg():  # lazily negated: no plain array yet
        plain = plain.resolve_neg()
    reason = why_unreadable(plain)
    if reason:
        return Observed(reason=reason)
    if plain.dtype in _WITHOUT_NUMBERS:
        return _raw(plain)
    if not (tensor._is_zerotensor() or tensor.is_neg()):
        remember_plain(tensor)
    return Observed(plain=plain)


# Shell dtypes: no operation turns them into numbers.
_WITHOUT_NUMBERS = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)


def _raw(plain: torch.Tensor) -> Observed:
    """Codes without a scale: packed FP4 is known, the shell dtypes are kept as bytes and never judged."""
    name = dtype_name(plain.dtype)
    if name == "float4_e2m1fn_x2":
        return Observed(quantized=Quantized(plain.view(torch.uint8), name))
    info = QuantizerInfo("torch.Tensor", name, "none", (), {})
    return Observed(quantized=QuantizedParts(info, {"data": as_bits(plain)}, {"data": name}, is_understood=False))


def _with_parts(
    values: torch.Tensor, info: QuantizerInfo, components: dict[str, torch.Tensor], *, has_rows: bool = False
) -> Observed:
    """``values`` are what counts; ``components`` say where they stand."""
    inner = _native(values)
    if inner.plain is None:
        return Observed(reason=f"{info.class_name}: its values: {inner.reason or dtype_name(values.dtype)}")
    components = {name: part.detach() for name, part in components.items()}
    for name, part in components.items():
        reason = why_unreadable(part)
        if reason:
            return Observed(reason=f"{info.class_name}: {name}: {reason}")
    formats = {name: dtype_name(part.dtype) for name, part in components.items()}
    return Observed(inner.plain, QuantizedParts(info, components, formats, has_rows=has_rows))


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _sparse(tensor: torch.Tensor) -> Observed:
    """Stored values and their positions. The number of values is known to the host: it is the parts' shape."""
    layout = str(tensor.layout).removeprefix("torch.")
    metadata: dict[str, Any] = {"layout": layout, "shape": list(tensor.shape)}
    if tensor.layout is torch.sparse_coo:
        values = tensor._values()
        components = {"indices": tensor._indices()}
        metadata |= {"sparse_dim": tensor.sparse_dim(), "coalesced": tensor.is_coalesced()}
    elif tensor.layout in _COMPRESSED:
        values = tensor.values()
        components = {name: getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]}
        metadata["dense_dim"] = tensor.dense_dim()
    else:
        return Observed(reason=f"layout {layout} has no plain arrays inside")
    info = QuantizerInfo(f"torch.{layout}", dtype_name(tensor.dtype), "none", (), metadata)
    return _with_parts(values, info, components)


def _nested(tensor: torch.Tensor) -> Observed:
    """A nested tensor of the strided kind: one buffer, and the shapes of its members."""
    if not tensor.is_contiguous():
        return Observed(reason="nested tensor that is not contiguous")
    sizes = tensor._nested_tensor_size()  # always on the CPU
    info = QuantizerInfo("torch.nested", dtype_name(tensor.dtype), "none", (), {"layout": "strided"})
    return _with_parts(tensor.values(), info, {"sizes": sizes} if tensor.device.type == "cpu" else {})


def _jagged(tensor: Any) -> Observed:
    """A nested tensor of the jagged kind: its rows one after the other, and where each member starts."""
    values, offsets, lengths = tensor._values, tensor._offsets, getattr(tensor, "_lengths", None)
    metadata = {"layout": "jagged", "ragged_dim": int(tensor._ragged_idx)}
    info = QuantizerInfo("torch.nested", dtype_name(values.dtype), "none", (), metadata)
    if lengths is None:
        return _with_parts(values, info, {"offsets": offsets})
    found = _with_parts(values, info, {"offsets": offsets, "lengths": lengths})
    if found.plain is None:
        return found
    # Between the members lie elements of which nothing is known: kept, not judged.
    components = {"values": found.plain, "offsets": offsets.detach(), "lengths": lengths.detach()}
    formats = {name: dtype_name(part.dtype) for name, part in components.items()}
    return Observed(quantized=QuantizedParts(info, components, formats, is_understood=False))


def _masked(tensor: Any) -> Observed:
    """A ``MaskedTensor``: what the mask leaves out has no defined value and reads as 0."""
    data, mask = tensor._masked_data, tensor._masked_mask
    info = QuantizerInfo("torch.masked.MaskedTensor", dtype_name(data.dtype), "none", (), {"outside_mask": 0})
    if data.layout is not torch.strided or mask.layout is not torch.strided:
        return Observed(reason="MaskedTensor of a sparse layout")
    inner = _native(data)
    if inner.plain is None:
        return Observed(reason=f"MaskedTensor: {inner.reason or dtype_name(data.dtype)}")
    zero = torch.zeros((), dtype=data.dtype, device=data.device)
    return _with_parts(torch.where(mask, inner.plain, zero), info, {"mask": mask}, has_rows=True)


def _dtensor(tensor: Any) -> Observed:
    """This rank's part; never a collective."""
    local = sharded.local_part(tensor)
    found = observe(local)
    if found.plain is None and found.quantized is None:
        return Observed(reason=f"DTensor: {found.reason}")
    if found.quantized is None:
        return Observed(found.plain, QuantizedParts(sharded.info_of(tensor, dtype_name(local.dtype)), {}))
    parts, reason = extract(found.quantized)
    if parts is None:
        return Observed(found.plain, reason=f"DTensor: {reason}")
    return Observed(found.plain, with_facts(parts, {"dtensor": sharded.facts_of(tensor)}))


def _is_named(kind: type, name: str) -> bool:
    return any(base.__name__ == name for base in kind.__mro__)


def _has_own_memory(kind: type[torch.Tensor]) -> bool:
    """A subclass that only adds Python behaviour keeps its values in ordinary memory; a wrapper dispatches itself."""
    return kind.__torch_dispatch__ in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
