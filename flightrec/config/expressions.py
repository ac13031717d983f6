"""Globs and regular expressions for names. Readers of incidents use them too, so this imports no model of the YAML.

Compiled once; no other state.
"""

from __future__ import annotations

import fnmatch
import functools
import re

REGULAR_EXPRESSION_PREFIX = "re:"


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Regular expression (use ``fullmatch``) of a glob or ``re:`` pattern.

    Raises:
        ValueError: the regular expression is invalid.
    """
    if not pattern.startswith(REGULAR_EXPRESSION_PREFIX):
        return re.compile(fnmatch.translate(pattern))
    expression = pattern[len(REGULAR_EXPRESSION_PREFIX) :].strip()
    if not expression:
        raise ValueError("expected a regular expression after re:")
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"expected a regular expression after re:, but it is invalid ({error})") from None
