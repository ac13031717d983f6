"""The mapping ``FlightRecorder`` of an nvdlfw_inspect section: its keys, and when which tensor is recorded.

Offline. Pure functions over frozen models; no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, ValidationError, model_validator

from flightrec.config.fields import ConfigModel, Phases, StrictInt, refuse
from flightrec.config.patterns import as_tuple
from flightrec.config.problems import Path, Problem, problems_of
from flightrec.config.selection import Keep
from flightrec.records import Phase

TensorName = Literal["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
"""The tensors that Transformer Engine shows a feature."""

Iteration = Annotated[StrictInt, Field(ge=0)]
Interval = Annotated[tuple[Iteration, Iteration], Field(description="First and last iteration, both included.")]


class TensorOptions(ConfigModel):
    """When and how a tensor is recorded, under the names that ``DumpTensors`` has for it."""

    freq: Annotated[StrictInt, Field(ge=1)] | None = Field(
        default=None, description="Record in iterations that this number divides; 1 if left out."
    )
    start_step: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="First iteration; 0 if left out."
    )
    end_step: Annotated[StrictInt, Field(ge=-1)] | None = Field(
        default=None, description="Last iteration, included; no end if left out or -1."
    )
    start_end_list: tuple[Interval, ...] | None = Field(
        default=None, description="Several `[first, last]`; then `start_step` and `end_step` do not count."
    )
    high_precision_tensor: StrictBool | None = Field(default=None, description="Keep the tensor before quantization.")
    quantized_tensor: StrictBool | None = Field(
        default=None,
        description="Keep its quantized form. If neither this nor `high_precision_tensor` is given, both are kept; if "
        "both are False, statistics only.",
    )
    phases: Phases | None = Field(
        default=None, description="`train` (the default), `recompute` (activation checkpointing), `eval`."
    )

    @model_validator(mode="after")
    def _some_iteration(self) -> TensorOptions:
        for first, last in self.start_end_list or ():
            if last < first:
                refuse(f"expected [first, last] with first <= last, got [{first}, {last}]", "start_end_list")
        start, end = self.start_step or 0, self.end_step
        if self.start_end_list is None and end is not None and -1 != end < start:
            refuse(f"expected at least start_step = {start}, got {end}: no iteration would be recorded", "end_step")
        return self


class TensorEntry(TensorOptions):
    """One entry of ``tensors_struct``; what it leaves out is taken from the keys beside ``tensors_struct``."""

    tensor: TensorName = Field(description="Which tensor.")


class FlightRecorderSection(TensorOptions):
    """What may stand under ``transformer_engine: FlightRecorder``."""

    enabled: bool = Field(default=True, description="nvdlfw_inspect's own switch.")
    tensors: Annotated[tuple[TensorName, ...], BeforeValidator(as_tuple)] | None = Field(
        default=None, description="Tensors to record, all with the options beside this key."
    )
    tensors_struct: tuple[TensorEntry, ...] | None = Field(
        default=None, description="Tensors to record, each with options of its own."
    )
    recorder: str | None = Field(
        default=None,
        description="A recorder's configuration file, for its `ring`, `triggers`, `incident` and `history`; looked for "
        "beside this file, then in the working directory. Its `select` and `budget` do not count here.",
    )
    directory: str | None = Field(
        default=None, description="Where incidents go, relative to nvdlfw_inspect's `log_dir`; `incidents` if left out."
    )
    ring: Mapping[str, Any] | None = Field(default=None, description="As in a recorder's configuration.")
    triggers: tuple[Any, ...] | None = Field(default=None, description="As in a recorder's configuration.")
    incident: Mapping[str, Any] | None = Field(default=None, description="As in a recorder's configuration.")
    history: Mapping[str, Any] | None = Field(default=None, description="As in a recorder's configuration.")

    @model_validator(mode="before")
    @classmethod
    def _what_does_not_apply(cls, data: Any) -> Any:
        for key, why in _DOES_NOT_APPLY.items():
            if isinstance(data, Mapping) and key in data:
                refuse(why, key)
        return data

    @model_validator(mode="after")
    def _some_tensor(self) -> FlightRecorderSection:
        if self.tensors is not None and self.tensors_struct is not None:
            refuse("give tensors or tensors_struct, not both: nvdlfw_inspect would ignore tensors", "tensors")
        if not self.tensors and not self.tensors_struct:
            key = "tensors" if self.tensors_struct is None else "tensors_struct"
            refuse(f"expected tensors or tensors_struct to name at least one of {', '.join(_NAMES)}", key)
        named = [entry.tensor for entry in self.tensors_struct or ()]
        for index, tensor in enumerate(named):
            if tensor in named[:index]:
                refuse(f"{tensor} stands in two entries: nvdlfw_inspect would only see the first", "tensors_struct")
        return self


_NAMES = ("activation", "weight", "gradient", "output", "wgrad", "dgrad")
_DOES_NOT_APPLY = {
    "select": "the section's layers and tensors say what is recorded; remove select",
    "budget": "freq, start_step and end_step say when a tensor is recorded; remove budget",
}
_MODELS: dict[str, type[BaseModel]] = {"": FlightRecorderSection, "tensors_struct": TensorEntry}


@dataclass(frozen=True)
class TensorPlan:
    """What is recorded of one tensor of a section's layers.

    Attributes:
        tensor: its name.
        keep: which bytes; statistics are always kept.
        phases: in which.
        freq: every how many iterations.
        intervals: (first, last) iterations, both included, in order; a last of None never comes.
    """

    tensor: str
    keep: frozenset[Keep]
    phases: tuple[Phase, ...]
    freq: int
    intervals: tuple[tuple[int, int | None], ...]

    def turn(self, iteration: int) -> tuple[bool, int | None]:
        """Whether it is recorded in this iteration, and in which one next, None for never again.

        The same answers as Transformer Engine's ``next_enabled_iter``.
        """
        now = False
        for first, last in self.intervals:
            if iteration % self.freq == 0 and first <= iteration and (last is None or iteration <= last):
                now = True
            after = max(iteration + 1, first)
            candidate = after + -after % self.freq
            if last is None or candidate <= last:
                return now, candidate
        return now, None

    def describe(self) -> str:
        """In a few words: which tensor, what is kept, when."""
        spans = [f"{first} on" if last is None else f"{first} to {last}" for first, last in self.intervals]
        when = "in every iteration" if self.freq == 1 else f"every {self.freq} iterations"
        if spans != ["0 on"]:
            when += f", from {' and '.join(spans)}"
        phases = "" if self.phases == (Phase.TRAIN,) else f", in {', '.join(phase.value for phase in self.phases)}"
        return f"{self.tensor} (keeps {', '.join(sorted(self.keep))}) {when}{phases}"


def section_of(raw: Mapping[str, Any], path: Path, problems: list[Problem]) -> FlightRecorderSection | None:
    """A checked section; None if something is wrong, which ``problems`` then hold.

    Args:
        raw: the mapping under ``FlightRecorder``.
        path: of that mapping in the file.
        problems: where to add to.
    """
    try:
        return FlightRecorderSection(**{str(key): value for key, value in raw.items()})
    except ValidationError as error:
        found = problems_of(error, raw, _MODELS)
        problems += [Problem((*path, *problem.path), problem.message, problem.at_key) for problem in found]
        return None


def tensor_plans(section: FlightRecorderSection) -> dict[str, TensorPlan]:
    """The plan of each tensor of a section."""
    if section.tensors is not None:
        return {tensor: _plan(tensor, section, section) for tensor in section.tensors}
    return {entry.tensor: _plan(entry.tensor, entry, section) for entry in section.tensors_struct or ()}


def _plan(tensor: str, entry: TensorOptions, section: TensorOptions) -> TensorPlan:
    options = {
        name: getattr(entry if name in entry.model_fields_set else section, name) for name in TensorOptions.model_fields
    }
    end = options["end_step"]
    intervals: list[tuple[int, int | None]] = sorted(options["start_end_list"] or ())
    if not intervals:
        intervals = [(options["start_step"] or 0, None if end in (None, -1) else end)]
    high_precision, quantized = options["high_precision_tensor"], options["quantized_tensor"]
    keep: set[Keep] = {"high_precision", "quantized"}
    if high_precision is not None or quantized is not None:
        keep = set()
        if high_precision:
            keep.add("high_precision")
        if quantized:
            keep.add("quantized")
        keep = keep or {"statistics"}
    phases = options["phases"] or (Phase.TRAIN,)
    return TensorPlan(tensor, frozenset(keep), phases, options["freq"] or 1, tuple(intervals))
