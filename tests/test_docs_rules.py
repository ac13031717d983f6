"""docs/rules.md tells of every rule, and its pictures are what the rules say today."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from flightrec.config.rules import RULE_CLASSES, default_rules

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "rules.md").read_text()


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rules_pictures", DOCS / "rules_pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rules_pictures"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["rules_pictures"]


def test_every_kind_has_a_section_and_a_row() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, re.M)
    assert sections == [kind for kind in RULE_CLASSES if kind not in ("exception", "manual")] + ["exception, manual"]
    rows = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (\w+ \| \w+) \|", PAGE, re.M))
    usual = {rule.kind for rule in default_rules()}
    expected = {}
    for kind in sections[:-1]:
        severity = RULE_CLASSES[kind].model_fields["severity"].default.value
        expected[kind] = f"{severity} | {'yes' if kind in usual else 'no'}"
    assert rows == expected


def test_every_parameter_that_is_named_exists() -> None:
    for kind, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S):
        if kind == "exception":
            continue
        fields = {field for rule in RULE_CLASSES.values() for field in rule.model_fields}
        own = set(RULE_CLASSES[kind].model_fields)
        assert {word for word in re.findall(r"`(\w+)`", text) if word in fields} <= own | {"severity"}, kind


def test_pictures_are_what_the_rules_say(pictures: ModuleType) -> None:
    drawn = {case.kind: pictures.draw(case) for case in pictures.cases()}
    assert set(drawn) == {path.stem for path in (DOCS / "rules").glob("*.svg")}
    for kind, picture in drawn.items():
        file = (DOCS / "rules" / f"{kind}.svg").read_text()
        assert file == picture, "run: python docs/rules_pictures.py docs/rules"
        assert len(ET.fromstring(file).findall("{http://www.w3.org/2000/svg}circle")) >= 1
        assert f"rules/{kind}.svg" in PAGE


def test_every_rule_of_the_device_has_a_picture(pictures: ModuleType) -> None:
    assert {case.kind for case in pictures.cases()} == set(RULE_CLASSES) - {"exception", "manual"}
