"""Finds which records form a product, from their keys: no table tells it.

Within a rank and an iteration, of one layer, microbatch and call: activation x weight makes the output, gradient x
weight the dgrad, gradient x activation the wgrad. Each product reads the codes of its own direction. What does not fit,
or was not recorded, is named with its reason. Pure functions over tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.records import Phase, Stage
from flightrec.storage.record import HIGH_PRECISION, Record

Matrix = npt.NDArray[np.float32]
_MADE = {"output": "forward", "dgrad": "dgrad", "wgrad": "wgrad"}
_READS = {"forward": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}
_SIDES = {
    "forward": ("rowwise", "rowwise"),
    "dgrad": ("rowwise", "columnwise"),
    "wgrad": ("columnwise", "columnwise"),
}
_GEMM = {"forward": "fp8_gemm_fprop", "dgrad": "fp8_gemm_dgrad", "wgrad": "fp8_gemm_wgrad"}
_NARROW = ((8, 9), (9, 0))
"""Compute capabilities whose tensor cores keep about 14 bits of FP8 products' sums."""
_RUNNING_SUM = "a running sum over microbatches (main_grad): what was there before the product is not recorded"
_SUM_OF_CALLS = "it is parameter.grad, which also holds what earlier microbatches, calls or steps left there"
_PARAMETER = "the parameter's gradient as autograd accumulated it, not the result of one product"


@dataclass(frozen=True)
class _Operand:
    """A record, and which of its sides a product read; no side: its high-precision tensor."""

    record: Record
    side: str | None

    def read(self) -> Matrix:
        """Its numbers, float32 [rows, columns]."""
        if self.side is None:
            values = self.record.high_precision
        else:
            whole = self.record.quantized
            values = None if whole is None else whole.dequantize(side=self.side)
        assert values is not None
        return np.asarray(values, dtype=np.float32).reshape(-1, values.shape[-1])


@dataclass(frozen=True)
class Product:
    """One product that was recorded.

    Attributes:
        direction: ``forward``, ``dgrad`` or ``wgrad``.
        out: the record of the result.
        operands: what it read.
        why_not: why it cannot be computed again, or empty.
        doubt: why a difference would be no evidence, or empty.
        notes: what was assumed.
        unit: unit roundoff in which the kernel adds.
        chain: so many terms are added in it before float32 takes over; 0: all.
    """

    direction: str
    out: Record
    operands: tuple[_Operand, ...] = ()
    why_not: str = ""
    doubt: str = ""
    notes: tuple[str, ...] = field(default=())
    unit: float = 2.0**-24
    chain: int = 0

    def left(self) -> Matrix:
        """First factor, [rows, terms]."""
        found = self.operands[0].read()
        return found.T if self.direction == "wgrad" else found

    def right(self) -> Matrix:
        """Second factor, transposed: [columns, terms]."""
        found = self.operands[1].read()
        return found if self.direction == "forward" else found.T

    def result(self) -> Matrix:
        """What the kernel returned, [rows, columns]."""
        found = self.out.high_precision
        assert found is not None
        return np.asarray(found, dtype=np.float32).reshape(-1, found.shape[-1] if found.ndim else 1)

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Index of an element in the record's own shape."""
        shape = self.out.shape
        return tuple(int(i) for i in np.unravel_index(row * shape[-1] + column, shape))


def products_of(records: Iterable[Record], environment: Mapping[str, Any]) -> list[Product]:
    """Products among the records of one rank.

    Args:
        records: all of the rank, or those of some layers.
        environment: of the rank; tells the GPU.
    """
    found: dict[tuple[Any, ...], list[Record]] = {}
    made: list[Record] = []
    for record in records:
        key = record.key
        if key.tensor in _MADE and key.phase is not Phase.WARMUP:
            made.append(record)
        elif key.tensor in ("activation", "weight", "gradient"):
            found.setdefault((record.attempt, record.iteration, key.layer, key.tensor), []).append(record)
    return [_product(record, lambda *words: found.get(words, []), environment) for record in made]


