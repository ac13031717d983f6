"""The process-wide replacement of Transformer Engine's functions, and who listens to it.

What is replaced: in ``cpp_extensions.gemm`` the global name of the compiled extension (by a proxy whose product kernels
report) and two functions; forward and backward of the autograd functions that multiply; the fuser's entry points of the
operations; where weight gradients are put off; and, to learn what the quantizers read, the quantizers' entry points.
Each is checked by name and signature first; what is missing or looks different is left alone and told. The replacements
call the originals with the arguments unchanged and return their results unchanged.

Owns the list of listening sources and what was replaced.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flightrec.sources import te_wrap
from flightrec.sources.te_layers import PACKAGE, Kind, loaded_class

if TYPE_CHECKING:
    from flightrec.sources.te import TeSource

_GEMM = "cpp_extensions.gemm"
_KERNEL = "generic_gemm"
_GROUPED_KERNELS = (
    "te_general_grouped_gemm",
    "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_grouped_tensor",
)
_FUNCTIONS = {
    Kind.LINEAR: "module.linear._Linear",
    Kind.LAYERNORM_LINEAR: "module.layernorm_linear._LayerNormLinear",
    Kind.LAYERNORM_MLP: "module.layernorm_mlp._LayerNormMLP",
    Kind.GROUPED: "module.grouped_linear._GroupedLinear",
}
_FUSER_FORWARD = ("self", "basic_op_ctxs", "input_")
_FUSER_BACKWARD = ("self", "basic_op_ctxs", "grad_output")


class _Place:
    """One name to replace: where it is, what it must look like, by what, and what is lost without it."""

    def __init__(self, path: str, expected: tuple[str, ...], wrapper: Callable[[Any], Any], loss: str) -> None:
        self.owner_path, _, self.name = path.rpartition(".")
        self.expected = expected
        self.wrapper = wrapper
        self.loss = loss

    def owner(self) -> Any:
        """The module or class that holds the name, or None."""
        return sys.modules.get(f"{PACKAGE}.{self.owner_path}") or loaded_class(self.owner_path)

    def problem(self) -> str:
        """Reason why it cannot be replaced, or the empty text."""
        return _look(self.owner(), self.name, self.expected)


class _Proxy:
    """Stands for the compiled extension under a global name of one module; all but some names pass through."""

    def __init__(self, extension: Any, replaced: dict[str, Any]) -> None:
        vars(self).update(replaced)
        vars(self)["_flightrec_extension"] = extension

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_flightrec_extension"], name)


_lock = threading.Lock()
_sources: list[TeSource] = []
_installed: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, replacement
_lost: dict[str, str] = {}
_lacking: dict[Kind, str] = {}


def _places() -> list[_Place]:
    """What helps beyond the products themselves."""
    quantizers = [
        _Place(f"{module}.{name}.update_quantized", ("self", "src", "dst"), te_wrap.updated, "")
        for module, name in (
            ("tensor.float8_tensor", "Float8Quantizer"),
            ("tensor.float8_tensor", "Float8CurrentScalingQuantizer"),
            ("tensor.float8_blockwise_tensor", "Float8BlockQuantizer"),
            ("tensor.mxfp8_tensor", "MXFP8Quantizer"),
            ("tensor.nvfp4_tensor", "NVFP4Quantizer"),
        )
    ]
    partners = "high-precision partners of quantized operands"
    base = "module.base.TransformerEngineBaseModule.grad_output_preprocess"
    return [
        _Place(
            f"{_GEMM}._nvfp4_row_scaled_gemm_inputs",
            ("A", "B", "transa", "transb"),
            te_wrap.row_scaled,
            "operands of row-scaled NVFP4",
        ),
        _Place(
            f"{_GEMM}.custom_gemm",
            ("A", "B", "workspace", "out_dtype", "quantization_params", "gelu", "gelu_in", "accumulate", "layout"),
            te_wrap.custom_gemm,
            "products of custom recipes",
        ),
        _Place(
            "module._common.WeightGradStore.put",
            ("self", "tensor_list", "func"),
            te_wrap.put_off,
            "delayed weight gradients",
        ),
        _Place("quantized_tensor.Quantizer.quantize", ("self", "tensor"), te_wrap.quantized, partners),
        _Place(
            base,
            ("ctx", "grad_output", "row_parallel_mode", "quantizer"),
            te_wrap.gradient_quantized,
            f"{partners} in the backward",
        ),
        _Place(
            "module._split_quantization._split_quantize",
            ("tensor", "split_sizes", "quantizers", "activation_dtype"),
            te_wrap.split_quantized,
            f"{partners} of grouped products",
        ),
        *quantizers,
    ]


def problem() -> str:
    """Reason why no product of Transformer Engine can be tapped safely, or the empty text."""
    if _installed:
        return ""
    gemm = sys.modules.get(f"{PACKAGE}.{_GEMM}")
    version = getattr(sys.modules.get("transformer_engine"), "__version__", "?")
    kernels = getattr(gemm, "tex", None)
    if not callable(getattr(kernels, _KERNEL, None)):
        return f"Transformer Engine {version}: {PACKAGE}.{_GEMM} calls no tex.{_KERNEL}; this version is not known"
    return ""


def lacking() -> dict[Kind, str]:
    """Kinds of layers whose products could not be named, and why."""
    if _installed:
        return dict(_lacking)
    found: dict[Kind, str] = {}
    for kind in Kind:
        if kind.is_op:
            reason = "" if any(_operations()) else "the fuser's operations do not look as expected"
        else:
            owner = loaded_class(_FUNCTIONS[kind])
            reason = _look(owner, "forward", ("ctx",)) or _look(owner, "backward", ("ctx",))
        if reason:
            found[kind] = f"its products cannot be told apart: {reason}"
    return found


def register(source: TeSource) -> dict[str, str]:
    """Let a source listen; the first one replaces the functions. Returns what is not seen, and why."""
    with _lock:
        if source not in _sources:
            _sources.append(source)
        if not _installed:
            te_wrap.begin(_sources)
            _replace()
        return dict(_lost)


def unregister(source: TeSource) -> None:
    """Let a source go; the last one puts the functions back."""
    with _lock:
        if source in _sources:
            _sources.remove(source)
        if not _sources and _installed:
            _restore()


def _replace() -> None:
    _lost.clear()
    _lacking.clear()
    _lacking.update(lacking())
    _replace_kernels(sys.modules[f"{PACKAGE}.{_GEMM}"])
    for kind, path in _FUNCTIONS.items():
        if kind not in _lacking:
            owner = loaded_class(path)
            _put(owner, "forward", functools.partial(te_wrap.forward, kind=kind))
            _put(owner, "backward", te_wrap.backward)
    for owner, name in _operations():
        _put(owner, name, te_wrap.fuser_forward if name == "fuser_forward" else te_wrap.fuser_backward)
    _replace_split_kernel(sys.modules.get(f"{PACKAGE}.ops.basic.grouped_linear"))
    for place in _places():
        reason = place.problem()
        if not reason:
            _put(place.owner(), place.name, place.wrapper)
        elif place.loss:
            _lost[place.loss] = reason


def _replace_kernels(gemm: Any) -> None:
    wrapped = {_KERNEL: te_wrap.product(getattr(gemm.tex, _KERNEL))}
    for name in _GROUPED_KERNELS:
        kernel = getattr(gemm.tex, name, None)
        if not callable(kernel):
            _lost[f"products of {name}"] = "this version has no such kernel"
        elif name == _GROUPED_KERNELS[0]:
            wrapped[name] = te_wrap.grouped_product(kernel)
        else:
            wrapped[name] = te_wrap.grouped_buffer_product(kernel, gemm)
    _install(gemm, "tex", gemm.tex, _Proxy(gemm.tex, wrapped))


def _replace_split_kernel(module: Any) -> None:
    """The grouped operation splits and quantizes by the kernel itself."""
    kernel = getattr(getattr(module, "tex", None), "split_quantize", None)
    if callable(kernel):
        proxy = _Proxy(module.tex, {"split_quantize": te_wrap.split_kernel(kernel)})
        _install(module, "tex", module.tex, proxy)


def _operations() -> Iterator[tuple[Any, str]]:
    """Classes of operations that define an entry point of the fuser themselves, and its name."""
    base = loaded_class("ops.op.FusibleOperation")
    if base is None:
        return
    waiting, seen = list(base.__subclasses__()), set()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        waiting.extend(kind.__subclasses__())
        for name, expected in (("fuser_forward", _FUSER_FORWARD), ("fuser_backward", _FUSER_BACKWARD)):
            if name in vars(kind) and not _look(kind, name, expected):
                yield kind, name


def _look(owner: Any, name: str, expected: tuple[str, ...]) -> str:
    """Reason why a function does not look as expected, or the empty text."""
    if owner is None or name not in vars(owner):
        return f"this version has no {getattr(owner, '__qualname__', getattr(owner, '__name__', '...'))}.{name}"
    try:
        found = tuple(inspect.signature(getattr(owner, name)).parameters)[: len(expected)]
    except (ValueError, TypeError) as error:
        return f"{name} does not tell its arguments: {error}"
    return "" if found == expected else f"{name} takes {', '.join(found)}, expected {', '.join(expected)}"


def _put(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    if isinstance(original, staticmethod):
        _install(owner, name, original, staticmethod(wrapper(original.__func__)))
    else:
        _install(owner, name, original, wrapper(original))


def _install(owner: Any, name: str, original: Any, replacement: Any) -> None:
    setattr(owner, name, replacement)
    _installed.append((owner, name, original, replacement))


def _restore() -> None:
    """Put back what is still ours; a later patch by somebody else stays, and ours below it passes through."""
    te_wrap.end()
    for owner, name, original, replacement in reversed(_installed):
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)
    _installed.clear()
