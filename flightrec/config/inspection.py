"""An nvdlfw_inspect configuration that asks for the feature ``FlightRecorder``: what it says, checked before training.

The file is nvdlfw_inspect's, so it is read as that package reads it (YAML 1.1) and everything but the mappings
``transformer_engine: FlightRecorder`` is left alone. All of these in one file share one recorder. Offline: no torch, no
nvdlfw_inspect, no Transformer Engine. Pure functions; runs before training, or at the feature's first use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flightrec.config.document import Document, parse
from flightrec.config.inspection_layers import check_layers
from flightrec.config.inspection_section import (
    FlightRecorderSection,
    TensorPlan,
    section_of,
    tensor_plans,
)
from flightrec.config.load import load
from flightrec.config.model import Config
from flightrec.config.problems import InvalidConfigError, Problem, describe
from flightrec.config.problems import Path as KeyPath
from flightrec.config.selection import Selection
from flightrec.errors import ConfigError

NAMESPACE, FEATURE = "transformer_engine", "FlightRecorder"

RECORDER_KEYS = ("ring", "triggers", "incident", "history")
"""Parts of a recorder's configuration that may stand beside the tensors."""

SHARED_KEYS = ("recorder", "directory", *RECORDER_KEYS)
"""Keys about the recorder, which is one for the whole file."""


@dataclass(frozen=True)
class InspectSection:
    """One section of the file that records.

    Attributes:
        name: as the file calls it.
        raw: its ``FlightRecorder`` mapping, as nvdlfw_inspect hands it to the feature.
        tensors: what is recorded of its layers, by tensor.
    """

    name: str
    raw: Mapping[str, Any]
    tensors: Mapping[str, TensorPlan]


@dataclass(frozen=True)
class InspectPlan:
    """What a whole file asks for.

    Attributes:
        sections: in the order of the file.
        config: of the one recorder; its ``select`` is the union of the sections, its budget ``none``.
        directory: where incidents go; relative to nvdlfw_inspect's ``log_dir``.
    """

    sections: tuple[InspectSection, ...]
    config: Config
    directory: str


def looks_like_inspect(data: object) -> bool:
    """Say whether a YAML mapping is nvdlfw_inspect's and not a recorder's own: sections with layers of their own."""
    if not isinstance(data, Mapping) or any(key in Config.model_fields for key in data):
        return False
    return any(isinstance(entry, Mapping) and ("layers" in entry or NAMESPACE in entry) for entry in data.values())


