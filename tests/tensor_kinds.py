"""Every kind of tensor that a model may hold: how it is made, healthy or with a NaN, and what an incident must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SHAPE = (4, 6)


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        make: makes a tensor; with ``spoil`` one element (of a stored value) is NaN.
        high_precision: what ``record.high_precision`` must be, None if there is none.
        dequantized: what ``record.quantized.dequantize()`` must be, None if there is nothing to dequantize.
        components: further components by name.
        can_hold_nan: whether a NaN in it must fire ``nonfinite``.
        blind: part of the reason if it cannot be recorded at all.
    """

    make: Callable[[bool], torch.Tensor]
    high_precision: Callable[[Any], Any] | None = None
    dequantized: Callable[[Any], Any] | None = None
    components: Callable[[Any], dict[str, Any]] | None = None
    can_hold_nan: bool = True
    blind: str = ""


class TwoParts(torch.Tensor):
    """A stranger's wrapper with two inner tensors, whose values nobody but its class can tell."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, device=left.device)

    def __init__(self, left, right):
        self._left, self._data = left, right

    def __tensor_flatten__(self):
        return ["_left", "_data"], {"version": 7}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._left, args[0]._data)
        raise NotImplementedError(f"{func} of this tensor may not be needed")


class Opaque(torch.Tensor):
    """A wrapper that tells nothing of its insides."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, SHAPE)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls()
        raise NotImplementedError(f"{func} of this tensor may not be needed")


def dense(spoil: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.linspace(-2, 2, 24).reshape(SHAPE) + 0.01
    if spoil:
        x[1, 2] = torch.nan
    return x.to(dtype)


def integers(dtype: torch.dtype) -> Callable[[bool], torch.Tensor]:
    return lambda spoil: torch.arange(24).reshape(SHAPE).remainder(7).to(dtype)


def sparse(spoil: bool) -> torch.Tensor:
    index = torch.tensor([[0, 0, 3], [1, 1, 5]])  # one twice: not coalesced
    return torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0, torch.nan if spoil else 3.0]), SHAPE)


def compressed(name: str) -> Callable[[bool], torch.Tensor]:
    def make(spoil: bool) -> torch.Tensor:
        convert = getattr(dense(spoil), f"to_sparse_{name}")
        return convert((2, 2)) if name.startswith("bs") else convert()

    return make


def complex_of(dtype: torch.dtype) -> Callable[[bool], torch.Tensor]:
    return lambda spoil: torch.complex(dense(spoil), dense(False).flip(0)).to(dtype)


def nested(layout: torch.layout) -> Callable[[bool], torch.Tensor]:
    return lambda spoil: torch.nested.nested_tensor([dense(spoil), dense(False)[:2]], layout=layout)


def masked(spoil: bool) -> torch.Tensor:
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[0, 0] = False
    data = dense(spoil)
    data[0, 0] = torch.nan  # outside the mask: means nothing
    return torch.masked.masked_tensor(data, mask)


def quantized(dtype: torch.dtype) -> Callable[[bool], torch.Tensor]:
    return lambda spoil: torch.quantize_per_tensor(dense(False), 0.02, 2, dtype)


def freed(spoil: bool) -> torch.Tensor:
    x = dense(spoil)
    x.untyped_storage().resize_(0)
    return x


def fake(spoil: bool) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(dense(spoil))


def numpy_of(x: torch.Tensor) -> np.ndarray:
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float8_e4m3fn) else x
    return wide.resolve_conj().resolve_neg().numpy()


def plain(make: Callable[[bool], torch.Tensor], *, can_hold_nan: bool = True) -> Kind:
    return Kind(make, numpy_of, can_hold_nan=can_hold_nan)


def _affine(dtype: torch.dtype) -> Kind:
    return Kind(
        quantized(dtype),
        dequantized=lambda x: x.dequantize().numpy(),
        components=lambda x: {"data": x.int_repr().numpy(), "zero_point": np.array(2)},
        can_hold_nan=False,
    )


