"""YAML text to plain data that remember where each key and value stood, and back. Pure functions.

YAML 1.2 words are used: only ``true`` and ``false`` are booleans (``on`` and ``no`` are texts), ``1e-5`` is a number,
there are no dates and no sexagesimal numbers. Anchors, aliases and ``<<`` merges work; tags and duplicate keys do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from flightrec.config.problems import InvalidConfigError, Path, Problem

MAX_TEXT_BYTES = 1 << 20
"""Longest text that is taken for a configuration."""

MAX_VALUES = 100_000
"""Most values, aliases counted each time: a few lines of nested aliases may stand for billions."""

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's idea of what a plain word is."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that quotes what YAML 1.1 or YAML 1.2 would not take for a text."""


for _name, _expression, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_expression})$"), _first)


def dump(data: Any) -> str:
    """YAML text of plain data; ``parse`` reads it back, and so does a reader of YAML 1.1."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


@dataclass(frozen=True)
class Document:
    """What a YAML text says, and where.

    Attributes:
        data: plain Python data; ``{}`` for an empty text.
        values: 1-based line and column of each value, by path.
        keys: 1-based line and column of each key, by path.
        problems: what is wrong already, such as a key that stands twice; ``data`` hold the rest.
    """

    data: Any
    values: dict[Path, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def locate(self, problem: Problem) -> Problem:
        """The problem with the position of its key or value, else of the nearest thing around it."""
        wanted = problem.path
        if problem.at_key and wanted in self.keys:
            return problem.located(*self.keys[wanted])
        for length in range(len(wanted), -1, -1):
            if (position := self.values.get(wanted[:length])) is not None:
                return problem.located(*position)
        return problem.located(1, 1)


def parse(text: str, origin: str, *, keys: str = "keys such as ring and triggers") -> Document:
    """Parse one YAML document.

    Args:
        text: the document.
        origin: what messages call it.
        keys: that it should have, in words.

    Raises:
        InvalidConfigError: not YAML, several documents, not a mapping, or too large. Tags, duplicate keys and keys that
            are no texts are left to the caller, in ``problems``.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise InvalidConfigError([Problem((), f"expected a configuration of at most {MAX_TEXT_BYTES} bytes")], origin)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise InvalidConfigError([_syntax_problem(error)], origin) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidConfigError([_unreadable_problem(error, text)], origin) from None
    if root is None or (isinstance(root, ScalarNode) and root.tag == _TAG + "null"):
        return Document({})
    reader = _Reader()
    try:
        data = reader.read(root, ())
    except RecursionError:
        raise InvalidConfigError([Problem((), "nested too deeply")], origin) from None
    if not isinstance(data, dict) and not reader.problems:
        kind = "a list" if isinstance(data, list) else "a single value"
        problem = Problem((), f"expected a mapping with {keys}, got {kind}")
        reader.problems.append(problem.located(*_position(root)))
    if not isinstance(data, dict) or reader.num_values > MAX_VALUES:
        raise InvalidConfigError(reader.problems, origin)
    return Document(data, reader.values, reader.keys, tuple(reader.problems))


class _Reader:
    """Walks the node tree once; collects data, positions and problems."""

    def __init__(self) -> None:
        self.values: dict[Path, tuple[int, int]] = {}
        self.keys: dict[Path, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self.num_values = 0

    def read(self, node: Node, path: Path) -> Any:
        """Plain data of a node; problems are collected, not raised."""
        self.values[path] = _position(node)
        if self._too_many(node, path):
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._refuse(node, path, "the alias refers to what it stands in")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode) and self._plain(node, path, "seq"):
                return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
            if isinstance(node, MappingNode) and self._plain(node, path, "map"):
                return {key: self.read(child, (*path, key)) for key, child in self._entries(node, path).items()}
        finally:
            self._open.discard(id(node))
        return None

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        tag, text = node.tag.removeprefix(_TAG), node.value
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "int" and len(text) < 100:
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if tag == "float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan") if len(text) < 6 else text)
        if tag not in ("str", "int", "merge"):
            self._refuse(node, path, f"tags are not used in a configuration, got {node.tag.replace(_TAG, '!!')}")
        return text

    def _plain(self, node: Node, path: Path, kind: str) -> bool:
        if node.tag != _TAG + kind:
            self._refuse(node, path, f"tags are not used in a configuration, got {node.tag.replace(_TAG, '!!')}")
        return node.tag == _TAG + kind

    def _entries(self, node: MappingNode, path: Path, *, merged: bool = False) -> dict[str, Node]:
        """Value nodes by key, merges resolved: own keys win over merged ones, earlier merges over later ones."""
        own: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                inherited = {**self._merge(value_node, path), **inherited}
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in own and not merged:
                self._refuse(key_node, (*path, key), f"the key stands here a second time, first in line {lines[key]}")
            own[key] = value_node
            lines.setdefault(key, key_node.start_mark.line + 1)
            self.keys[(*path, key)] = _position(key_node)
        return {**inherited, **own}

    def _too_many(self, node: Node, path: Path) -> bool:
        self.num_values += 1
        if self.num_values == MAX_VALUES + 1:
            self._refuse(node, path, f"expected at most {MAX_VALUES} values; are aliases nested?")
        return self.num_values > MAX_VALUES

    def _merge(self, node: Node, path: Path) -> dict[str, Node]:
        if self._too_many(node, path):
            return {}
        if isinstance(node, MappingNode) and id(node) not in self._open:
            self._open.add(id(node))
            try:
                return self._entries(node, path, merged=True)
            finally:
                self._open.discard(id(node))
        if isinstance(node, SequenceNode) and all(isinstance(child, MappingNode) for child in node.value):
            entries: dict[str, Node] = {}
            for child in node.value:
                entries = {**self._merge(child, path), **entries}
            return entries
        self._refuse(node, path, "expected << to name another mapping, or a list of mappings")
        return {}

    def _key(self, node: Node, path: Path) -> str | None:
        if isinstance(node, ScalarNode) and node.tag == _TAG + "str":
            return str(node.value)
        text = node.value if isinstance(node, ScalarNode) else "a list or mapping"
        self._refuse(node, path, f"expected a text as key, got {text or 'nothing'}; quote it if it is meant as a text")
        return None

    def _refuse(self, node: Node, path: Path, message: str) -> None:
        self.problems.append(Problem(path, message).located(*_position(node)))


def _position(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    context, start = error.context, error.context_mark
    if context and start is not None:
        context += f" that begins in line {start.line + 1}"
    message = ", ".join(part for part in (context, error.problem) if part)
    hint = ""
    if "\\t" in message:
        hint = "; indent with spaces"
    elif "found another document" in message:
        hint = "; a configuration is a single document"
    mark = error.problem_mark or error.context_mark
    problem = Problem((), f"not valid YAML: {message}{hint}")
    return problem if mark is None else problem.located(mark.line + 1, mark.column + 1)


def _unreadable_problem(error: Exception, text: str) -> Problem:
    if isinstance(error, RecursionError):
        return Problem((), "nested too deeply")
    before = text[: getattr(error, "position", 0)]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    character = getattr(error, "character", None)
    what = f"the character {character:#04x}" if isinstance(character, int) else str(error)
    return Problem((), f"not valid YAML: {what} is not allowed").located(line, column)
