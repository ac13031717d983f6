"""The functions that stand in for Transformer Engine's while a source listens: each calls the original once.

Every one of them asks ``must_not_record`` first, so that a compiler drops its body, and contains what of ours fails.
Those of an installation that has ended pass through, wherever somebody may still hold them. Owns the note of which
installation is alive. Runs on the training thread and on autograd's threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flightrec.sources import te_products
from flightrec.sources.sink import quiet
from flightrec.sources.stamps import must_not_record
from flightrec.sources.te_layers import Kind
from flightrec.sources.te_run import NOBODY, Listener, Run, current_run, swap_run

if TYPE_CHECKING:
    from flightrec.sources.te import TeSource

_RUN = "_flightrec_run"
_UNKNOWN = "products outside any layer"
_WHY_UNKNOWN = "a product ran inside no layer that is known (compiled, or called by hand): it is not recorded"
_GATHERED_INSIDE = "cuBLASMp gathers it inside the product and keeps nothing of it"
_SEVERAL = "several products in one fused kernel (cuDNN grouped MLP): its operands are not seen"


class _Installation:
    """One stretch of time in which functions are replaced."""

    def __init__(self, sources: Sequence[TeSource]) -> None:
        self.sources: Sequence[TeSource] | None = sources


_current = _Installation(())


def begin(sources: Sequence[TeSource]) -> None:
    """An installation begins; wrappers made from now on belong to it."""
    global _current  # noqa: PLW0603  there is one at a time
    _current = _Installation(sources)


def end() -> None:
    """The installation ends: its wrappers pass through from now on."""
    _current.sources = None


def _wrapper(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Make a factory of stand-ins from ``function(original, args, kwargs, ...)``."""

    @functools.wraps(function)
    def make(original: Callable[..., Any], *more: Any, **named: Any) -> Callable[..., Any]:
        installation = _current

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if must_not_record() or not installation.sources:
                return original(*args, **kwargs)
            return function(original, args, kwargs, *more, **named)

        return stand_in

    return make