KINDS: dict[str, Kind] = {
    "float32": plain(dense),
    "transposed": plain(lambda spoil: dense(spoil).t()),
    "expanded": plain(lambda spoil: dense(spoil)[1:2].expand(5, 6)),
    "lazily negated": plain(lambda spoil: torch.complex(dense(False), dense(spoil)).conj().imag),
    "0-dim": plain(lambda spoil: torch.tensor(torch.nan if spoil else 1.5)),
    "empty": plain(lambda spoil: torch.empty(0, 4), can_hold_nan=False),
    "float16": plain(lambda spoil: dense(spoil, torch.float16)),
    "bfloat16": plain(lambda spoil: dense(spoil, torch.bfloat16)),
    "float64": plain(lambda spoil: dense(spoil, torch.float64)),
    "float8": plain(lambda spoil: dense(spoil, torch.float8_e4m3fn)),
    "complex32": Kind(complex_of(torch.complex32), lambda x: x.to(torch.complex64).numpy()),
    "complex64": plain(complex_of(torch.complex64)),
    "complex64 conjugate": plain(lambda spoil: complex_of(torch.complex64)(spoil).conj()),
    "complex128": plain(complex_of(torch.complex128)),
    "bool": plain(integers(torch.bool), can_hold_nan=False),
    **{
        str(dtype).removeprefix("torch."): plain(integers(dtype), can_hold_nan=False)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64)
    },
    "sparse coo": Kind(sparse, lambda x: x._values().numpy(), components=lambda x: {"indices": x._indices().numpy()}),
    "sparse csr": Kind(
        compressed("csr"),
        lambda x: x.values().numpy(),
        components=lambda x: {"crow_indices": x.crow_indices().numpy(), "col_indices": x.col_indices().numpy()},
    ),
    "sparse csc": Kind(compressed("csc"), lambda x: x.values().numpy()),
    "sparse bsr": Kind(compressed("bsr"), lambda x: x.values().numpy()),
    "sparse bsc": Kind(
        compressed("bsc"),
        lambda x: x.values().numpy(),
        components=lambda x: {"ccol_indices": x.ccol_indices().numpy(), "row_indices": x.row_indices().numpy()},
    ),
    "nested": Kind(nested(torch.strided), lambda x: x.values().numpy()),
    "jagged": Kind(
        nested(torch.jagged), lambda x: x._values.numpy(), components=lambda x: {"offsets": x._offsets.numpy()}
    ),
    "masked": Kind(masked, lambda x: torch.where(x._masked_mask, x._masked_data, 0).numpy()),
    "qint8": _affine(torch.qint8),
    "quint8": _affine(torch.quint8),
    "qint32": _affine(torch.qint32),
    "packed fp4": Kind(
        lambda spoil: torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(torch.float4_e2m1fn_x2),
        components=lambda x: {"data": x.view(torch.uint8).numpy()},
        can_hold_nan=False,
    ),
    "wrapper": Kind(
        lambda spoil: TwoParts(dense(spoil), dense(spoil, torch.float8_e4m3fn)),
        components=lambda x: {"left": x._left.numpy(), "data": x._data.view(torch.uint8).numpy()},
        can_hold_nan=False,  # its NaN may mean anything
    ),
    "opaque wrapper": Kind(lambda spoil: Opaque(), blind="not known", can_hold_nan=False),
    "meta": Kind(lambda spoil: torch.empty(SHAPE, device="meta"), blind="meta", can_hold_nan=False),
    "fake": Kind(fake, blind="fake tensor", can_hold_nan=False),
    "freed": Kind(freed, blind="freed", can_hold_nan=False),
    "mkldnn": Kind(lambda spoil: dense(spoil).to_mkldnn(), blind="no plain arrays", can_hold_nan=False),
    "lazy": Kind(lambda spoil: torch.nn.UninitializedParameter(requires_grad=False), blind="lazy", can_hold_nan=False),
}
