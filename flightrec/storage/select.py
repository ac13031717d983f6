"""How readers choose by name: globs, regular expressions, the very name. Pure functions, no state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flightrec.config.expressions import compile_pattern
from flightrec.errors import ConfigError

Texts = str | Iterable[str]


def matching(patterns: Texts) -> Callable[[str], bool]:
    """Give the test whether a text is named by one of the patterns: a glob, ``re:`` and a regex, or the very text.

    Raises:
        ConfigError: a regular expression is invalid.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    try:
        tests = [compile_pattern(pattern).fullmatch for pattern in wanted]
    except ValueError as error:
        raise ConfigError(f"pattern among {wanted}: {error}") from None
    return lambda value: value in wanted or any(test(value) is not None for test in tests)