def _product(out: Record, known: Callable[..., list[Record]], environment: Mapping[str, Any]) -> Product:
    key = out.key
    direction = _MADE[key.tensor]
    if key.part == "main_grad":
        return Product(direction, out, why_not=_RUNNING_SUM)
    if direction == "wgrad" and (key.part or key.stage is not Stage.BACKWARD):
        return Product(direction, out, why_not=_PARAMETER)
    if not any(part.name == HIGH_PRECISION for part in out.components):
        return Product(direction, out, why_not="no bytes of its result were recorded")
    if out.why_absent:
        return Product(direction, out, why_not=out.why_absent)
    operands: list[_Operand] = []
    doubts: list[str] = []
    for tensor, side in zip(_READS[direction], _SIDES[direction], strict=True):
        options = known(out.attempt, out.iteration, key.layer, tensor)
        operand, why, doubt = _operand(out, options, tensor, side)
        if operand is None:
            return Product(direction, out, why_not=why)
        operands.append(operand)
        doubts.append(doubt)
    infos = [operand.record.metadata for operand in operands if operand.side is not None]
    if not infos:
        return Product(
            direction,
            out,
            why_not="both operands are in high precision, and no record says that the layer is a product",
        )
    if _is_transformed(operands[0]) != _is_transformed(operands[1]):
        return Product(direction, out, why_not="only one operand was Hadamard-transformed")
    if any(not str(info.get("class_name", "")).startswith(("transformer_engine.", "torchao.")) for info in infos):
        doubts.append("nothing says that this layer's result is the plain product of these operands")
    if direction == "wgrad" and any(str(info.get("class_name", "")).startswith("torchao.") for info in infos):
        # torchao's products return to autograd; what is recorded is the sum that autograd keeps of them.
        doubts.append(_SUM_OF_CALLS)
    unit, chain, notes = _accumulation(direction, infos, environment)
    doubt = next((doubt for doubt in doubts if doubt), "")
    return Product(direction, out, tuple(operands), doubt=doubt, notes=notes, unit=unit, chain=chain)


def _operand(out: Record, options: list[Record], tensor: str, side: str) -> tuple[_Operand | None, str, str]:
    """An operand, or why there is none, and why it may not be the very one."""
    key = out.key
    doubt = ""
    if tensor == "weight":
        mine = [record for record in options if record.key.phase is Phase.TRAIN]
        if mine and all(record.key.microbatch != key.microbatch for record in mine) and _is_delayed(mine[0]):
            doubt = "under delayed scaling the weight may have been quantized anew since its microbatch was recorded"
    else:
        phase = key.phase if out.key.tensor == "output" else Phase.TRAIN
        mine = [
            record
            for record in options
            if (record.key.microbatch, record.key.call, record.key.phase) == (key.microbatch, key.call, phase)
        ]
    if not mine:
        return None, f"its {tensor} was not recorded", ""
    for record in mine:
        found = _side_of(record, side)
        if found is not None:
            if record.metadata.get("metadata", {}).get("gathered"):
                doubt = f"the product read the {tensor} gathered over the ranks"
            return found, "", doubt
    absent = next((record.why_absent for record in mine if record.why_absent), "")
    return None, absent or f"the {side} codes of its {tensor}, which this product reads, were not recorded", ""


def _side_of(record: Record, side: str) -> _Operand | None:
    whole = record.quantized
    if whole is None:
        plain = any(part.name == HIGH_PRECISION for part in record.components) and not record.why_absent
        return _Operand(record, None) if plain and len(record.components) == 1 else None
    if _has_one_side(whole.metadata, whole.formats):
        side = "rowwise"
    name = "data" if side == "rowwise" else "columnwise_data"
    return _Operand(record, side) if name in whole.formats else None


def _has_one_side(info: Mapping[str, Any], formats: Mapping[str, str]) -> bool:
    """Whether both directions read the same codes: one scale a tensor."""
    if "columnwise_data" in formats:
        return False
    metadata = info.get("metadata", {})
    if "scheme" in metadata:
        return metadata["scheme"] in ("float8", "identity")
    return metadata.get("granularity") == "tensorwise" or (
        not info.get("block_shape") and "granularity" not in metadata
    )


def _is_delayed(record: Record) -> bool:
    metadata = record.metadata.get("metadata", {})
    words = metadata.get("quantizer") or {}
    return metadata.get("scheme") == "float8" and "Current" not in str(words.get("class", ""))


def _is_transformed(operand: _Operand) -> bool:
    metadata = operand.record.metadata.get("metadata", {})
    own = metadata.get("columnwise") if operand.side == "columnwise" else metadata
    return bool((own or {}).get("rht"))


def _accumulation(
    direction: str, infos: list[Mapping[str, Any]], environment: Mapping[str, Any]
) -> tuple[float, int, tuple[str, ...]]:
    """Unit roundoff of the kernel's sums, after how many terms float32 takes over, and what was assumed."""
    gpu = environment.get("gpu") or {}
    capability = gpu.get("capability") if isinstance(gpu, Mapping) else None
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(capability)))
    is_fp8 = all(str(info.get("format", "")).startswith("float8") for info in infos)
    if numbers[:2] not in _NARROW or not is_fp8:
        return 2.0**-24, 0, ()
    recipes = [info.get("metadata", {}).get("recipe") or {} for info in infos]
    told = next((recipe[_GEMM[direction]] for recipe in recipes if _GEMM[direction] in recipe), None)
    is_split = "true" in str(told).lower() or all(info.get("block_shape") for info in infos)
    if told is None and not is_split:
        return 2.0**-13, 0, ("the recipe does not tell whether the accumulator was split: taken as not",)
    return 2.0**-13, 128 if is_split else 0, ()


def size_of(product: Product) -> int:
    """Bytes that the comparison reads, for progress."""
    return sum(record.num_bytes for record in (product.out, *(operand.record for operand in product.operands)))
