"""Follows one pass through a Transformer Engine layer: which product is which, and what its quantizers read.

A product is given no layer, and backward passes run on autograd's threads. So each forward of a layer gets a ``Run``
that says whose it is; its autograd context carries the run to the backward pass, and a delayed weight gradient takes
it along. Owns the note of which run each thread is in. A run holds no tensor: only weak references to what was
quantized, and these only while its function runs.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flightrec.records import Phase
from flightrec.sources.stamps import Stamp
from flightrec.sources.te_classes import is_storage, te_classes
from flightrec.sources.te_layers import Kind, TeLayer

if TYPE_CHECKING:
    from flightrec.sources.te import TeSource

_HYBRID = "HybridQuantizedTensorStorage"
_local = threading.local()


class Listener(NamedTuple):
    """Who wants to know of a run, and what the layer is called there."""

    source: TeSource
    stamp: Stamp
    layer: TeLayer


class Read(NamedTuple):
    """What a quantizer read to make a tensor: the source, and which of its rows."""

    made: weakref.ref[Any]
    source: weakref.ref[torch.Tensor]
    rows: tuple[int, int] | None


@dataclass(slots=True)
class Shared:
    """What a layer's forward and its backward passes know together.

    Attributes:
        columnwise: (tensor, product) whose column-wise codes were recorded in a forward of phase ``train``.
        gradients: products whose gradient was recorded in the current backward pass.
        rowwise_only: products whose gradient was recorded then without the codes that the wgrad product reads.
    """

    columnwise: set[tuple[str, int]] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    rowwise_only: set[int] = field(default_factory=set)


class Run:
    """One forward of a layer, one backward pass through it, or one delayed product of it.

    Args:
        kind: of the layer; None for one that is nobody's.
        everyone: whose layer it is; nobody's if empty.
        backward: whether this is a backward pass.
        shared: of the forward, for a backward pass.
        product: the only product that this run can hold, or None.

    Attributes:
        looks: what sources saw of the layer's module in this run, by its name.
        listeners: those of everyone whose source wants anything of this run. Whose turn it is may have changed since
            the forward, so that each run asks for itself.
    """

    __slots__ = (
        "_num_forward",
        "_num_grad",
        "_product",
        "_reads",
        "backward",
        "everyone",
        "kind",
        "listeners",
        "looks",
        "replaced",
        "shared",
    )

    def __init__(
        self,
        kind: Kind | None,
        everyone: tuple[Listener, ...],
        *,
        backward: bool = False,
        shared: Shared | None = None,
        product: int | None = None,
    ) -> None:
        self.kind = kind
        self.everyone = everyone
        self.listeners = everyone
        for listener in everyone:
            if not listener.source.is_awake(listener, backward=backward):
                self.listeners = tuple(other for other in self.listeners if other is not listener)
        self.backward = backward
        self.shared = shared if shared is not None else Shared()
        self.replaced: dict[int, Any] = {}
        self.looks: dict[str, Any] = {}
        self._product = product
        self._num_forward = 0
        self._num_grad = 0
        self._reads: dict[int, Read] = {}

    def begin_backward(self) -> Run:
        """The run of a backward pass through this forward."""
        self.shared.gradients.clear()
        self.shared.rowwise_only.clear()
        return Run(self.kind, self.everyone, backward=True, shared=self.shared)

    def delayed(self, product: int) -> Run:
        """The run of a product that is computed after this backward pass."""
        return Run(self.kind, self.everyone, backward=True, shared=self.shared, product=product)

    @property
    def is_delayed(self) -> bool:
        """Whether this is a product that is computed after the backward pass."""
        return self._product is not None

    # -- which product

    def forward_product(self) -> int:
        """Index of the forward product that runs now. In a backward pass it is a recompute, which stops after fc1."""
        index = self._num_forward
        self._num_forward += 1
        return index if self._is_pair and not self.backward else 0

    def dgrad_product(self) -> int:
        """Index of the product for the input's gradient that runs now: fc2's comes first."""
        self._num_grad += 1
        return 1 if self._is_pair and self._num_grad == 1 else 0

    def wgrad_product(self) -> int:
        """Index of the product for the weight's gradient that runs, or is put off, now.

        ``LayerNormMLP`` always computes both input gradients, and fc2's weight gradient between them.
        """
        if self._product is not None:
            return self._product
        return 1 if self._is_pair and self._num_grad == 1 else 0

    @property
    def _is_pair(self) -> bool:
        return self.kind is Kind.LAYERNORM_MLP

    def phase(self, listener: Listener) -> Phase:
        """Phase of a forward product that runs now."""
        return Phase.RECOMPUTE if self.backward else listener.stamp.phase

    # -- what the quantizers read

    def note(self, source: Any, made: Any, rows: tuple[int, int] | None = None) -> None:
        """A quantizer read ``source`` and made ``made``; both are held weakly."""
        if not self.listeners or made is None or made is source:
            return
        if not isinstance(source, torch.Tensor) or is_storage(source):
            return
        try:
            read = Read(weakref.ref(made), weakref.ref(source), rows)
        except TypeError:  # an object that has no place for weak references
            return
        self._reads[id(made)] = read
        if _HYBRID in te_classes(type(made)):  # asking a tensor for an attribute that it has not is slow
            for name in ("_rowwise_storage", "_columnwise_storage"):
                inner = getattr(made, name, None)
                if inner is not None:
                    self._reads[id(inner)] = Read(weakref.ref(inner), read.source, rows)

    def was_quantized_here(self, operand: Any) -> bool:
        """Say whether a quantizer made this operand within this run."""
        read = self._reads.get(id(operand))
        return read is not None and read.made() is operand

    def partner(self, operand: Any) -> torch.Tensor | None:
        """The very tensor that the quantizer read to make this operand, if it is still there."""
        read = self._reads.get(id(operand))
        if read is None or read.made() is not operand:
            return None
        source = read.source()
        if source is None or read.rows is None:
            return source
        return source.detach().reshape(-1, source.shape[-1])[read.rows[0] : read.rows[1]]

    def forget(self) -> None:
        """The function returned: nothing of its tensors is of use any more."""
        self._reads.clear()
        self.replaced.clear()
        self.looks.clear()


NOBODY = Run(None, ())
"""Run of a layer that belongs to no attached model."""


def current_run() -> Run | None:
    """Run that this thread is in."""
    run: Run | None = getattr(_local, "run", None)
    return run


def swap_run(run: Run | None) -> Run | None:
    """Enter a run, and say in which one this thread was."""
    before = current_run()
    _local.run = run
    return before
