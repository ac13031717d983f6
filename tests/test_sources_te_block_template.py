"""Operands in blocks from a template are those that are looked at in full; what differs is looked at in full again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import te_golden
import torch
from te_tensors import golden_tensor
from test_sources_extract_te import mxfp8, nvfp4
from torch import nn

from flightrec.sources.extract_te import QuantizerState
from flightrec.sources.te_block_template import BlockTemplate
from flightrec.sources.te_parts import parts_of
from flightrec.sources.te_template import ModuleLook

STATE = QuantizerState()
MODULE = nn.Linear(2, 2)
BLOCKS = [n for n, entry in enumerate(te_golden.ENTRIES) if entry["recipe"].startswith("block")]


def golden(number: int, storage: bool) -> Callable[[], Any]:
    return lambda: golden_tensor(number, storage=storage)


OPERANDS: dict[str, Callable[[], Any]] = {
    **{f"{te_golden.name_of(n)}, {s}": golden(n, s) for n in BLOCKS for s in (True, False)},
    "MXFP8": mxfp8,
    "MXFP8 tensor": lambda: mxfp8(storage=False),
    "MXFP8 of three dimensions": lambda: mxfp8((2, 48, 160)),
    "MXFP8 column-wise": lambda: mxfp8(rowwise=False),
    "MXFP8 swizzled": lambda: mxfp8((128, 128), swizzled=True),
    "NVFP4": lambda: nvfp4()[0],
    "NVFP4 of three dimensions": lambda: nvfp4((2, 16, 64))[0],
    "NVFP4 row-scaled": lambda: nvfp4(row_scaled=True)[0],
    "NVFP4 of another range": lambda: nvfp4(e4m3_max=256)[0],
    "NVFP4 column-wise": lambda: nvfp4(columnwise_only=True)[0],
}


def template_of(operand: Any, look: ModuleLook) -> BlockTemplate | None:
    parts = parts_of(operand, STATE).parts
    assert parts is not None
    return BlockTemplate.of(operand, look, parts, STATE, ())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def other_values(operand: Any) -> None:
    """New buffers of the same looks, somewhere else, with other values."""
    for name, value in list(vars(operand).items()):
        if isinstance(value, torch.Tensor):
            setattr(operand, name, value.clone().view(torch.uint8).bitwise_xor_(1).view(value.dtype))


@pytest.mark.parametrize("name", list(OPERANDS))
def test_an_operand_with_other_values_is_taken_as_if_looked_at_in_full(name: str) -> None:
    operand, look = OPERANDS[name](), ModuleLook.of(MODULE, None)
    template = template_of(operand, look)
    assert template is not None
    before = parts_of(operand, STATE).parts
    before_bits = {part: bits(tensor) for part, tensor in before.components.items()}
    other_values(operand)
    taken, full = template.parts(operand, look, True, ()), parts_of(operand, STATE).parts
    assert taken.template is template
    assert taken.info is full.info
    assert (taken.formats, taken.pair_codes, taken.is_understood) == (
        full.formats, full.pair_codes, full.is_understood,
    )  # fmt: skip
    assert list(taken.components) == list(full.components)
    for part, tensor in full.components.items():
        mine = taken.components[part]
        assert (mine.shape, mine.dtype, mine.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert torch.equal(bits(mine), bits(tensor)), part
        assert not torch.equal(bits(mine), before_bits[part]), "the values of the operand before"


CHANGES: dict[str, Callable[[Any], object]] = {
    "usage": lambda o: setattr(o._quantizer, "columnwise_usage", not o._quantizer.columnwise_usage),
    "a new attribute of the quantizer": lambda o: setattr(o._quantizer, "epsilon", 1e-3),
    "no quantizer": lambda o: setattr(o, "_quantizer", None),
    "a new attribute": lambda o: setattr(o, "another", 1),
    "format": lambda o: setattr(o, "_fp8_dtype", 8),
    "order of the scales": lambda o: setattr(o, "_with_gemm_swizzled_scales", True),
    "dtype": lambda o: setattr(o, "_dtype", torch.float32),
    "shape": lambda o: setattr(o, "_rowwise_data", o._rowwise_data.reshape(-1, 32)),
    "one side": lambda o: setattr(o, "_columnwise_data", None),
    "strides": lambda o: setattr(o, "_rowwise_data", o._rowwise_data.t().contiguous().t()),
    "freed memory": lambda o: o._rowwise_data.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_an_operand_that_differs_is_looked_at_in_full(name: str) -> None:
    operand, look = mxfp8(), ModuleLook.of(MODULE, None)
    template = template_of(operand, look)
    assert template.parts(operand, look, True, ()) is not None
    CHANGES[name](operand)
    assert template.parts(operand, look, True, ()) is None


def test_another_module_or_other_facts_are_looked_at_in_full() -> None:
    operand, look = mxfp8(), ModuleLook.of(MODULE, None)
    template = template_of(operand, look)
    assert template.parts(operand, ModuleLook.of(MODULE, None), True, ()) is None
    assert template.parts(operand, look, True, (("gathered", True),)) is None


def test_what_can_change_in_place_has_no_template() -> None:
    operand = mxfp8()
    operand._quantizer.options = ["a list"]
    assert template_of(operand, ModuleLook.of(MODULE, None)) is None


def test_a_template_holds_no_operand() -> None:
    operand = nvfp4()[0]
    template = template_of(operand, ModuleLook.of(MODULE, None))
    buffers = [value for value in vars(operand).values() if isinstance(value, torch.Tensor)]
    held = [getattr(template, name) for name in BlockTemplate.__slots__]
    held += [item for value in held if isinstance(value, (list, tuple)) for item in value]
    assert len(buffers) == 6
    assert not any(value is buffer for value in held for buffer in buffers)
