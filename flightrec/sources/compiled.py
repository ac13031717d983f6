"""Observes modules inside compiled regions: an operation in the graph that calls the ordinary sink.

While a region is compiled the hooks of watched modules are traced. They put ``flightrec::observe(Tensor[], int)`` into
the graph, where a module's arguments and its result stand: registered as effectful, so that it is neither removed nor
moved across its like, and without an argument that it changes, which would keep CUDA graphs away. The number says
which place in the model this is; it is a constant, so that an iteration compiles nothing. The gradient of a result is
seen by the same operation in the backward of an identity.

A module needs its own number, so regions of equal layers that are compiled one by one no longer share a graph: Dynamo's
limits are raised to what that takes while modules are watched. What is not observed is told where it is traced.

Owns the places. They are made by the compiler's thread; operations run on the training thread and on autograd's.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from flightrec.boundary import contained
from flightrec.sources.stamps import Stamp, must_not_record
from flightrec.sources.warmup import is_capturing

_log = logging.getLogger("flightrec")

ENTERING, LEAVING, GRADIENT = "entering", "leaving", "gradient"
_NOWHERE = -1
MAX_DEPTH = 3
"""Containers nested deeper inside a traced call are not looked into."""


class Target(Protocol):
    """What is told of a module's calls, traced ones too."""

    def entered(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The module is about to run with these arguments."""

    def left(self, module: torch.nn.Module, output: object) -> None:
        """The module returned ``output``, or None if it raised."""

    def wants(self, kind: str) -> bool:
        """Whether the operation is to be put where the module is entered or left, or into its backward."""

    def unobserved(self, tensor: str, reason: str) -> None:
        """A compiled region hides this from now on."""

    def tell(self, what: str, reason: str) -> None:
        """Something is not observed in any compiled region."""

    def entered_compiled(self, found: Sequence[tuple[str, torch.Tensor]], has_gradients: bool) -> None:
        """The module is about to run with these (path, tensor), in a region compiled with or without gradients."""

    def left_compiled(self, found: Sequence[tuple[str, torch.Tensor]]) -> Stamp | None:
        """The module returned these (path, tensor); says which call it was."""

    def gradient_compiled(self, found: Sequence[tuple[str, torch.Tensor]], stamps: Mapping[int, Stamp]) -> None:
        """The gradient of what it returned in one of these calls, by microbatch."""


@dataclass
class Place:
    """Where an operation stands.

    Attributes:
        kind: ``ENTERING``, ``LEAVING`` or ``GRADIENT``.
        paths: of the tensors, in order.
        targets: who is told.
        has_gradients: whether gradients were on where the region was traced; where it runs nothing tells.
        stamps: of a result and its gradient: by target and microbatch, the latest call.
    """

    kind: str
    paths: tuple[str, ...]
    targets: tuple[Target, ...]
    has_gradients: bool
    stamps: dict[Target, dict[int, Stamp]]


_F = TypeVar("_F", bound=Callable[..., Any])
_places: dict[int, Place] = {}
_places_of: dict[Target, list[int]] = {}
_numbers = itertools.count()
_generation = 0
_has_told = False


# -- the operation

_library: list[torch.library.Library] = []  # at most one; it lives on, as graphs do that hold the operation


def _observe(tensors: Sequence[torch.Tensor], place: int) -> None:
    """Tell what the tensors of a place are; any device, no synchronisation, never raises an ``Exception``."""
    with contained("observing a compiled region"):
        found = _places.get(place)
        if found is None or must_not_record():
            return
        pairs = list(zip(found.paths, tensors, strict=True))
        if _is_first_run(tensors):
            pairs = []  # the call counts; nothing of it is kept
            for target in found.targets:
                target.tell("first runs of regions under CUDA graphs", _FIRST_RUN)
        for target in found.targets:
            stamps = found.stamps.setdefault(target, {})
            if found.kind == ENTERING:
                target.entered_compiled(pairs, found.has_gradients)
            elif found.kind == LEAVING:
                stamp = target.left_compiled(pairs)
                if stamp is not None:
                    stamps.pop(stamp.microbatch, None)  # the latest call stands last
                    stamps[stamp.microbatch] = stamp
            else:
                target.gradient_compiled(pairs, stamps)


_FIRST_RUN = (
    "torch.compile runs a region once in the memory of its CUDA graphs before it captures it; what we kept there it "
    "would take for its own and refuse to go on"
)


def _is_first_run(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether Inductor runs the region on its graphs' stream, without capturing it yet."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not tensors or tensors[0].device.type != "cuda" or is_capturing():
        return False
    manager = trees.get_manager(tensors[0].device.index, create_if_none_exists=False)
    return manager is not None and torch.cuda.current_stream(tensors[0].device) == manager.stream


def _clone(tensor: torch.Tensor, _place: int) -> torch.Tensor:
    return tensor.clone()


class _Identity(torch.autograd.Function):
    """Hands a tensor on and observes its gradient: what the operation ``hand_on`` is to autograd.

    A copy, which Inductor removes: a view could not be changed in place by who comes next.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, place: int) -> torch.Tensor:
        ctx.place = place
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.ops.flightrec.observe(list(gradients), ctx.place)
        return gradients[0], None


