"""Finds a model's Transformer Engine layers: which products each has, under which names, and with which weights.

Owns nothing; pure functions over a model, called once at attach. Imports no Transformer Engine: a model that holds its
modules has loaded it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

PACKAGE = "transformer_engine.pytorch"
ALL_EXPERTS = "gemm"
"""Suffix of a grouped layer's product whose operands come as one buffer for all experts."""


class Kind(enum.Enum):
    """What multiplies in a layer; the value is where its class stands."""

    LINEAR = "module.linear.Linear"
    LAYERNORM_LINEAR = "module.layernorm_linear.LayerNormLinear"
    LAYERNORM_MLP = "module.layernorm_mlp.LayerNormMLP"
    GROUPED = "module.grouped_linear.GroupedLinear"
    OP_LINEAR = "ops.basic.basic_linear.BasicLinear"
    OP_GROUPED = "ops.basic.grouped_linear.GroupedLinear"

    def __init__(self, path: str) -> None:
        self.is_grouped = path.endswith(".GroupedLinear")
        """Whether one call multiplies for several experts."""
        self.is_op = path.startswith("ops.")
        """Whether the fuser runs it, without the module's hooks."""


@dataclass(frozen=True)
class TeLayer:
    """One module with products.

    Attributes:
        layer: the module's name, as the stamps have it; for a ``BasicLinear`` inside ``te.ops.Linear`` the latter's.
        inner: the name of the module that holds the weights; mostly the same.
        module: the module that holds the weights.
        kind: what it is.
        products: name under which each product is recorded: the layer's own, or ``.fc1``, ``.fc2``, ``.gemm_<i>``.
        weights: by product, names of the parameters that are its weight.
        gathered: by product, tensors that the product reads gathered over the tensor-parallel group.
    """

    layer: str
    inner: str
    module: nn.Module
    kind: Kind
    products: tuple[str, ...]
    weights: tuple[tuple[str, ...], ...]
    gathered: tuple[frozenset[str], ...]

    @property
    def all_experts(self) -> str:
        """Name under which a buffer for all experts of a grouped layer is recorded."""
        return _join(self.layer, ALL_EXPERTS)

    def claims(self) -> frozenset[str]:
        """Words for the ``modules`` source: what of this module is recorded here."""
        own = {"activation", "weight", *(f"wgrad.{name}" for names in self.weights for name in names)}
        if self.products == (self.layer,):
            own |= {"gradient", "output", "dgrad"}
        return frozenset(own)


def find_layers(model: nn.Module) -> list[TeLayer]:
    """The model's layers with products, each module once, in the model's order; none without Transformer Engine."""
    classes = {kind: found for kind in Kind if (found := loaded_class(kind.value)) is not None}
    fused = loaded_class("ops.linear.Linear")
    names: dict[int, str] = {}  # a BasicLinear is named after the te.ops.Linear that it belongs to
    layers: list[TeLayer] = []
    for name, module in model.named_modules():
        if fused is not None and isinstance(module, fused):
            for inner in module.modules():
                names.setdefault(id(inner), name)
        for kind, known in classes.items():
            if isinstance(module, known):
                layers.append(_layer(names.get(id(module), name), name, module, kind))
                break
    return layers


def loaded_class(path: str) -> Any:
    """A class of Transformer Engine by its path below ``transformer_engine.pytorch``, or None if it is not loaded."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(f"{PACKAGE}.{module}"), name, None)


def _layer(layer: str, inner: str, module: Any, kind: Kind) -> TeLayer:
    weights = tuple(_weights(module, kind))
    products: tuple[str, ...] = (layer,)
    if kind is Kind.LAYERNORM_MLP:
        products = (_join(layer, "fc1"), _join(layer, "fc2"))
    elif kind.is_grouped:
        products = tuple(_join(layer, f"gemm_{i}") for i in range(len(weights)))
    return TeLayer(layer, inner, module, kind, products, weights, _gathered(module, kind, len(products)))


def _weights(module: Any, kind: Kind) -> Iterator[tuple[str, ...]]:
    if kind is Kind.LAYERNORM_MLP:
        yield ("fc1_weight",)
        yield ("fc2_weight",)
    elif kind.is_grouped:
        single = "weight0" not in module._parameters
        for i in range(int(getattr(module, "num_gemms", 0) or getattr(module, "num_groups", 0))):
            yield ("weight",) if single else (f"weight{i}",)
    else:
        yield tuple(getattr(module, "weight_names", None) or ("weight",))


def _gathered(module: Any, kind: Kind, num_products: int) -> tuple[frozenset[str], ...]:
    """By product, what it reads gathered although the quantizer of this rank made a shard of it.

    Under sequence parallelism a column-parallel product reads the whole activation, a row-parallel one the gradient.
    """
    nothing: frozenset[str] = frozenset()
    if not getattr(module, "sequence_parallel", False):
        return (nothing,) * num_products
    column, row = frozenset({"activation"}), frozenset({"gradient"})
    if kind is Kind.LAYERNORM_MLP:
        return (column, row) if getattr(module, "set_parallel_mode", False) else (nothing, nothing)
    mode = getattr(module, "parallel_mode", None) or getattr(module, "tensor_parallel_mode", None)
    found = {"column": column, "row": row}.get(mode or "", nothing)
    return (found,) * num_products


def unseen_parts(model: nn.Module) -> dict[str, str]:
    """What multiplies in this model but not through the products that are tapped: what it is, and why."""
    found: dict[str, str] = {}
    attention = [name for name, module in model.named_modules() if _is_attention(module)]
    if attention:
        found["attention products"] = (
            f"the two products inside DotProductAttention ({len(attention)} in this model, first {attention[0]!r}) run "
            "in fused kernels whose operands are not seen; the modules around them are"
        )
    sequential = loaded_class("ops.sequential.Sequential")
    if sequential is not None and any(isinstance(module, sequential) for module in model.modules()):
        found["operations of te.ops.Sequential"] = (
            "the fuser runs them without their modules' hooks: of what is inside, only the products are recorded"
        )
    return found


def _is_attention(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "DotProductAttention" and kind.__module__.startswith("transformer_engine.")


def _join(layer: str, suffix: str) -> str:
    return f"{layer}.{suffix}" if layer else suffix
