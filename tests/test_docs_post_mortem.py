"""docs/post-mortem.md shows what the commands say of runs that are done here again, but for the last digits."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "post-mortem.md").read_text()
IF_SLOW = pytest.mark.skipif(
    os.environ.get("FLIGHTREC_TEST_SLOW") != "1", reason="takes long: set FLIGHTREC_TEST_SLOW=1"
)
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module("post_mortem")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def words(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in line.split()]


def differences(shown: str, made: str) -> list[tuple[str, str]]:
    """Words that are not the same, where numbers may differ by 5%: another CPU rounds otherwise."""
    one, two = words(shown), words(made)
    pairs = [pair for pair in zip(one, two, strict=False) if not alike(*pair)]
    return pairs + ([] if len(one) == len(two) else [(f"{len(one)} words", f"{len(two)} words")])


def alike(one: str, two: str) -> bool:
    if one == two:
        return True
    if NUMBER.sub("", one) != NUMBER.sub("", two):
        return False
    numbers = [[float(number) for number in NUMBER.findall(word)] for word in (one, two)]
    return numbers[0] == pytest.approx(numbers[1], rel=0.05)


def text_of(picture: str) -> str:
    lines: dict[str, list[str]] = {}
    for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        lines.setdefault(element.get("y", ""), []).append("".join(element.itertext()).replace("\xa0", " "))
    return "\n".join(" ".join(line) for line in lines.values())


def test_numbers_are_compared_and_words_are() -> None:
    assert differences("amax 0.0489, 3.23e+04", "amax 0.0487, 3.24e+04") == []
    assert differences("amax 0.0489", "amax 0.0589") == [("0.0489", "0.0589")]
    assert differences("NaN 1", "1 1") == [("NaN", "1")]
    assert differences("a b", "a b c") == [("2 words", "3 words")]


def test_every_marker_is_one_that_is_filled(generator: ModuleType) -> None:
    markers = re.findall(r"^<!-- .* -->$", PAGE, re.MULTILINE)
    filled = [found.group().splitlines()[0] for kind in (generator.OUTPUT, generator.PROGRAM, generator.PICTURE)
              for found in kind.finditer(PAGE)]  # fmt: skip
    assert sorted(markers) == sorted(filled)
    assert {name for marker in markers for name in generator.RUNS if name in marker} == set(generator.RUNS)
    assert "```text\n```" not in PAGE


@pytest.mark.parametrize(
    "run",
    [
        "empty-sample",
        pytest.param("frozen-scale", marks=IF_SLOW),
        pytest.param("wrong-rate", marks=IF_SLOW),
    ],
)
def test_the_page_and_its_pictures_are_true(run: str, generator: ModuleType, tmp_path: Path) -> None:
    made, pictures = generator.fill(PAGE, tmp_path, [run])
    assert differences(PAGE, made) == []
    assert list(pictures) == [f"post-mortem/{run}.svg"]
    for link, picture in pictures.items():
        shown = (ROOT / "docs" / link).read_text()
        assert differences(text_of(shown), text_of(picture)) == [], link
        assert "flightrec inspect" in text_of(picture)
        assert "url(http" not in shown