def run_by_python(*functions: Callable[..., Any]) -> None:
    """Keep the compiler from compiling these, and what they call, where it meets them outside of a region.

    It runs a compiled module's own hooks so. Where it traces their caller it still follows them.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _nothing(_tensors: Sequence[torch.Tensor], _place: int) -> None:
    """What the operation does to tensors without data."""


def define() -> None:
    """Register the operation, once a process."""
    if _library:
        return
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    library = torch.library.Library("flightrec", "FRAGMENT")
    _library.append(library)
    library.define("observe(Tensor[] tensors, int place) -> ()")
    library.impl("observe", _observe, "CompositeExplicitAutograd")
    torch.library.register_fake("flightrec::observe", _nothing, lib=library)
    library.define("hand_on(Tensor tensor, int place) -> Tensor")
    library.impl("hand_on", _Identity.apply, "Autograd")
    library.impl("hand_on", _clone, "CompositeExplicitAutograd")
    _register_effectful_op(torch.ops.flightrec.observe.default, _EffectType.ORDERED)


# -- traced: plain code that the compiler follows; it must not meet anything that breaks a graph


def entering(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Put the operation where a module is entered."""
    if not _is_watched(id(module), _generation):
        return
    paths: list[str] = []
    tensors: list[torch.Tensor] = []
    single = len([value for value in args if not isinstance(value, (int, float, str, bool)) and value is not None]) == 1
    for index, value in enumerate(args):
        _gather(value, "" if single else str(index), 0, paths, tensors)
    for name, value in kwargs.items():
        _gather(value, name, 0, paths, tensors)
    place = _place(id(module), ENTERING, tuple(paths), torch.is_grad_enabled(), _generation)
    if place != _NOWHERE:
        torch.ops.flightrec.observe(tensors, place)


def leaving(module: torch.nn.Module, output: Any) -> object | None:
    """Put the operation where a module is left, and into the backward of what it returns; returns that or None."""
    if not _is_watched(id(module), _generation):
        return None
    paths: list[str] = []
    tensors: list[torch.Tensor] = []
    _gather(output, "", 0, paths, tensors)
    place = _place(id(module), LEAVING, tuple(paths), torch.is_grad_enabled(), _generation)
    if place != _NOWHERE:
        torch.ops.flightrec.observe(tensors, place)
    if not any([tensor.requires_grad for tensor in tensors]):  # noqa: C419  a list traces in every version
        return None
    handed_on: object | None = _with_gradients(id(module), output, "", place)
    return handed_on


def _gather(value: Any, path: str, depth: int, paths: list[str], tensors: list[torch.Tensor]) -> None:
    """Collect the plain tensors of arguments or results; of other kinds the operation could not be given one."""
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        paths.append(path)
        tensors.append(value)
    elif depth < MAX_DEPTH:
        if type(value) is tuple or type(value) is list:
            for index, item in enumerate(value):
                _gather(item, f"{path}.{index}" if path else str(index), depth + 1, paths, tensors)
        elif type(value) is dict:
            for key, item in value.items():
                if type(key) is str:
                    _gather(item, f"{path}.{key}" if path else key, depth + 1, paths, tensors)


def _with_gradients(module_id: int, value: Any, path: str, of: int) -> Any:
    """A result whose tensors tell of their gradients: one tensor, or a tuple or list of them; else None."""
    if type(value) is torch.Tensor:
        if not value.requires_grad:
            return None
        place = _gradient_place(module_id, path, of, _generation)
        return None if place == _NOWHERE else torch.ops.flightrec.hand_on(value, place)
    if (type(value) is tuple or type(value) is list) and len(value) > 0:
        items = [
            _with_gradients(module_id, item, str(i), of) if type(item) is torch.Tensor else None
            for i, item in enumerate(value)
        ]
        kept = [old if new is None else new for old, new in zip(value, items, strict=True)]
        return tuple(kept) if type(value) is tuple else kept
    return None