def _inner_wrapper(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """As ``_wrapper``, of what runs inside a layer: at once the original where nobody wants anything of the run."""

    @functools.wraps(function)
    def make(original: Callable[..., Any], *more: Any, **named: Any) -> Callable[..., Any]:
        installation = _current

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            run = current_run()
            if (run is not None and not run.listeners) or must_not_record() or not installation.sources:
                return original(*args, **kwargs)
            return function(original, args, kwargs, *more, **named)

        return stand_in

    return make


class _contained:  # noqa: N801  used like a function
    """Context that takes an ``Exception`` of ours and switches the layer off for all who listen."""

    __slots__ = ("_run",)

    def __init__(self, run: Run | None) -> None:
        self._run = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        _failed(self._run, error)
        return True


def _failed(run: Run | None, error: Exception) -> None:
    if run is None or not run.everyone:
        for source in tuple(_current.sources or ()):
            source.failed("", error)
    else:
        for source, _, layer in run.everyone:
            source.failed(layer.layer, error)


class _inside:  # noqa: N801  used like a function
    """Context in which this thread is in a run; the run forgets its tensors at the end."""

    __slots__ = ("_before", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._before = swap_run(self._run)

    def __exit__(self, *_: object) -> None:
        swap_run(self._before)
        self._run.forget()


# -- layers


def _listeners(kind: Kind) -> tuple[Listener, ...]:
    found: list[Listener] = []
    for source in tuple(_current.sources or ()):
        try:
            listener = source.listen(kind)
        except Exception as error:
            source.failed("", error)
            continue
        if listener is not None:
            found.append(listener)
    return tuple(found)


@_wrapper
def forward(original: Callable[..., Any], args: Any, kwargs: Any, kind: Kind) -> Any:
    """Forward of an autograd function; its context, which is None without gradients, carries the run on."""
    listeners = _listeners(kind)
    if not listeners:
        return _as_nobody(original, args, kwargs)
    run = Run(kind, listeners)
    with _contained(run):
        if args[0] is not None:
            setattr(args[0], _RUN, run)
    with _inside(run):
        return original(*args, **kwargs)


@_wrapper
def backward(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Backward of an autograd function."""
    of_forward = getattr(args[0], _RUN, NOBODY)
    if of_forward is NOBODY:
        return _as_nobody(original, args, kwargs)
    return _in_backward(original, args, kwargs, of_forward)


def _as_nobody(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the original in nobody's run: that of a layer that belongs to no model of ours, or is not in its turn."""
    before = swap_run(NOBODY)
    try:
        return original(*args, **kwargs)
    finally:
        swap_run(before)


def _in_backward(original: Callable[..., Any], args: Any, kwargs: Any, of_forward: Run) -> Any:
    run = NOBODY
    with _contained(of_forward):
        if of_forward.everyone:
            run = of_forward.begin_backward()
            for source, stamp, _ in run.everyone:
                source.backward_begins(stamp)
    with _inside(run):
        return original(*args, **kwargs)


@_wrapper
def put_off(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``WeightGradStore.put``: the function that computes the weight gradient later takes its run along."""
    run = current_run()
    if run is None or len(args) != 3:
        return original(*args, **kwargs)
    later = args[2]
    with _contained(run):
        later = _later(args[2], run, run.wgrad_product() if run.everyone else 0)
    return original(args[0], args[1], later, **kwargs)


def _later(function: Callable[..., Any], run: Run, product: int) -> Callable[..., Any]:
    installation = _current

    def compute(*args: Any, **kwargs: Any) -> Any:
        if must_not_record() or not installation.sources:
            return function(*args, **kwargs)
        with _inside(run.delayed(product) if run.everyone else NOBODY):
            return function(*args, **kwargs)

    return compute


# -- operations


def _operations(operation: Any) -> Sequence[Any]:
    return tuple(operation.basic_ops) if getattr(operation, "is_fused_op", False) else (operation,)


@_wrapper
def fuser_forward(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Forward of an operation, or of several that are fused: at most one of them multiplies."""
    entered: list[tuple[Listener, bool]] = []
    run, context = NOBODY, None
    with _contained(None):
        run, context = _enter(args[0], args[1], entered)
        if context is not None:
            setattr(context, _RUN, run)
    before = swap_run(run) if context is not None else current_run()
    try:
        return original(*args, **kwargs)
    finally:
        swap_run(before)
        run.forget()
        for listener, must_leave in entered:
            if must_leave:
                with _contained(run):
                    listener.source.leave_operation(listener)


def _enter(operation: Any, contexts: Sequence[Any], entered: list[tuple[Listener, bool]]) -> tuple[Run, Any]:
    """The run of the only product in an operation, and the context that shall carry it; none for no product."""
    places: dict[int, Any] = {}
    for inner, context in zip(_operations(operation), contexts, strict=True):
        for source in tuple(_current.sources or ()):
            found = source.enter_operation(inner)
            if found is not None:
                entered.append(found)
                places[id(inner)] = context
    if len(places) > 1:
        for listener, _ in entered:
            listener.source.unknown(f"products of {listener.layer.layer!r}", _SEVERAL)
        return NOBODY, next(iter(places.values()))
    if not places:
        return NOBODY, None
    listeners = tuple(listener for listener, _ in entered)
    return Run(listeners[0].layer.kind, listeners), next(iter(places.values()))


@_wrapper
def fuser_backward(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Backward of an operation, or of several that are fused."""
    runs = [run for context in args[1] if (run := getattr(context, _RUN, None)) is not None]
    if not runs:
        return original(*args, **kwargs)
    return _in_backward(original, args, kwargs, runs[0] if len(runs) == 1 else NOBODY)


# -- products


def _run_of_product() -> Run | None:
    """The run that a product belongs to, if anybody wants to know of it."""
    run = current_run()
    if run is None:
        for source in tuple(_current.sources or ()):
            with _contained(None):
                source.unknown(_UNKNOWN, _WHY_UNKNOWN)
        return None
    return run if run.listeners else None


@_inner_wrapper
def product(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``tex.generic_gemm(A, transa, B, transb, out, ..., gelu [9], ..., accumulate [14], ...)``."""
    run = _run_of_product()
    if run is None or run.kind is None:
        return original(*args, **kwargs)
    call = None
    overlap = _overlap(kwargs)
    gathers = overlap == "AG"
    try:  # no context objects of ours: this is the way of most records
        with quiet():
            call = None if run.kind.is_grouped else te_products.begin(run, args[1], args[3])
            if call is None:
                _tell(run, "products", "the kernel was called in a way that is not known")
            else:
                te_products.operands(run, call, args[0], args[2], only="a" if gathers else "")
    except Exception as error:
        _failed(run, error)
    result = original(*args, **kwargs)
    if call is not None:
        try:
            with quiet():
                if gathers and _keeps_nothing(kwargs["comm_overlap"]):
                    te_products.not_read(run, call, _GATHERED_INSIDE)
                elif gathers:  # complete only now: the kernel gathered it piece by piece
                    te_products.operands(run, call, args[0], args[2], only="b")
                te_products.result(
                    run,
                    call,
                    result[0],
                    pre_activation=result[2],
                    has_activation=bool(args[9]),
                    accumulates=bool(args[14]),
                    is_reduced=overlap == "RS",
                )
                run.replaced.clear()
        except Exception as error:
            _failed(run, error)
    return result


def _keeps_nothing(communicator: Any) -> bool:
    """Whether what the kernel gathers is gone when it returns; Userbuffers leave it in their buffer."""
    ask = getattr(communicator, "with_cublasmp", None)
    return bool(ask()) if callable(ask) else False


def _overlap(kwargs: dict[str, Any]) -> str:
    """Communication that happens to this product's own tensors inside its kernel: ``AG``, ``RS`` or none."""
    if kwargs.get("comm_overlap") is None or kwargs.get("bulk_overlap"):
        return ""
    kind = kwargs.get("comm_type")
    return str(getattr(kind, "name", kind))


@_inner_wrapper
def custom_gemm(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``custom_gemm(A, B, ..., accumulate [7], layout [8], ...)``, for quantizers that multiply in Python."""
    run = _run_of_product()
    if run is None or run.kind is None or len(args) < 9:
        return original(*args, **kwargs)
    call = None
    with _contained(run), quiet():
        layout = args[8]
        call = None if run.kind.is_grouped else te_products.begin(run, layout[0] == "T", layout[1] == "T")
        if call is None:
            _tell(run, "products", "the kernel was called in a way that is not known")
        else:
            te_products.operands(run, call, args[0], args[1])
    result = original(*args, **kwargs)
    if call is not None:
        with _contained(run), quiet():
            te_products.result(run, call, result[0], accumulates=bool(args[7]))
    return result


@_inner_wrapper
def row_scaled(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``_nvfp4_row_scaled_gemm_inputs(A, B, ...)``: aliases without the rows' own scales; we want the originals."""
    result = original(*args, **kwargs)
    run = current_run()
    if run is not None and run.listeners:
        with _contained(run):
            run.replaced = {id(result[0]): args[0], id(result[1]): args[1]}
    return result


@_inner_wrapper
def grouped_product(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``tex.te_general_grouped_gemm(A, transa, B, transb, out, out_dtype, m_splits, ..., accumulate [14], ...)``."""
    run = _run_of_product()
    if run is None:
        return original(*args, **kwargs)
    call = None
    with _contained(run), quiet():
        call = te_products.begin(run, args[1], args[3])
        if call is None:
            _tell(run, "products", "the kernel was called in a way that is not known")
        else:
            for i, (a, b) in enumerate(zip(args[0], args[2], strict=True)):
                te_products.operands(run, call, a, b, offset=i)
    result = original(*args, **kwargs)
    if call is not None:
        with _contained(run), quiet():
            made = te_products.outputs(args[4], args[6] if args[9] else None)
            for i, out in enumerate(made):
                te_products.result(run, call, out, accumulates=bool(args[14]), offset=i)
    return result


@_inner_wrapper
def grouped_buffer_product(original: Callable[..., Any], args: Any, kwargs: Any, gemm: Any) -> Any:
    """``tex.te_general_grouped_gemm_for_*(A, transa, B, transb, out, bias, bias_scale, alpha, beta, ...)``."""
    run = _run_of_product()
    if run is None:
        return original(*args, **kwargs)
    call = None
    with _contained(run), quiet():
        call = te_products.begin(run, args[1], args[3])
        if call is not None:
            te_products.grouped(run, call, args[0], args[2])
    result = original(*args, **kwargs)
    if call is not None:
        with _contained(run), quiet():
            beta = args[8]
            zeros = gemm._get_fp32_zeros_tensor(beta.numel(), beta.device)  # cached: the one that was passed, or not
            te_products.grouped_result(run, call, args[4], accumulates=beta is not zeros)
    return result


def _tell(run: Run, what: str, reason: str) -> None:
    for source, _, layer in run.listeners:
        source.unknown(f"{what} of {layer.layer!r}", reason)


# -- what the quantizers read


@_inner_wrapper
def quantized(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``Quantizer.quantize(self, tensor, ...)``."""
    result = original(*args, **kwargs)
    run = current_run()
    if run is not None and len(args) > 1:
        with _contained(run):
            run.note(args[1], result)
    return result


@_inner_wrapper
def updated(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``Quantizer.update_quantized(self, src, dst, ...)``: a cached weight is quantized again, maybe (noop_flag)."""
    result = original(*args, **kwargs)
    run = current_run()
    if run is not None and len(args) > 2 and kwargs.get("noop_flag") is None:
        with _contained(run):
            run.note(args[1], args[2])
    return result


@_inner_wrapper
def gradient_quantized(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``grad_output_preprocess(ctx, grad_output, ...)``: (quantized gradient, bias gradient)."""
    result = original(*args, **kwargs)
    run = current_run()
    if run is not None and len(args) > 1:
        with _contained(run):
            run.note(args[1], result[0])
    return result


@_inner_wrapper
def split_quantized(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``_split_quantize(tensor, split_sizes, quantizers, activation_dtype, ...)``: (parts, bias gradients)."""
    result = original(*args, **kwargs)
    run = current_run()
    if run is not None and len(args) > 3 and args[0].dtype == args[3]:
        with _contained(run):
            _note_rows(run, args[0], args[1], result[0])
    return result


@_inner_wrapper
def split_kernel(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``tex.split_quantize(tensor, split_sizes, ...)``: parts."""
    result = original(*args, **kwargs)
    run = current_run()
    if run is not None and len(args) > 1:
        with _contained(run):
            _note_rows(run, args[0], args[1], result)
    return result


def _note_rows(run: Run, tensor: torch.Tensor, sizes: Sequence[int], made: Sequence[Any]) -> None:
    start = 0
    for size, part in zip(sizes, made, strict=True):
        run.note(tensor, part, (start, start + int(size)))
        start += int(size)
