"""One side of a quantized tensor: its arrays without the prefix of their names, and what its metadata say of it.

Row-wise and column-wise data of one tensor may differ in everything: format, blocks, order, class. ``take`` brings each
to the same shape, so that the codecs know of no sides. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base
from flightrec.errors import FormatError

Array = npt.NDArray[Any]

ENCODE = "multiply_to_encode"
DECODE = "multiply_to_decode"
NONE = "none"

PREFIXES = {"rowwise": "", "columnwise": "columnwise_"}
SHARED = frozenset({"first_dims", "last_dims", "tensor_offsets"})
"""Components that belong to both sides: how a grouped tensor is split."""

_OWN_WORDS = ("format", "scale_direction", "block_shape")


@dataclass(frozen=True)
class Side:
    """What a codec is given.

    Attributes:
        name: ``rowwise`` or ``columnwise``.
        components: stored arrays, named without ``columnwise_``.
        formats: element formats, named likewise; may lack some.
        format: element format of the codes.
        scale_direction: ``multiply_to_encode``, ``multiply_to_decode``, ``none`` or a word that is not understood.
        block_shape: elements that share a scale, in the codes' own dimensions; empty for the ratio of the shapes.
        metadata: of this side.
        shape: logical shape of the tensor, or None where it is not known.
    """

    name: str
    components: Mapping[str, Array]
    formats: Mapping[str, str]
    format: str
    scale_direction: str
    block_shape: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None

    def full_name(self, name: str) -> str:
        """Name of a component in the file."""
        return PREFIXES[self.name] + name

    def need(self, name: str, what: str) -> Array:
        """A component that must be there.

        Raises:
            FormatError: it is not; says ``what`` is missing, and what there is.
        """
        if name not in self.components:
            there = sorted(self.full_name(other) for other in self.components)
            raise FormatError(f"{what}: component {self.full_name(name)!r} is missing among {there}")
        return self.components[name]

    def codes(self) -> Array:
        """The component ``data`` (``FormatError`` when the side has none)."""
        return self.need("data", f"the {self.name} side has no codes")

    def with_components(self, **changes: Array) -> Side:
        """The same side with other arrays in place of some of its own."""
        return replace(self, components={**self.components, **changes})

    def with_format(self, name: str, element: str) -> Side:
        """The same side, a component's element format told where the file tells none or plain bytes."""
        if self.formats.get(name) not in (None, "uint8"):
            return self
        return replace(self, formats={**self.formats, name: element})


def prefix_of(side: str) -> str:
    """Beginning of the names of a side's components (``FormatError`` for an unknown side)."""
    if side not in PREFIXES:
        raise FormatError(f"side {side!r} is not known; expected rowwise or columnwise")
    return PREFIXES[side]


def names_of(present: Iterable[str], side: str) -> list[str]:
    """Those of the present components that belong to a side, ``high_precision`` never."""
    is_columnwise = bool(prefix_of(side))
    mine = [n for n in present if n in SHARED or n.startswith(PREFIXES["columnwise"]) == is_columnwise]
    return [name for name in mine if name != "high_precision"]


def take(
    components: Mapping[str, Array],
    info: Mapping[str, Any],
    *,
    formats: Mapping[str, str] | None = None,
    shape: tuple[int, ...] | None = None,
    side: str = "rowwise",
) -> Side:
    """One side of a tensor.

    Args:
        components: stored arrays of the tensor by name.
        info: ``QuantizerInfo.to_json()``. The column-wise side's own words stand in ``metadata["columnwise"]``, where
            they differ from the tensor's; a side without words of its own about blocks has none.
        formats: element format of each component; what it lacks is ``info["format"]`` for the codes.
        shape: logical shape, None if it is not known; ``metadata["logical_shape"]`` goes before it.
        side: ``rowwise`` or ``columnwise``.

    Raises:
        FormatError: the side is neither.
    """
    prefix = prefix_of(side)
    metadata: Mapping[str, Any] = info.get("metadata") or {}
    words: Mapping[str, Any] = info
    own = metadata.get("columnwise")
    if prefix:
        words = {**info, "block_shape": ()}
        if isinstance(own, Mapping):
            words = {**words, **{word: own[word] for word in _OWN_WORDS if word in own}}
            metadata = {**{key: value for key, value in metadata.items() if key not in ("columnwise", "scheme")}, **own}
        metadata = {**metadata, "transposed": metadata.get("transposed") or metadata.get("columnwise_transposed")}
    logical = metadata.get("logical_shape")
    names = names_of(components, side)
    return Side(
        name=side,
        components={name.removeprefix(prefix): np.asarray(components[name]) for name in names},
        formats={name.removeprefix(prefix): form for name, form in (formats or {}).items() if name in names},
        format=str(words.get("format", "")),
        scale_direction=str(words.get("scale_direction", NONE)),
        block_shape=tuple(words.get("block_shape") or ()),
        metadata=metadata,
        shape=tuple(logical) if logical else shape,
    )


def read_codes(side: Side, shape: tuple[int, ...] | None) -> npt.NDArray[np.float32]:
    """The codes' own numbers, float32; ``shape`` is that of the stored codes in elements, None if it is not known.

    Raises:
        FormatError: there are none, their format is not known, or they are no codes of ``shape``.
    """
    stored = side.codes()
    name = side.formats.get("data") or side.format
    packed = base.element_format(name).elements_per_item == 2
    columns = shape[-1] if shape and packed else None
    values = base.decode(stored, name, num_columns=columns).astype(np.float32, copy=False)
    if shape is not None and values.shape != shape:
        raise FormatError(f"codes of shape {values.shape} in a tensor of shape {shape}")
    return values


def read_scale(side: Side, name: str) -> npt.NDArray[np.float32]:
    """A scale component's numbers, float32.

    Raises:
        FormatError: it is missing, or it holds codes of a format that nothing tells.
    """
    stored = side.need(name, f"scales that {side.scale_direction} are missing")
    element = side.formats.get(name)
    if element is None:
        if stored.dtype.kind != "f":
            raise FormatError(
                f"component {side.full_name(name)!r} holds codes of {stored.dtype}; their format is needed"
            )
        return stored.astype(np.float32)
    return base.decode(stored, element).astype(np.float32)


def in_shape(values: Array, side: Side) -> npt.NDArray[np.float32]:
    """The numbers in the tensor's logical shape, where codes were held with leading dimensions flattened.

    Raises:
        FormatError: they are not as many.
    """
    shape = values.shape if side.shape is None else side.shape
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise FormatError(f"codes of shape {values.shape} in a tensor of shape {shape}")
    return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)
