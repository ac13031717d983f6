"""Writes arrays as an incident holds them into one file: NumPy's ``.npz``, or ``.safetensors``. Owns no state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base
from flightrec.errors import MissingExtraError

Arrays = Mapping[str, tuple[npt.NDArray[Any], str]]
"""Name to array and element format."""

FILES = {"npz": "tensors.npz", "safetensors": "tensors.safetensors"}
_SAFETENSORS = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64", "bool", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "float8_e8m0fnu"),
    }
)
"""Formats that safetensors has; of others the bytes are stored."""


def load(kind: str) -> Any:
    """Import what a file format needs; None where nothing is.

    Raises:
        MissingExtraError: the package is not installed.
    """
    if kind == "npz":
        return None
    try:
        import safetensors.numpy
    except ImportError as error:
        raise MissingExtraError(
            "--format safetensors needs the package safetensors, which is not installed: "
            "pip install 'torch-flightrec[export]', or take --format npz"
        ) from error
    return safetensors.numpy


def write(folder: Path, kind: str, arrays: Arrays) -> str:
    """Write all arrays, exactly.

    Args:
        folder: where.
        kind: ``npz`` (bit patterns as unsigned integers) or ``safetensors`` (BF16, F8_E4M3 and the like as such).
        arrays: as they come from a file; packed FP4, FP6 and unknown formats as bytes.

    Returns:
        Name of the file.

    Raises:
        MissingExtraError: the package is not installed.
    """
    name = FILES[kind]
    if kind == "npz":
        stored: dict[str, Any] = {key: array for key, (array, _) in arrays.items()}
        np.savez(folder / name, **stored)
        return name
    entries = {key: _entry(array, form) for key, (array, form) in arrays.items()}
    formats = {key: form for key, (_, form) in arrays.items()}
    load(kind).save_file(entries, str(folder / name), metadata=formats)
    return name


def _entry(array: npt.NDArray[Any], form: str) -> npt.NDArray[Any]:
    """The array as a numpy type that safetensors knows by its name."""
    array = np.asarray(array, order="C")
    if form not in _SAFETENSORS:
        return np.frombuffer(array.tobytes(), np.uint8)
    codes = base.element_format(form).codes
    dtype = np.dtype(bool) if form == "bool" else array.dtype if codes is None else codes
    return array.view(dtype)
