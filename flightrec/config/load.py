"""From a file, a text or a mapping to a ``Config``. Runs before training, on the caller's thread; keeps no state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flightrec.config.document import MAX_TEXT_BYTES, parse
from flightrec.config.model import Config
from flightrec.config.problems import InvalidConfigError, Problem
from flightrec.errors import ConfigError

DEFAULT = "default.yaml"
"""The packaged configuration that a recorder without one uses."""


def load(source: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None) -> Config:
    """Build a configuration.

    Args:
        source: path of a YAML file, a mapping of the same form, a finished ``Config`` (returned as it is), or None for
            the packaged ``default.yaml``.

    Raises:
        ConfigError: the file cannot be read, or something in it is unknown, of a wrong type, or cannot work. All
            errors are told at once, each with file, line, column, key, what was expected and what was found.
    """
    if isinstance(source, Config):
        return source
    if source is None:
        source = packaged(DEFAULT)
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return load_text(_read(path), origin=str(path))
    raise ConfigError(f"expected a path, a mapping or a Config as configuration, got a {type(source).__name__}")


def load_text(text: str, origin: str = "configuration") -> Config:
    """Build a configuration from YAML text; an empty text is the default.

    Args:
        text: one YAML document.
        origin: what messages call the text, usually a file name.

    Raises:
        ConfigError: as ``load``.
    """
    document = parse(text, origin)
    problems = list(document.problems)
    config = None
    try:
        config = Config(**document.data)
    except InvalidConfigError as error:
        problems += [document.locate(problem) for problem in error.problems]
    if config is None or problems:
        raise InvalidConfigError(sorted(problems, key=lambda problem: (problem.line, problem.column)), origin)
    config.remember_text(text)
    return config


def packaged(name: str = DEFAULT) -> Path:
    """Path of a configuration that comes with flightrec, in a checkout as in an installed wheel.

    Args:
        name: file name in ``configs/``; ``.yaml`` may be left out.

    Raises:
        ConfigError: there is none of this name.
    """
    here = Path(__file__).resolve()
    folders = [folder for folder in (here.parents[1] / "configs", here.parents[2] / "configs") if folder.is_dir()]
    for folder in folders:
        for candidate in (name, f"{name}.yaml"):
            if Path(candidate).name == candidate and (folder / candidate).is_file():
                return folder / candidate
    known = sorted({path.name for folder in folders for path in folder.glob("*.yaml")})
    remedy = (
        f"available: {', '.join(known)}" if known else "the installation is incomplete, no folder configs was found"
    )
    raise ConfigError(f"no packaged configuration is called {name!r}; {remedy}")


def _from_mapping(data: Mapping[str, Any]) -> Config:
    odd = [key for key in data if not isinstance(key, str)]
    if odd:
        raise InvalidConfigError(Problem((), f"expected texts as keys, got {key!r}") for key in odd)
    return Config(**data)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_packaged_hint(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, got the byte {content[error.start]:#04x} at {error.start}"
        ) from None


def _packaged_hint(path: Path) -> str:
    try:
        found = packaged(path.name)
    except ConfigError:
        return ""
    return f"; the packaged configuration of this name is {found}"
