"""Transformer Engine's own Python code where there is no GPU: a stand-in for its compiled extension.

``install()`` lets the quantized tensor classes and the debug layer of the real package be imported. What the extension
computes is not there: a kernel that is called raises. With a CUDA device and the real extension nothing is replaced.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
import types
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

VERSION = "2.20.2"
EXTENSION = "transformer_engine_torch"
_PACKAGE = "transformer_engine.pytorch"

# The values are those of the compiled module.
_DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
_OPTIMIZER_KERNELS = (
    *("scale", "compute_scale_and_scale_inv", "compute_scale_inv_e8m0", "scale_tensor", "l2norm", "unscale_l2norm"),
    *("adam", "adam_fp8", "adam_capturable", "adam_capturable_master", "sgd"),
)
_KERNELS = ("quantize", "dequantize", "fp8_transpose", *(f"multi_tensor_{name}" for name in _OPTIMIZER_KERNELS))


def install() -> None:
    """Make ``transformer_engine`` importable; skips the test where the package is not installed. May be repeated."""
    if EXTENSION in sys.modules:
        return
    try:
        found = version("transformer_engine")
    except PackageNotFoundError:
        pytest.skip("transformer_engine is not installed")
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(_PACKAGE)
        return
    assert found == VERSION, f"the stand-in was written for Transformer Engine {VERSION}, found {found}"
    sys.modules[EXTENSION] = _extension()
    _skip_the_libraries()
    importlib.import_module(f"{_PACKAGE}.tensor")  # the first of several that import each other


def _extension() -> types.ModuleType:
    module = types.ModuleType(EXTENSION)
    contents: dict[str, Any] = {name: _kernel(name) for name in _KERNELS}
    contents["DType"] = enum.IntEnum("DType", _DTYPES)
    forward = [f"GEMM{product}_{name}" for product in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")]
    backward = [f"GRAD_{name}{product}" for product in (1, 2, 3) for name in ("OUTPUT", "INPUT")]
    contents["FP8FwdTensors"] = enum.IntEnum("FP8FwdTensors", forward, start=0)
    contents["FP8BwdTensors"] = enum.IntEnum("FP8BwdTensors", backward, start=0)
    vars(module).update(contents)
    return module


def _kernel(name: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{EXTENSION}.{name} is a GPU kernel and not here")

    return kernel


def _skip_the_libraries() -> None:
    """Import the package without loading its shared libraries, and its torch part without modules and attention."""
    before = os.environ.get("NVTE_PROJECT_BUILDING")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = importlib.import_module("transformer_engine")
            common: Any = importlib.import_module("transformer_engine.common")
    finally:
        os.environ.pop("NVTE_PROJECT_BUILDING")
        if before is not None:
            os.environ["NVTE_PROJECT_BUILDING"] = before
    common.load_framework_extension = lambda framework: None
    torch_part = types.ModuleType(_PACKAGE)
    torch_part.__path__ = [os.path.join(package.__path__[0], "pytorch")]
    sys.modules[_PACKAGE] = torch_part
    vars(package)["pytorch"] = torch_part
    constants = importlib.import_module(f"{_PACKAGE}.constants")
    vars(torch_part)["DType"] = constants.DType
