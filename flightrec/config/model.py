"""The configuration as frozen models: what is recorded, which rules judge it, what an incident holds.

Build one with ``load`` (YAML, mapping) or ``Config(...)``; both refuse what cannot work with ``ConfigError``. Offline:
no torch. The only state is the cache of ``Config.selects``, safe to use from several threads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from flightrec.config.checks import blind_reason, cross_check
from flightrec.config.document import dump
from flightrec.config.fields import ConfigModel, StrictInt
from flightrec.config.problems import InvalidConfigError, problems_of
from flightrec.config.quantizer_rules import UnderflowRule
from flightrec.config.rulebase import DeviceRule, RuleBase
from flightrec.config.rules import (
    AmaxSpikeRule,
    AnyRule,
    ExceptionRule,
    LossJumpRule,
    ManualRule,
    NonfiniteRule,
    Rule,
    default_rules,
)
from flightrec.config.selection import Matcher, Selection
from flightrec.config.sizes import Budget, Memory, MemoryLimit, OptionalSize, Share
from flightrec.records import Phase, Stage

__all__ = [
    "AmaxSpikeRule",
    "AnyRule",
    "Config",
    "DeviceRule",
    "ExceptionRule",
    "HistoryConfig",
    "IncidentConfig",
    "LossJumpRule",
    "ManualRule",
    "Matcher",
    "NonfiniteRule",
    "RingConfig",
    "RuleBase",
    "Selection",
    "Share",
    "UnderflowRule",
]


class RingConfig(ConfigModel):
    """The ring buffer on the device."""

    iterations: StrictInt = Field(
        default=4, ge=1, le=1024, description="Complete iterations to keep, up to and including the faulty one."
    )
    memory: MemoryLimit = Field(
        default=None,
        description="Device memory of the ring: a size such as `8 GiB`, a share such as `5%` of what is free when the "
        "recorder is attached, or null: chosen by the recorder, a small share of what is free.",
    )
    on_out_of_memory: Literal["fewer_microbatches", "fewer_iterations", "statistics_only", "error"] = Field(
        default="statistics_only",
        description="What to do when the selection does not fit into `memory`: record fewer microbatches, keep fewer "
        "iterations, keep only the statistics of the tensors that do not fit, or refuse to start.",
    )
    microbatches: Literal["all", "first", "last", "rotate"] = Field(
        default="all", description="Microbatches of an iteration whose tensors are kept."
    )
    host_memory: OptionalSize = Field(
        default=None,
        description="Shared, page-locked host memory for whole past iterations, such as `64 GiB`: copied there beside "
        "training, they survive a dead device. null: none.",
    )
    graph_replays: StrictInt | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Replays of one captured CUDA graph in an iteration that are recorded, each in a place of its own. "
        "null: as many as an iteration had microbatches; if graphs are captured before the first one ends, what fits, "
        "up to 8.",
    )


class IncidentConfig(ConfigModel):
    """What is written when a rule fires, and how much of it."""

    after: StrictInt = Field(
        default=1, ge=0, le=64, description="Iterations to record beyond the faulty one, in slots of their own."
    )
    limit: StrictInt = Field(
        default=20, ge=1, description="Most incidents that a run writes for one rule and severity."
    )
    cooldown: StrictInt = Field(
        default=50,
        ge=0,
        description="Iterations after an incident in which the same rule writes no other one of that severity.",
    )
    disk_quota: OptionalSize = Field(
        default=None,
        description="Disk space of all incidents of the run, shared by its ranks; when it is reached, the oldest "
        "incident of the same kind is deleted, the first of a kind never. null: no quota.",
    )
    writer: Literal["process", "thread"] = Field(
        default="process",
        description="Who writes the files: a process that outlives the trainer, or a thread where none can be started.",
    )
    older_iterations: StrictInt = Field(
        default=0,
        ge=0,
        le=4096,
        description="Iterations older than the ring's that an incident gets from `ring.host_memory`, beside landmarks.",
    )
    staging_memory: OptionalSize = Field(
        default=None,
        description="Shared host memory through which tensors go to the writer, in pieces, so that any ring fits; what "
        "it holds is copied off the device at once. null: chosen by the recorder.",
    )


class HistoryConfig(ConfigModel):
    """The statistics of past iterations that an incident carries along."""

    iterations: StrictInt = Field(
        default=1000, ge=1, le=1_000_000, description="Iterations whose statistics are remembered."
    )
    memory: Memory = Field(
        default=256 * 2**20,
        description="Host memory for them: a size, or a share of what is free when the recorder is made. It bounds how "
        "many tensors have a history, never how many iterations; memory that is not needed is not taken.",
    )


class Config(ConfigModel):
    """Everything that a recorder is told. See ``docs/configuration.md``.

    Raises:
        ConfigError: on construction, if something is unknown, of a wrong type, or cannot work; all of it at once.
    """

    budget: Budget = Field(
        default=Share(0.01),
        json_schema_extra={"default": "1%"},
        description="Share of a step that recording may take, such as `1%`: block boundaries and scalars are recorded "
        "in every iteration, the other layers in turns. `none`: everything that is selected in every iteration.",
    )
    watch_iterations: StrictInt = Field(
        default=8,
        ge=0,
        le=1024,
        description="Under a budget, iterations that are recorded whole after a `watch` (a precursor of a fault).",
    )
    ring: RingConfig = Field(
        default_factory=RingConfig, description="The ring buffer: how many iterations, how much memory."
    )
    select: tuple[Selection, ...] = Field(
        default=(Selection(),),
        json_schema_extra={"minItems": 1},
        description="What is recorded: for each layer and tensor the first matching entry counts. The loss and metrics "
        "are always recorded.",
    )
    triggers: tuple[Rule, ...] = Field(
        default_factory=default_rules,
        description="The rules. Default: all kinds but metric_jump, metric_threshold, unchanged_parameters and expert; "
        "`manual` is always there.",
    )
    incident: IncidentConfig = Field(default_factory=IncidentConfig, description="What is written when a rule fires.")
    history: HistoryConfig = Field(default_factory=HistoryConfig, description="Statistics of past iterations.")

    _text: str | None = PrivateAttr(default=None)

    if not TYPE_CHECKING:  # the generated signature is the one that type checkers should see

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise InvalidConfigError(problems_of(error, data, _MODELS)) from None
            self._complete_triggers()
            if problems := cross_check(self.select, self.triggers):
                raise InvalidConfigError(problems)

    @field_validator("select")
    @classmethod
    def _record_something(cls, value: tuple[Selection, ...]) -> tuple[Selection, ...]:
        if not value:
            raise ValueError("expected at least one entry; leave select out to record everything")
        return value

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        """A section whose entries are all commented out is null in YAML: as good as absent."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}

    def _complete_triggers(self) -> None:
        rules: list[AnyRule] = list(self.triggers)
        if "triggers" not in self.model_fields_set:
            rules = [rule for rule in rules if blind_reason(self.select, rule) is None]
        if not any(isinstance(rule, ManualRule) for rule in rules):
            rules.append(ManualRule())
        cooldown = {"cooldown_iterations": self.incident.cooldown}
        complete = tuple(r if r.cooldown_iterations is not None else r.model_copy(update=cooldown) for r in rules)
        self.__dict__["triggers"] = complete  # the model is frozen for its users only

    @property
    def text(self) -> str:
        """The YAML that the configuration was read from, else a complete dump of it."""
        return self.to_yaml() if self._text is None else self._text

    def remember_text(self, text: str) -> None:
        """Keep the text that the configuration was read from; ``text`` gives it back, comments included."""
        self._text = text

    def to_yaml(self) -> str:
        """All settings, defaults included, as YAML that ``load`` reads back to an equal configuration."""
        return dump(self.model_dump(mode="json", by_alias=True))

    def matcher(self) -> Matcher:
        """A matcher of its own, with an empty cache, over ``select``."""
        return Matcher(self.select)

    def selects(
        self, layer: str, tensor: str, phase: Phase | str = Phase.TRAIN, stage: Stage | None = None
    ) -> Selection | None:
        """What is kept of a tensor, or None when it is not recorded. Cached: cheap enough for a hook.

        The first entry of ``select`` that matches layer and tensor decides, also about phase and stage. The loss and
        metrics are recorded in every iteration, whether an entry names them or not.
        """
        return self._shared_matcher.selects(layer, tensor, phase, stage)

    @functools.cached_property
    def _shared_matcher(self) -> Matcher:  # in __dict__: pydantic's private attributes are slow to read
        return self.matcher()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Config:
        """A copy; with ``update`` one that is checked like a new configuration, and without the original text.

        Raises:
            ConfigError: the changed settings cannot work.
        """
        if not update:
            return super().model_copy(deep=deep)
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**settings, **update})

    def __eq__(self, other: object) -> bool:
        """Equal settings; where they were read from does not matter."""
        if not isinstance(other, Config):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))


_MODELS = {"": Config, "ring": RingConfig, "select": Selection, "incident": IncidentConfig, "history": HistoryConfig}
