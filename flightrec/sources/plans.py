"""Decides, once at attach, what is recorded of each module.

Owns nothing; pure functions over a model and a selection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from flightrec.records import Phase, Stage
from flightrec.sources.observe import is_lazy
from flightrec.sources.sink import Sightings, Sink

_PHASES = (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)
_GRADIENT_PHASE = Phase.TRAIN  # a backward pass belongs to training, whichever forward it goes through


_NOTHING = Sightings(())


@dataclass
class LayerPlan:
    """What is recorded of one module.

    Attributes:
        layer: its first qualified name.
        module: the module.
        entering: by phase, the name under which its arguments are recorded.
        output: phases in which its result is recorded.
        weight: whether its weight is recorded as an operand.
        gradient: whether the gradient of its result is recorded.
        dgrad: whether the gradient of its arguments is recorded.
        on_entry: all that is recorded, or hooked, when it is entered.
        on_return: the same when it returns.
        reentrant: its latest training forward ran with gradients off, so that its gradients come from the recompute.
        was_captured: a CUDA graph captured its forward while it was watched.
        weight_iteration: the iteration in which its weight was recorded last.
        epoch: of the sink, for which ``sleeps`` holds.
        sleeps: nothing of it is wanted.
    """

    layer: str
    module: nn.Module
    entering: dict[Phase, str] = field(default_factory=dict)
    output: frozenset[Phase] = frozenset()
    weight: bool = False
    gradient: bool = False
    dgrad: bool = False
    on_entry: Sightings = _NOTHING
    on_return: Sightings = _NOTHING
    reentrant: bool = False
    was_captured: bool = False
    weight_iteration: int = -1
    epoch: object = None
    sleeps: bool = False

    @property
    def needs_hooks(self) -> bool:
        """Whether anything is to be seen when the module runs."""
        return bool(self.entering or self.output or self.weight or self.gradient or self.dgrad)


def is_lookup(module: nn.Module) -> bool:
    """Embeddings: their argument is an index, not an operand."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def is_product(module: nn.Module) -> bool:
    """Say whether the module multiplies what enters it by a weight of its own: not so for norms."""
    if is_lookup(module) or isinstance(module, (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)):
        return True
    if "norm" in type(module).__name__.lower():
        return False
    weight = module._parameters.get("weight")
    return weight is not None and not is_lazy(weight) and weight.dim() >= 2


def normalizes_first(module: nn.Module) -> bool:
    """Say whether what enters the module is not what its product reads (Transformer Engine's ``LayerNormLinear``)."""
    return "layer_norm_weight" in module._parameters


def plan_layers(model: nn.Module, sink: Sink, skip: Mapping[str, frozenset[str]]) -> list[LayerPlan]:
    """Plan every module of the model, each under its first name.

    Args:
        model: the attached model.
        sink: says what is selected.
        skip: by layer, tensors that another source records.
    """
    owners = _weight_owners(model, sink)
    return [_plan(layer, module, sink, skip.get(layer, frozenset()), owners) for layer, module in model.named_modules()]


def _plan(layer: str, module: nn.Module, sink: Sink, skip: frozenset[str], owners: Mapping[int, str]) -> LayerPlan:
    def phases(tensor: str) -> list[Phase]:
        stage = Stage.BACKWARD if tensor in ("gradient", "dgrad") else Stage.FORWARD
        return [p for p in _PHASES if tensor not in skip and sink.selects(layer, tensor, p, stage) is not None]

    product = is_product(module)
    plan = LayerPlan(layer, module)
    if not is_lookup(module):
        name = "activation" if product and not normalizes_first(module) else "input"
        plan.entering = dict.fromkeys(phases(name), name)
        plan.dgrad = _GRADIENT_PHASE in phases("dgrad")
    plan.output = frozenset(phases("output"))
    plan.gradient = _GRADIENT_PHASE in phases("gradient")
    if product and Phase.TRAIN in phases("weight"):
        plan.weight = _owns_weight(layer, module, sink, owners)
    _tell_sightings(plan)
    return plan


def _tell_sightings(plan: LayerPlan) -> None:
    layer = plan.layer
    entry = [(layer, name, phase, Stage.FORWARD) for phase, name in plan.entering.items()]
    if plan.dgrad:
        entry.append((layer, "dgrad", _GRADIENT_PHASE, Stage.BACKWARD))
    if plan.weight:
        entry.append((layer, "weight", Phase.TRAIN, Stage.FORWARD))
    back = [(layer, "output", phase, Stage.FORWARD) for phase in _PHASES if phase in plan.output]
    if plan.gradient:
        back.append((layer, "gradient", _GRADIENT_PHASE, Stage.BACKWARD))
    plan.on_entry, plan.on_return = Sightings(entry), Sightings(back)


def _owns_weight(layer: str, module: nn.Module, sink: Sink, owners: Mapping[int, str]) -> bool:
    weight = module._parameters.get("weight")
    if weight is None:
        # Reading a computed weight may run code that changes state (spectral norm iterates).
        sink.blind(layer, "weight", "the weight is computed (parametrized), not a parameter of this module")
        return False
    owner = owners.get(id(weight), layer)
    if owner != layer:
        sink.blind(layer, "weight", f"the same parameter as {owner}.weight, recorded there")
    return owner == layer


def _weight_owners(model: nn.Module, sink: Sink) -> dict[int, str]:
    """First selected product that holds each weight, by the parameter's id."""
    owners: dict[int, str] = {}
    for layer, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and is_product(module) and sink.selects(layer, "weight", Phase.TRAIN) is not None:
            owners.setdefault(id(weight), layer)
    return owners


def why_unseen(module: nn.Module) -> str:
    """Reason why a module's hooks would never run, or the empty text."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript runs without hooks"
    return ""
