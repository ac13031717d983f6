"""The one entry to all formats of quantized tensors: chooses the codec by what the metadata say of a side.

``metadata["scheme"]`` names the family. Without it the general rule of ``scaled`` (or ``affine``, with a zero point)
applies. The two sides of a tensor may be of different families (hybrid): the column-wise side's own words stand in
``metadata["columnwise"]``. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import float8, fp8_block, grouped, identity, mxfp8, nvfp4, scaled, sides
from flightrec.errors import FormatError

DECODERS: dict[str, grouped.Decoder] = {
    family.SCHEME: family.decode for family in (float8, fp8_block, mxfp8, nvfp4, identity)
}
"""Codecs of the families, by scheme."""


def sides_of(present: Iterable[str]) -> list[str]:
    """Which sides have codes: ``rowwise``, ``columnwise``, both or none."""
    names = set(present)
    return [side for side, prefix in sides.PREFIXES.items() if f"{prefix}data" in names]


def component_names(present: Iterable[str], side: str) -> list[str]:
    """Those of the present components that a side's decoding looks at (``FormatError`` for an unknown side)."""
    wanted = {*scaled.COMPONENTS, "amax", *sides.SHARED}
    prefix = sides.prefix_of(side)
    return [name for name in sides.names_of(present, side) if name.removeprefix(prefix) in wanted]


def dequantize(
    components: Mapping[str, npt.NDArray[Any]],
    info: Mapping[str, Any],
    *,
    formats: Mapping[str, str] | None = None,
    shape: tuple[int, ...] | None = None,
    side: str | None = None,
) -> npt.NDArray[np.float32]:
    """Turn codes and scales into numbers, whatever the format.

    Args:
        components: stored arrays by name (``data``, ``scale_inv``, ``columnwise_data``, ...), as in a file.
        info: ``QuantizerInfo.to_json()``.
        formats: element format of each component.
        shape: logical shape, where it is known.
        side: ``rowwise`` or ``columnwise``; None for the first of them that has codes.

    Returns:
        float32, in the logical shape. Of a grouped tensor the members below each other (one after the other, flat,
        where they differ in columns).

    Raises:
        FormatError: a component or a word is missing or unknown, or shapes do not fit.
    """
    with _telling(info):
        return _dequantize(_side(components, info, formats, shape, side), info)


def _dequantize(chosen: sides.Side, info: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    scheme = chosen.metadata.get("scheme")
    if scheme is None:
        return scaled.apply(chosen, info)
    if scheme == grouped.SCHEME:
        return grouped.join(grouped.decode_members(chosen, DECODERS))
    if scheme not in DECODERS:
        known = ", ".join(sorted((*DECODERS, grouped.SCHEME)))
        raise FormatError(f"scheme {scheme!r} is not known to this version; expected one of {known}")
    return DECODERS[scheme](chosen)


def dequantize_members(
    components: Mapping[str, npt.NDArray[Any]],
    info: Mapping[str, Any],
    *,
    formats: Mapping[str, str] | None = None,
    side: str | None = None,
) -> list[npt.NDArray[np.float32]]:
    """The members of a grouped tensor; arguments and errors as ``dequantize``.

    Returns:
        float32 [rows, columns] each.

    Raises:
        FormatError: also for a tensor that is not grouped.
    """
    with _telling(info):
        chosen = _side(components, info, formats, None, side)
        if chosen.metadata.get("scheme") != grouped.SCHEME:
            raise FormatError(
                f"only a grouped tensor has members; this one is {info.get('class_name') or info.get('format')}"
            )
        return grouped.decode_members(chosen, DECODERS)


@contextmanager
def _telling(info: Mapping[str, Any]) -> Iterator[None]:
    """Metadata come from a file: words of wrong types are told as what they are, not as an error of ours."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError) as error:
        what = str(info.get("class_name") or info.get("format"))[:200]
        raise FormatError(
            f"{what}: metadata and arrays do not fit together, {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _side(
    components: Mapping[str, npt.NDArray[Any]],
    info: Mapping[str, Any],
    formats: Mapping[str, str] | None,
    shape: tuple[int, ...] | None,
    side: str | None,
) -> sides.Side:
    if side is None:
        side = next(iter(sides_of(components)), "rowwise")
    return sides.take(components, info, formats=formats, shape=shape, side=side)
