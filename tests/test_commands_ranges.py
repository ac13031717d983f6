from __future__ import annotations

import pytest
import typer

from flightrec.commands.ranges import parse_ranges


@pytest.mark.parametrize(
    "texts, expected",
    [
        (["7"], [[7, 7]]),
        (["10:20"], [[10, 20]]),
        (["10:"], [[10, None]]),
        ([":20"], [[None, 20]]),
        (["-1"], [[-1, -1]]),
        (["-1:3, 9", "12"], [[-1, 3], [9, 9], [12, 12]]),
        ([], None),
        (None, None),
    ],
)
def test_what_is_meant(texts: list[str] | None, expected: list[list[int | None]] | None) -> None:
    assert parse_ranges(texts, "--iteration") == expected


@pytest.mark.parametrize("word", ["", ":", "a", "1:2:3", "1.5", "20:10", "1,,2", "٣:"])
def test_what_is_none(word: str) -> None:
    with pytest.raises(typer.BadParameter, match="included") as told:
        parse_ranges([word], "--rank")
    assert told.value.param_hint == "--rank"
