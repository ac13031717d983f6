"""Turns a call of one of Transformer Engine's product kernels into records: operands before it, results after it.

(transa, transb) tells the direction: TN is the forward product (A weight, B activation), NN makes the input's gradient
(A weight, B output gradient), NT the weight's gradient (A activation, B output gradient). Owns nothing; runs on the
thread and the CUDA stream of the product; keeps no operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flightrec.records import Phase, Stage
from flightrec.sources.te_classes import is_grouped, is_storage
from flightrec.sources.te_run import Run
from flightrec.sources.te_state import has_columnwise, has_own_columnwise

COLUMNWISE = "columnwise"
"""Part of a gradient's record that holds only the codes of the wgrad product, where the dgrad's operand lacked them."""
RUNNING_SUM = "main_grad"
"""Part of a weight gradient that the kernel adds to what was there: a sum over microbatches."""
_ROW_SCALED = "row-scaled NVFP4: the product is finished outside the kernel, so that its result is not seen"
_REDUCED = "the kernel reduces it over the ranks while it multiplies (Userbuffers): what is left is a partial sum"
_ACTIVATED = "the kernel applies the activation's derivative too: what it returns is the gradient before the activation"


_MADE = {"forward": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
"""What a product of a direction makes."""


@dataclass(slots=True)
class Call:
    """A product that runs now.

    Attributes:
        direction: ``forward``, ``dgrad`` or ``wgrad``.
        index: which product of the layer it is; the first expert's of a grouped layer.
    """

    direction: str
    index: int


def begin(run: Run, transa: object, transb: object) -> Call | None:
    """Say which product starts; None if the flags are not those of a product that is known."""
    if transa is True and transb is False:
        return Call("forward", run.forward_product())
    if transa is False and transb is False:
        return Call("dgrad", run.dgrad_product())
    if transa is False and transb is True:
        return Call("wgrad", run.wgrad_product())
    return None


def operands(run: Run, call: Call, a: Any, b: Any, *, offset: int = 0, only: str = "") -> None:
    """Record what a product reads.

    Args:
        run: the layer's.
        call: the product.
        a: first operand.
        b: second operand.
        offset: the expert.
        only: ``a`` or ``b`` if only that one is complete now.
    """
    index = call.index + offset
    a, b = run.replaced.get(id(a), a), run.replaced.get(id(b), b)
    for operand, which in ((a, "a"), (b, "b")):
        if only in ("", which):
            _operand(run, call.direction, index, which, operand)


def not_read(run: Run, call: Call, reason: str) -> None:
    """Tell that the second operand of a product cannot be seen."""
    tensor = "activation" if call.direction == "forward" else "gradient"
    for listener in run.listeners:
        phase = run.phase(listener) if call.direction == "forward" else Phase.TRAIN
        listener.source.unseen(listener, call.index, tensor, phase, reason)


def _operand(run: Run, direction: str, index: int, which: str, operand: Any) -> None:
    if direction == "forward":
        if which == "a":
            _weight(run, index, operand, Stage.FORWARD)
            return
        for listener in run.listeners:
            phase = run.phase(listener)
            if phase is Phase.TRAIN and has_columnwise(operand):
                run.shared.columnwise.add(("activation", index))
            listener.source.operand(listener, run, index, "activation", operand, phase, Stage.FORWARD)
    elif which == "a" and direction == "dgrad":
        _weight(run, index, operand, Stage.BACKWARD)
    elif which == "a":
        if ("activation", index) not in run.shared.columnwise and has_own_columnwise(operand):
            _backward(run, index, "activation", operand)
    elif direction == "dgrad":
        run.shared.gradients.add(index)
        if not has_columnwise(operand):
            run.shared.rowwise_only.add(index)
        _backward(run, index, "gradient", operand)
    elif index not in run.shared.gradients:
        _backward(run, index, "gradient", operand)
    elif index in run.shared.rowwise_only:
        _backward(run, index, "gradient", operand, COLUMNWISE)


def _weight(run: Run, index: int, operand: Any, stage: Stage) -> None:
    for listener in run.listeners:
        phase = Phase.TRAIN if stage is Stage.BACKWARD else run.phase(listener)
        listener.source.weight(listener, run, index, operand, phase, stage)


def _backward(run: Run, index: int, tensor: str, operand: Any, part: str = "") -> None:
    for listener in run.listeners:
        listener.source.operand(listener, run, index, tensor, operand, Phase.TRAIN, Stage.BACKWARD, part)


def result(
    run: Run, call: Call, out: Any, *, pre_activation: Any = None, has_activation: bool = False,
    accumulates: bool = False, is_reduced: bool = False, offset: int = 0,
) -> None:  # fmt: skip
    """Record what a product made.

    Args:
        run: the layer's.
        call: the product.
        out: what the kernel returned or filled.
        pre_activation: what it returned as the value before the activation that it applied.
        has_activation: whether it applied an activation, or its derivative.
        accumulates: whether it added to what ``out`` held.
        is_reduced: whether it reduced its result over the ranks at the same time.
        offset: the expert.
    """
    index = call.index + offset
    tensor = _MADE[call.direction]
    reason = _ROW_SCALED if run.replaced else _REDUCED if is_reduced else ""
    if has_activation and call.direction == "forward":
        out = pre_activation
    elif has_activation:
        reason = reason or _ACTIVATED
    part = RUNNING_SUM if tensor == "wgrad" and accumulates else ""
    stage = Stage.FORWARD if tensor == "output" else Stage.BACKWARD
    for listener in run.listeners:
        phase = run.phase(listener) if tensor == "output" else Phase.TRAIN
        if reason:
            listener.source.unseen(listener, index, tensor, phase, reason)
        elif out is not None and (is_storage(out) or out.numel()):
            listener.source.operand(listener, run, index, tensor, out, phase, stage, part)


def outputs(out: Sequence[Any], sizes: Sequence[int] | None) -> list[Any]:
    """Results of a grouped product by expert; with ``sizes`` they are rows of one buffer."""
    if sizes is None:
        return list(out)
    buffer = out[0].detach()
    made, start = [], 0
    for size in sizes:
        made.append(buffer[start : start + int(size)])
        start += int(size)
    return made


def grouped(run: Run, call: Call, a: Any, b: Any) -> None:
    """Record what a product over grouped buffers reads: a buffer as one record with its splits, a list by expert."""
    for operand, which in ((a, "a"), (b, "b")):
        if isinstance(operand, (list, tuple)):
            for i, item in enumerate(operand):
                _operand(run, call.direction, i, which, item)
            continue
        tensor = _grouped_tensor(call.direction, which)
        is_second_sight = tensor == "gradient" and call.direction == "wgrad" and -1 in run.shared.gradients
        if tensor and not is_second_sight:
            if tensor == "gradient":
                run.shared.gradients.add(-1)
            _buffer(run, tensor, operand)


def grouped_result(run: Run, call: Call, out: Any, *, accumulates: bool) -> None:
    """Record what a product over grouped buffers made."""
    if isinstance(out, (list, tuple)):
        for i, item in enumerate(out):
            result(run, call, item, accumulates=accumulates, offset=i)
        return
    tensor = _MADE[call.direction]
    _buffer(run, tensor, out, RUNNING_SUM if tensor == "wgrad" and accumulates else "")


def _grouped_tensor(direction: str, which: str) -> str:
    """Name of an operand that comes as a buffer; the column-wise codes of a grouped activation stay unrecorded."""
    return {
        ("forward", "a"): "weight",
        ("forward", "b"): "activation",
        ("dgrad", "b"): "gradient",
        ("wgrad", "b"): "gradient",
    }.get((direction, which), "")


def _buffer(run: Run, tensor: str, operand: Any, part: str = "") -> None:
    stage = Stage.FORWARD if tensor in ("activation", "weight", "output") else Stage.BACKWARD
    for listener in run.listeners:
        phase = run.phase(listener) if stage is Stage.FORWARD else Phase.TRAIN
        listener.source.buffer(listener, tensor, operand, phase, stage, part)


def rows_of(buffer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Values of a grouped buffer that is not quantized, in rows, and how many belong to each expert."""
    if not is_grouped(buffer):
        return None, None
    splits = getattr(buffer, "first_dims", None)
    data = buffer.rowwise_data
    if getattr(buffer, "quantizer", None) is not None or data is None:
        return None, splits
    shape = tuple(buffer.logical_shape)
    return data.detach().view(*shape), splits
