"""Habits of the code that no linter keeps: who imports the root, how long files and functions are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flightrec

PACKAGE = Path(flightrec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@pytest.mark.parametrize("path", FILES, ids=name)
def test_module(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it owns"
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for function in functions(tree):
        assert (function.end_lineno or 0) - function.lineno < MAX_FUNCTION_LINES, function.name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module != "flightrec", f"line {node.lineno} imports the package root"
        elif isinstance(node, ast.Import):
            assert all(alias.name != "flightrec" for alias in node.names), f"line {node.lineno} imports the root"


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py" and p.parent != PACKAGE], ids=name)
def test_init_files_hold_a_docstring_only(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_root_loads_names_lazily_and_knows_them_all() -> None:
    for public in flightrec.__all__:
        assert public in dir(flightrec)
    with pytest.raises(AttributeError, match="no attribute 'Recoder'"):
        flightrec.Recoder  # noqa: B018
