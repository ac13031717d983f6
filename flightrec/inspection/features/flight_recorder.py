"""The nvdlfw_inspect feature ``FlightRecorder`` in Transformer Engine's namespace.

nvdlfw_inspect executes this file by its path, once an ``initialize``, outside ``sys.modules``: it holds no state, and
nothing in it may raise (an exception here ends the process). The session behind it is ``flightrec.inspection.session``.
"""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.registry import Registry, api_method

from flightrec.boundary import contained
from flightrec.inspection import session as sessions

_session = sessions.begin()


@Registry.register_feature(namespace="transformer_engine")
class FlightRecorder(BaseConfigAPIMapper):  # type: ignore[misc]  # nvdlfw_inspect has no type hints
    """Keep the last iterations of tensors in a ring on the device; write them to disk when a rule fires.

    Keys: ``tensors`` or ``tensors_struct``; for each tensor, or for all of them, ``freq``, ``start_step``,
    ``end_step``, ``start_end_list``, ``high_precision_tensor``, ``quantized_tensor``, ``phases``; and about the one
    recorder of the file ``recorder`` (a flightrec configuration file), or ``ring``, ``triggers``, ``incident``,
    ``history``; and ``directory``. See flightrec's docs/inspect-feature.md.

    Example::

        flightrec:
          enabled: True
          layers: {layer_name_regex_pattern: .*(fc1|proj).*}
          transformer_engine:
            FlightRecorder:
              enabled: True
              tensors: [activation, weight, gradient]
              ring: {iterations: 4}
    """

    def parse_config_and_api(self, config: Any, **kwargs: Any) -> tuple[bool, Any]:
        """What the section asks for of this tensor; always the same object, so that no cache grows by copies."""
        with contained("the feature FlightRecorder"):
            plan = _session.parse(config, kwargs.get("tensor_name"))
            return plan is not None, plan
        return False, None

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor_enabled(
        self, config: Any = None, layer_name: str = "", tensor_name: str = "", iteration: int = 0, **_: Any
    ) -> tuple[bool, int | None]:
        """Whether to show the tensor in this iteration, and in which one next; (False, None) for never again."""
        with contained("the feature FlightRecorder"):
            try:
                return _session.enabled(config, iteration)
            except Exception as error:
                _session.refuse(error)
        return sessions.NEVER

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor(
        self,
        config: Any = None,
        layer_name: str = "",
        tensor_name: str = "",
        iteration: int = 0,
        tp_group: Any = None,
        tensor: Any = None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_size: int = 1,
        **_: Any,
    ) -> None:
        """Record the tensor, during the call."""
        with contained("the feature FlightRecorder"):
            try:
                shown = sessions.Quantizations(rowwise_quantized_tensor, columnwise_quantized_tensor, quantizer)
                _session.inspect(config, layer_name, iteration, tensor, shown)
            except Exception as error:
                _session.fail(error, layer_name, tensor_name)


@Registry.register_namespace_api(namespace="flightrec")
class FlightrecNamespace(BaseNamespaceAPI):  # type: ignore[misc]
    """A namespace without features: nvdlfw_inspect tells every namespace of ``step`` and ``end_debug``."""

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """Nothing to assert."""

    def routing_condition(
        self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, None]:
        """No feature, no route."""
        return False, None

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """Nothing to assert."""

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        """There is no feature."""
        return False

    def step(self) -> None:
        """An iteration is over."""
        with contained("the feature FlightRecorder at the end of an iteration"):
            _session.on_step()

    def end_debug(self) -> None:
        """nvdlfw_inspect is closed."""
        with contained("the feature FlightRecorder at the end"):
            _session.close()
