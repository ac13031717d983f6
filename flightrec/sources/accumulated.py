"""Where a parameter's gradient really is: ``grad``, or a buffer that a fused kernel accumulates into.

Frameworks with fused weight-gradient accumulation (Megatron, Transformer Engine) add into ``parameter.main_grad``
inside the product, and hand autograd a placeholder of uninitialised memory, so that ``parameter.grad`` means nothing.
Reads attributes and sizes only; launches nothing, never synchronises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flightrec.sources.memory import is_expanded_element

MAIN_GRAD = "main_grad"
"""Last word of the part of a gradient that was read from ``parameter.main_grad``: a running sum."""


class Gradient(NamedTuple):
    """A parameter's gradient.

    Attributes:
        tensor: the run's own memory, or None if there is nothing to judge.
        place: ``MAIN_GRAD``, or empty for ``parameter.grad``.
        reason: why there is none.
    """

    tensor: torch.Tensor | None
    place: str = ""
    reason: str = ""


def gradient_of(parameter: torch.Tensor) -> Gradient:
    """Find the gradient that autograd, or a fused kernel, has just accumulated for ``parameter``.

    ``main_grad`` counts if ``grad_added_to_main_grad`` is True or ``zero_out_wgrad`` is set, or if ``grad`` is one
    element expanded over the whole shape, which autograd itself never leaves there.
    """
    gradient = parameter.grad
    is_fused = getattr(parameter, "grad_added_to_main_grad", None) is True
    is_fused = is_fused or getattr(parameter, "zero_out_wgrad", False) is True
    is_placeholder = is_fused or (gradient is not None and is_expanded_element(gradient))
    if is_placeholder:
        main = getattr(parameter, "main_grad", None)
        if isinstance(main, torch.Tensor):
            return Gradient(main, MAIN_GRAD)
        return Gradient(None, reason="grad is a placeholder without values, and there is no main_grad")
    if gradient is None:
        reason = "an earlier hook removed the gradient (optimizer in backward), or delay_wgrad_compute puts it off"
        return Gradient(None, reason=reason)
    return Gradient(gradient)
