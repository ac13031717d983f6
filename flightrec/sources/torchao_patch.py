"""The process-wide replacement of torchao's Float8 product functions, and who listens to it.

Owns the list of listening sources, the original functions, and a note for each thread of which product runs on it. The
replacements call the originals with the arguments unchanged and return their results unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flightrec.records import Stage
from flightrec.sources.extract import is_torchao_float8, torchao_role
from flightrec.sources.stamps import Stamp, must_not_record

if TYPE_CHECKING:
    from flightrec.sources.torchao import TorchaoSource

MODULE = "torchao.float8.float8_linear"
_CAST = "hp_tensor_to_float8_dynamic"
_PRODUCT = "matmul_with_hp_or_float8_args"
_EXPECTED = {
    "cast": ("hp_tensor", "float8_dtype", "linear_mm_config", "reduce_amax", "gemm_input_role"),
    "forward": ("ctx", "input_hp", "weight_hp_t", "linear_mm_config", "config"),
    "backward": ("ctx", "grad_output"),
}
_ROLES = {"input": "activation", "weight": "weight"}
_STAMPS = "_flightrec_stamps"

_lock = threading.Lock()
_sources: list[TorchaoSource] = []
_originals: dict[str, Any] = {}
_local = threading.local()


@dataclass
class _Product:
    """A product that runs on this thread, and who wants to know of it."""

    listeners: list[tuple[TorchaoSource, Stamp]]
    backward: bool
    roles: frozenset[str]  # roles whose codes are worth a record in this pass
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def problem() -> str:
    """Reason why torchao's functions cannot be replaced safely, or the empty text."""
    if _originals:
        return ""
    module: Any = sys.modules.get(MODULE)
    version = getattr(sys.modules.get("torchao"), "__version__", "?")
    try:
        product = getattr(module, _PRODUCT)
        found = {
            "cast": getattr(module, _CAST),
            "forward": product.forward,
            "backward": product.backward,
        }
        for name, function in found.items():
            names = tuple(inspect.signature(function).parameters)[: len(_EXPECTED[name])]
            if names != _EXPECTED[name]:
                return f"torchao {version}: {_PRODUCT} {name} takes {names}, expected {_EXPECTED[name]}"
    except (AttributeError, ValueError, TypeError) as error:
        return f"torchao {version} does not look as expected: {error}"
    return ""


def register(source: TorchaoSource) -> None:
    """Let a source listen; the first one replaces the functions."""
    with _lock:
        if source not in _sources:
            _sources.append(source)
        if not _originals:
            _replace()


def unregister(source: TorchaoSource) -> None:
    """Let a source go; the last one puts the functions back."""
    with _lock:
        if source in _sources:
            _sources.remove(source)
        if not _sources and _originals:
            _restore()


def _replace() -> None:
    module: Any = sys.modules[MODULE]
    product = getattr(module, _PRODUCT)
    _originals.update(cast=getattr(module, _CAST), forward=product.forward, backward=product.backward)
    replacements = {
        "cast": _cast(_originals["cast"]),
        "forward": _forward(_originals["forward"]),
        "backward": _backward(_originals["backward"]),
    }
    _originals["replacements"] = replacements
    setattr(module, _CAST, replacements["cast"])
    product.forward = staticmethod(replacements["forward"])
    product.backward = staticmethod(replacements["backward"])


def _restore() -> None:
    """Put back what is still ours; a later patch by somebody else stays, and ours below it passes through."""
    module: Any = sys.modules[MODULE]
    product = getattr(module, _PRODUCT)
    replacements = _originals["replacements"]
    if getattr(module, _CAST) is replacements["cast"]:
        setattr(module, _CAST, _originals["cast"])
    if product.forward is replacements["forward"]:
        product.forward = staticmethod(_originals["forward"])
    if product.backward is replacements["backward"]:
        product.backward = staticmethod(_originals["backward"])
    _originals.clear()


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cast(hp_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(hp_tensor, *args, **kwargs)
        product: _Product | None = getattr(_local, "product", None)
        if product is not None:
            with _contained(product.listeners):
                _note_cast(product, hp_tensor, result)
        return result

    return cast


def _note_cast(product: _Product, hp_tensor: torch.Tensor, result: Any) -> None:
    if not is_torchao_float8(result):
        for source, stamp in product.listeners:
            source.unseen(stamp, f"operands are {type(result).__qualname__}, not plain Float8 tensors")
        return
    role = torchao_role(result)
    if role == "grad_output":
        product.gradients.append((hp_tensor, result))
    elif role in product.roles:
        stage = Stage.BACKWARD if product.backward else Stage.FORWARD
        for source, stamp in product.listeners:
            source.cast(stamp, _ROLES[role], hp_tensor, result, stage)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(ctx: Any, input_hp: torch.Tensor, weight_hp_t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        listeners = [] if must_not_record() else _listeners()
        if not listeners:
            return original(ctx, input_hp, weight_hp_t, *args, **kwargs)
        with _contained(listeners):
            setattr(ctx, _STAMPS, listeners)
            for source, stamp in listeners:
                source.forward_begins(stamp, input_hp, weight_hp_t)
        before = getattr(_local, "product", None)
        _local.product = _Product(listeners, backward=False, roles=frozenset(_ROLES))
        try:
            return original(ctx, input_hp, weight_hp_t, *args, **kwargs)
        finally:
            _local.product = before

    return forward


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        listeners: list[tuple[TorchaoSource, Stamp]] = getattr(ctx, _STAMPS, [])
        if not listeners or must_not_record():
            return original(ctx, grad_output)
        roles: frozenset[str] = frozenset()
        with _contained(listeners):
            for source, stamp in listeners:
                source.backward_begins(stamp)
            roles = _other_direction(ctx.config)
        before = getattr(_local, "product", None)
        product = _Product(listeners, backward=True, roles=roles)
        _local.product = product
        dgrad = None
        try:
            result = original(ctx, grad_output)
            dgrad = result[0] if ctx.needs_input_grad[0] else None
            return result
        finally:
            _local.product = before
            with _contained(listeners):
                if is_torchao_float8(grad_output):
                    product.gradients.append((None, grad_output))  # type: ignore[arg-type]  # came quantized
                for source, stamp in listeners:
                    source.backward_ends(stamp, product.gradients, dgrad)

    return backward


def _listeners() -> list[tuple[TorchaoSource, Stamp]]:
    found: list[tuple[TorchaoSource, Stamp]] = []
    for source in tuple(_sources):
        try:
            stamp = source.current()
        except Exception as error:
            source.failed("", error)
            continue
        if stamp is not None:
            found.append((source, stamp))
    return found


class _contained:  # noqa: N801  used like a function
    """Context that takes an ``Exception`` of ours and switches the layer off for all who listen."""

    __slots__ = ("_listeners",)

    def __init__(self, listeners: list[tuple[TorchaoSource, Stamp]]) -> None:
        self._listeners = listeners

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        for source, stamp in self._listeners:
            source.failed(stamp.layer, error)
        return True


def _other_direction(config: Any) -> frozenset[str]:
    """Roles that the backward quantizes to other codes than the forward did."""
    pairs = {
        "input": (config.cast_config_input, config.cast_config_input_for_grad_weight),
        "weight": (config.cast_config_weight, config.cast_config_weight_for_grad_input),
    }
    return frozenset(
        role
        for role, (first, second) in pairs.items()
        if second.scaling_type.value != "disabled"
        and (second.scaling_granularity.value == "axiswise" or second != first)
    )
