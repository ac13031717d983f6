"""Layer patterns: globs, or regular expressions after ``re:``. Compiled once; no other state.

In a glob ``*`` stands for any text, dots included, ``?`` for one character, ``[ab]`` for one of several; upper and
lower case matter. A regular expression must match the whole name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from flightrec.config.expressions import compile_pattern


@functools.lru_cache(maxsize=4096)
def layer_predicate(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Function that tells whether a layer name matches one of ``patterns``.

    Raises:
        ValueError: a regular expression is invalid.
    """
    if "*" in patterns:
        return lambda _layer: True
    full_matches = [compile_pattern(pattern).fullmatch for pattern in patterns]
    return lambda layer: any(full_match(layer) is not None for full_match in full_matches)


def as_tuple(value: Any) -> Any:
    """One text as a tuple of one; anything else unchanged."""
    return (value,) if isinstance(value, str) else value


def _check_pattern(pattern: str) -> str:
    compile_pattern(pattern)
    return pattern


def _check_not_empty(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError('expected at least one pattern; "*" is every layer')
    return tuple(dict.fromkeys(patterns))


LayerPatterns = Annotated[
    tuple[Annotated[str, AfterValidator(_check_pattern)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(_check_not_empty),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
            "examples": ["*", "decoder.layers.*.mlp*", "re:decoder\\.layers\\.[0-3]\\..*"],
        }
    ),
]
"""Field type: one pattern or several, stored as a tuple of at least one."""