def is_inspect_file(path: str | os.PathLike[str]) -> bool:
    """Say whether a file is an nvdlfw_inspect configuration; False if it cannot be read at all."""
    try:
        return looks_like_inspect(yaml.safe_load(Path(path).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False


def load_inspect(source: str | os.PathLike[str] | Mapping[str, Any]) -> InspectPlan:
    """Read and check what an nvdlfw_inspect configuration asks of flightrec.

    Args:
        source: what ``nvdlfw_inspect.api.initialize`` gets as ``config_file``: a path, or a mapping.

    Raises:
        ConfigError: the file cannot be read, no enabled section has ``FlightRecorder``, or something in one cannot
            work. All errors at once, with file, line, section and key.
    """
    if isinstance(source, Mapping):
        return plan_of(source)
    path = Path(source)
    data, document = read_inspect(path)
    return plan_of(data, document=document, origin=str(path), folder=path.parent)


def read_inspect(path: Path) -> tuple[Mapping[str, Any], Document | None]:
    """The file as nvdlfw_inspect reads it, and where each key stands (None if that cannot be told).

    Raises:
        ConfigError: it cannot be read, or is no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; nvdlfw_inspect would run without any feature") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    document = parse(text, str(path), keys="a section for each group of layers")
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: nvdlfw_inspect cannot read this: {' '.join(str(error).split())}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a mapping of sections, got {describe(data)}")
    return data, document


def plan_of(
    data: Mapping[str, Any],
    *,
    document: Document | None = None,
    origin: str = "nvdlfw_inspect configuration",
    folder: Path | None = None,
) -> InspectPlan:
    """Check the sections and join them into one plan.

    Args:
        data: the whole configuration, section by section.
        document: where its keys stand in a text.
        origin: what messages call it.
        folder: where ``recorder`` is looked for before the working directory.

    Raises:
        ConfigError: see ``load_inspect``.
    """
    twice = () if document is None else document.problems  # such as a key that stands twice: nvdlfw_inspect takes one
    problems: list[Problem] = [problem for problem in twice if FEATURE in problem.path]
    sections: list[tuple[InspectSection, FlightRecorderSection]] = []
    for name, raw in _raw_sections(data, problems):
        found = section_of(raw, (str(name), NAMESPACE, FEATURE), problems)
        if found is not None:
            sections.append((InspectSection(str(name), raw, tensor_plans(found)), found))
    if not sections and not problems:
        problems.append(Problem((), _NOTHING_HERE))
    shared = _shared(sections, problems)
    config = None
    if not problems:
        config = _config([section for section, _ in sections], shared, folder, problems)
    if problems or config is None:
        located = [problem if document is None else document.locate(problem) for problem in problems]
        raise InvalidConfigError(sorted(located, key=lambda problem: (problem.line, problem.column)), origin)
    _, directory = shared.get("directory", ((), "incidents"))
    return InspectPlan(tuple(section for section, _ in sections), config, directory)


_NOTHING_HERE = (
    f"expected an enabled section with {NAMESPACE}: {FEATURE}: {{enabled: True, tensors: [...]}}, found none: nothing "
    "would be recorded"
)


def _raw_sections(data: Mapping[str, Any], problems: list[Problem]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The enabled ``FlightRecorder`` mappings; what nvdlfw_inspect itself would stumble over is told on the way."""
    enabled = 0
    for name, section in data.items():
        if not isinstance(section, Mapping) or "enabled" not in section:
            problems.append(Problem((str(name),), "expected a section with enabled: True or False, and layers"))
            continue
        if _switch((name, "enabled"), section["enabled"], problems) and not section["enabled"]:
            continue
        enabled += 1
        if not isinstance(section.get("layers"), Mapping):
            problems.append(Problem((name,), "missing key layers, such as {layer_name_regex_pattern: .*fc1.*}"))
        if FEATURE in section:
            where = f"{FEATURE} stands under {NAMESPACE}:, not beside it"
            problems.append(Problem((name, FEATURE), where, at_key=True))
        features = section.get(NAMESPACE)
        raw = features.get(FEATURE) if isinstance(features, Mapping) else None
        if isinstance(features, Mapping) and FEATURE in features:
            path: KeyPath = (name, NAMESPACE, FEATURE)
            if not isinstance(raw, Mapping):
                problems.append(Problem(path, f"expected a mapping with enabled and tensors, got {describe(raw)}"))
            elif "enabled" not in raw:
                problems.append(Problem(path, "missing key enabled: True or False"))
            elif _switch((*path, "enabled"), raw["enabled"], problems) and raw["enabled"]:
                if isinstance(section.get("layers"), Mapping):
                    check_layers((name, "layers"), section["layers"], problems)
                yield name, raw
    if not enabled and not problems:
        problems.append(Problem((), "no section is enabled; nvdlfw_inspect refuses such a file"))


def _switch(path: KeyPath, value: object, problems: list[Problem]) -> bool:
    """Say whether a value of ``enabled`` means what it looks like."""
    if isinstance(value, bool):
        return True
    taken = f"which nvdlfw_inspect takes for {bool(value)}"
    problems.append(Problem(path, f"expected True or False, got {describe(value)}, {taken}"))
    return False


def _shared(
    sections: Sequence[tuple[InspectSection, FlightRecorderSection]], problems: list[Problem]
) -> dict[str, tuple[KeyPath, Any]]:
    """What the sections say about the one recorder: key to where it was said first, and the value."""
    said: dict[str, tuple[KeyPath, Any]] = {}
    for section, model in sections:
        for key in SHARED_KEYS:
            if key not in model.model_fields_set or (value := getattr(model, key)) is None:
                continue
            path: KeyPath = (section.name, NAMESPACE, FEATURE, key)
            first, before = said.setdefault(key, (path, value))
            if before != value:
                problems.append(
                    Problem(
                        path,
                        f"one recorder serves the whole file, and section {first[0]} asks for another {key}: "
                        f"{describe(before)}; say it in one section only",
                    )
                )
    if "recorder" in said and (beside := [key for key in RECORDER_KEYS if key in said]):
        where, name = said["recorder"]
        remedy = "set {} there, or leave recorder out and say everything here"
        problems += [
            Problem(
                said[key][0], f"section {where[0]} takes the settings from {name}; {remedy.format(key)}", at_key=True
            )
            for key in beside
        ]
    return said


def _config(
    sections: Sequence[InspectSection],
    shared: Mapping[str, tuple[KeyPath, Any]],
    folder: Path | None,
    problems: list[Problem],
) -> Config | None:
    plans = [plan for section in sections for plan in section.tensors.values()]
    keep = frozenset[Any]().union(*(plan.keep for plan in plans))
    select = Selection(
        tensors=tuple(dict.fromkeys(plan.tensor for plan in plans)),
        keep=keep,
        phases=tuple(dict.fromkeys(phase for plan in plans for phase in plan.phases)),
    )
    if "recorder" in shared:
        config = _by_reference(*shared["recorder"], select, folder, problems)
        return None if config is None else _without_false_alarms(config, plans)
    settings = {key: shared[key][1] for key in RECORDER_KEYS if key in shared}
    try:
        return _without_false_alarms(Config(budget="none", select=(select,), **settings), plans)
    except InvalidConfigError as error:
        for problem in error.problems:
            key = str(problem.path[0]) if problem.path else ""
            prefix = shared[key][0][:-1] if key in shared else (sections[0].name, NAMESPACE, FEATURE)
            problems.append(Problem((*prefix, *problem.path), problem.message, problem.at_key))
        return None


def _without_false_alarms(config: Config, plans: Sequence[TensorPlan]) -> Config:
    """Where recording ends by itself, the default rules do not take that for a tensor that has gone missing."""
    if "triggers" in config.model_fields_set or all(last is None for plan in plans for _, last in plan.intervals):
        return config
    return config.model_copy(update={"triggers": tuple(r for r in config.triggers if r.kind != "missing_record")})


def _by_reference(
    path: KeyPath, name: str, select: Selection, folder: Path | None, problems: list[Problem]
) -> Config | None:
    """A recorder's own file: its ``select`` and ``budget`` are replaced, the rest counts."""
    candidates = [Path(name)] if folder is None or Path(name).is_absolute() else [folder / name, Path(name)]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        tried = " or ".join(str(candidate) for candidate in candidates)
        problems.append(Problem(path, f"no such file: {tried}"))
        return None
    try:
        return load(found).model_copy(update={"select": (select,), "budget": "none"})
    except InvalidConfigError as error:
        origin = error.origin if error.origin != "configuration" else f"{found}, with the tensors of this file"
        problems += [Problem(path, problem.render(origin)) for problem in error.problems]
    except ConfigError as error:
        problems.append(Problem(path, str(error)))
    return None
