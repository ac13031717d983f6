from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flightrec.config.load import packaged
from flightrec.config.rules import RULE_CLASSES
from flightrec.config.schema import FILE_NAME, schema, schema_text


def test_the_file_for_editors_is_in_step():
    file = packaged().with_name(FILE_NAME)
    assert file.read_text() == schema_text(), f"run: python -m flightrec.config.schema > configs/{FILE_NAME}"


def test_the_module_prints_it():
    printed = subprocess.run(
        [sys.executable, "-m", "flightrec.config.schema"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == schema_text()


def _objects(node):
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield node
        for child in node.values():
            yield from _objects(child)
    elif isinstance(node, list):
        for child in node:
            yield from _objects(child)


def test_every_object_is_closed_and_every_key_described():
    objects = list(_objects(schema()))
    assert len(objects) == 5 + len(RULE_CLASSES)
    for found in objects:
        assert found["additionalProperties"] is False
        assert [key for key, value in found["properties"].items() if not value.get("description")] == []


@pytest.mark.parametrize("kind", RULE_CLASSES)
def test_a_rule_needs_its_kind_and_is_chosen_by_it(kind):
    found = schema()
    (rule,) = [d for d in found["$defs"].values() if d.get("properties", {}).get("kind", {}).get("const") == kind]
    assert "kind" in rule["required"]
    assert "cooldown" in rule["properties"]
    assert "cooldown_iterations" not in rule["properties"]
    assert json.dumps(found).count(f'"{kind}": "#/$defs/') == 1


def test_the_schema_agrees_with_flightrec_about_what_is_valid():
    """Only where jsonschema is installed; it is no dependency of ours."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema())
    jsonschema.Draft202012Validator.check_schema(schema())
    for valid in (
        {},
        {"ring": None},
        {"ring": {"memory": "5%"}},
        {"budget": "1%", "watch_iterations": 4},
        {"triggers": [{"kind": "manual"}]},
        {"select": [{"keep": "statistics", "tensors": "loss", "phases": "eval", "layers": ["a"]}]},
    ):
        assert validator.is_valid(valid), valid
    for invalid in (
        {"rng": {}},
        {"ring": {"memory": "5"}},
        {"ring": {"memory": 8}},
        {"ring": {"iterations": 0}},
        {"triggers": [{"name": "a"}]},
        {"triggers": [{"kind": "hang"}]},
        {"triggers": [{"kind": "manual", "layers": "a"}]},
        {"select": []},
        {"select": [{"keep": []}]},
        {"select": [{"tensors": ["grad"]}]},
        {"budget": "1"},
        {"watch_iterations": -1},
    ):
        assert not validator.is_valid(invalid), invalid