# -- asked by the traced code while it is traced; the answers are constants of the graph


def _constant(function: _F) -> _F:
    """What ``torch.compiler.assume_constant_result`` does, which would load the compiler for every run."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _is_watched(module_id: int, _generation: int) -> bool:
    return bool(lookup(module_id))


@_constant
def _place(module_id: int, kind: str, paths: tuple[str, ...], has_gradients: bool, _generation: int) -> int:
    """Number of a new place, or ``_NOWHERE`` with the reason told."""
    with contained("tracing a compiled region"):
        if torch.compiler.is_exporting():  # what is exported is no part of the run: there is nothing to tell either
            return _NOWHERE
        targets = tuple(target for target in lookup(module_id) if target.wants(kind))
        if not targets:
            return _NOWHERE
        reason = _why_not() or ("" if paths else _NO_TENSORS)
        if reason:
            for target in targets:
                target.unobserved("", reason)
            return _NOWHERE
        _tell()
        _raise_limits()
        return _new_place(Place(kind, tuple(paths), targets, has_gradients, {}))
    return _NOWHERE


@_constant
def _gradient_place(module_id: int, path: str, of: int, _generation: int) -> int:
    """The same for the gradient of what is seen at the place ``of``, whose calls it shares."""
    with contained("tracing a compiled region"):
        result = _places.get(of)
        targets = tuple(target for target in lookup(module_id) if target.wants(GRADIENT))
        if result is None or not targets:
            return _NOWHERE
        return _new_place(Place(GRADIENT, (path,), targets, True, result.stamps))
    return _NOWHERE


def _new_place(place: Place) -> int:
    number = next(_numbers)
    _places[number] = place
    for target in place.targets:
        _places_of.setdefault(target, []).append(number)
    return number


_NO_TENSORS = "torch.compile: no plain tensor is among what this module takes or returns inside a compiled region"
_NESTED = (
    "torch.compile: it runs inside a region that the compiler keeps apart (activation checkpointing, control flow) and "
    "is not observed there"
)
_TRANSFORMED = "torch.compile: it runs inside a functorch transform and is not observed there"


def _why_not() -> str:
    """Reason why nothing can be put into the graph where the compiler is, or the empty text."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _TRANSFORMED
    return _NESTED if InstructionTranslator.current_tx().output.current_tracer.parent is not None else ""


def _tell() -> None:
    global _has_told  # noqa: PLW0603  once a process
    if not _has_told:
        _has_told = True
        _log.warning(
            "flightrec: modules are observed inside a region compiled by torch.compile. Observing an intermediate can "
            "end a fusion, so losses may differ in their last bits from those of the same region without a recorder"
        )


# -- for ``watched``


def _nobody(_module_id: int) -> tuple[Target, ...]:
    return ()


lookup: Callable[[int], tuple[Target, ...]] = _nobody
"""Who watches the module of an identity; set by ``watched``, like the next."""

num_watched: Callable[[], int] = int


def forget(target: Target | None = None) -> None:
    """Who watches what has changed: what was compiled for it is compiled anew. A ``target`` is told no more."""
    global _generation  # noqa: PLW0603  the traced code is guarded by it
    _generation += 1
    for number in _places_of.pop(target, ()) if target is not None else ():
        place = _places.get(number)
        if place is not None:
            place.targets = tuple(other for other in place.targets if other is not target)
            place.stamps.pop(target, None)  # type: ignore[arg-type]
            if not place.targets:
                del _places[number]


def compile_anew() -> None:
    """Throw away what was compiled before anybody watched: nothing in it asks for us."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.output_codes.seen:
        _log.info("flightrec: what torch.compile compiled before attach is compiled anew, to be observed")
        torch._dynamo.reset_code_caches()


_limits: dict[str, tuple[int, int]] = {}  # name in Dynamo's configuration: what stood there, what we set


def _raise_limits() -> None:
    """Let each watched module have as many graphs as one region of the model had before."""
    config = torch._dynamo.config
    if _limits and all(getattr(config, name) == ours for name, (_, ours) in _limits.items()):
        return  # nobody changed them since
    wanted = config.recompile_limit * max(num_watched(), 1)
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        before = getattr(config, name)
        _limits[name] = (before, max(before, wanted))
        setattr(config, name, _limits[name][1])


def restore_limits() -> None:
    """Put Dynamo's limits back, unless somebody changed them after us."""
    for name, (before, ours) in _limits.items():
        if getattr(torch._dynamo.config, name) == ours:
            setattr(torch._dynamo.config, name, before)
    _limits.clear()
