"""Who watches which module: hooks that stand for the whole process, none on a module.

``make_graphed_callables``, torch's and Transformer Engine's, refuses modules that carry hooks. So one pair of hooks is
registered for all modules while anybody watches; each looks its module up by identity and knows nothing of most. They
run before the hooks that modules carry themselves: a module that had hooks of the user's when it was attached (which
cannot be graphed anyway) gets ours behind those instead, so that what is seen is what the module really reads.

Under ``torch.compile`` the same hooks are traced: then they put an operation into the graph (see ``compiled``).

Owns the table of watched modules. It changes on the training thread; the hooks run on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from flightrec.sources import compiled
from flightrec.sources.hooks import EnterHook, LeaveHook
from flightrec.sources.stamps import must_not_record

KEY = "flightrec"
"""Ours in torch's tables of hooks. A text: what counts through the numbers of a process may meet it in a pickle."""

_NOTHING: Mapping[str, Any] = {}
_watched: dict[int, tuple[compiled.Target, ...]] = {}
_behind: dict[int, tuple[compiled.Target, ...]] = {}  # those whose own hooks ours stand behind
_replaced: list[Any] = []


class Watch:
    """One target's sight of one module, from ``begin`` to ``end``.

    Args:
        module: the module.
        target: is told of its calls; holds the module, so that its identity stays its own.
    """

    __slots__ = ("_handles", "_module", "_target")

    def __init__(self, module: torch.nn.Module, target: compiled.Target) -> None:
        self._module = module
        self._target = target
        self._handles: list[RemovableHandle] | None = None

    def begin(self) -> None:
        """Watch; nothing if it does already."""
        if self._handles is not None:
            return
        self._handles = []
        module, target = self._module, self._target
        if not _watched and not _behind:
            _install()
        table = _watched
        if any(
            not isinstance(hook, _OURS)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        ):
            table = _behind
            self._handles = [
                module.register_forward_pre_hook(EnterHook(target), with_kwargs=True),
                module.register_forward_hook(LeaveHook(target), with_kwargs=True, always_call=True),
            ]
        else:
            module._forward_pre_hooks_with_kwargs[KEY] = True  # type: ignore[index]  # keys are whatever names a hook
        table[id(module)] = (*table.get(id(module), ()), target)
        compiled.forget()

    def end(self) -> None:
        """Watch no more; may be called twice."""
        handles, self._handles = self._handles, None
        if handles is None:
            return
        module, table = self._module, _behind if handles else _watched
        for handle in handles:
            handle.remove()
        left = tuple(target for target in table.get(id(module), ()) if target is not self._target)
        if left:
            table[id(module)] = left
        else:
            table.pop(id(module), None)
            if table is _watched:
                module._forward_pre_hooks_with_kwargs.pop(KEY, None)  # type: ignore[call-overload]
        compiled.forget(target=self._target)
        if not _watched and not _behind:
            _remove()


_OURS = (EnterHook, LeaveHook)


def is_watched(module: torch.nn.Module) -> bool:
    """Say whether anybody watches this module."""
    return bool(targets_of(id(module)))


def targets_of(module_id: int) -> tuple[compiled.Target, ...]:
    """Who watches the module of this identity."""
    return (*_watched.get(module_id, ()), *_behind.get(module_id, ()))


def num_watched() -> int:
    """How many modules are watched."""
    return len(_watched) + len(_behind)


def _entering(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
    """Process-wide forward pre-hook; torch gives keyword arguments where the module's own table has our key."""
    if torch.compiler.is_compiling():
        compiled.entering(module, args, kwargs)
        return
    targets = _watched.get(id(module))
    if targets is not None and not must_not_record():
        for target in targets:
            target.entered(module, args, kwargs)


def _leaving(module: torch.nn.Module, _args: tuple[Any, ...], output: object) -> object | None:
    """Process-wide forward hook, always called; None, but for a traced output whose gradient is observed."""
    if torch.compiler.is_compiling():
        return compiled.leaving(module, output)
    targets = _watched.get(id(module))
    if targets is not None and not must_not_record():
        for target in targets:
            target.left(module, output)
    return None


def _install() -> None:
    """Put the hooks into torch's tables. Registering them would name them by a number."""
    compiled.define()
    compiled.run_by_python(_entering, _leaving, EnterHook.__call__, LeaveHook.__call__)
    compiled.lookup, compiled.num_watched = targets_of, num_watched
    torch_module._global_forward_pre_hooks[KEY] = _entering  # type: ignore[index]
    torch_module._global_forward_hooks[KEY] = _leaving  # type: ignore[index]
    torch_module._global_forward_hooks_always_called[KEY] = True  # type: ignore[index]
    asked = getattr(torch_module, "_has_any_global_hook", None)
    if asked is not None:
        torch_module._has_any_global_hook = _has_any_other_hook
        _replaced.append(asked)


def _remove() -> None:
    for table in (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_hooks_always_called,
    ):
        table.pop(KEY, None)  # type: ignore[call-overload]
    compiled.restore_limits()
    if _replaced and torch_module._has_any_global_hook is _has_any_other_hook:
        torch_module._has_any_global_hook = _replaced.pop()
    _replaced.clear()


def _has_any_other_hook() -> bool:
    """Stand in for torch's question before its warning that hooks run twice on a compiled module: ours do not."""
    tables = (
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
    )
    return any(key != KEY for name in tables for key in getattr(torch_module, name, ()))
