"""The JSON Schema that editors check a configuration with. ``python -m flightrec.config.schema`` prints it."""

from __future__ import annotations

import json
import sys
from typing import Any

from flightrec.config.model import Config

FILE_NAME = "flightrec.schema.json"
"""Name of the schema among the packaged configurations."""


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a configuration file, with every key described."""
    found: dict[str, Any] = _plain(Config.model_json_schema(by_alias=True))
    for definition in found.get("$defs", {}).values():
        if "const" in definition.get("properties", {}).get("kind", {}):
            definition["required"] = sorted({"kind", *definition.get("required", [])})
    for key, section in found["properties"].items():
        if key != "budget":  # a section whose entries are all commented out
            found["properties"][key] = {"anyOf": [_without(section, "description", "default"), {"type": "null"}]} | {
                name: section[name] for name in ("description", "default") if name in section
            }
    found["title"] = "flightrec configuration"
    found["description"] = "What flightrec records, which rules judge it, what an incident holds."
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def schema_text() -> str:
    """The schema as the file in ``configs/`` holds it."""
    return json.dumps(schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _plain(node: Any) -> Any:
    """One spelling for what pydantic's versions write differently: the file must not depend on which one is there."""
    if isinstance(node, (list, tuple)):
        return [_plain(child) for child in node]
    if isinstance(node, float) and node.is_integer():
        return int(node)
    if not isinstance(node, dict):
        return node
    plain = {key: _plain(child) for key, child in node.items()}
    if len(plain.get("allOf", ())) == 1:
        plain |= plain.pop("allOf")[0]
    if plain.get("enum") == [plain.get("const")]:
        del plain["enum"]
    return plain


def _without(section: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


if __name__ == "__main__":
    sys.stdout.write(schema_text())
