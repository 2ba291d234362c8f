"""Benchmarks, examples and scripts of the docs take names that are there: most of them run on a GPU alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("benchmarks", "examples", "docs") for path in (REPOSITORY / folder).rglob("*.py")
)
NEEDS = {"triton"}  # what a machine may lack


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_names_of_the_package_are_there(path: Path) -> None:
    tree = ast.parse(path.read_text())
    modules = dict(modules_of(tree))
    missing = [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        if not hasattr(modules[node.value.id], node.attr) and not isinstance(node.ctx, ast.Store)
    ]
    assert missing == []


def modules_of(tree: ast.AST) -> Iterator[tuple[str, ModuleType]]:
    """Modules of the package under the names they have in a file; a name that is not there fails."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith("freescale"):
                    yield alias.asname, importlib.import_module(alias.name)
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("freescale"):
            continue
        try:
            module = importlib.import_module(node.module or "")
        except ModuleNotFoundError as error:
            if error.name not in NEEDS:
                raise
            continue
        for alias in node.names:
            found = found_in(module, alias.name, line=node.lineno)
            if isinstance(found, ModuleType):
                yield alias.asname or alias.name, found


def found_in(module: ModuleType, name: str, *, line: int) -> object:
    """A name of a module, or a module of a package."""
    if hasattr(module, name):
        return getattr(module, name)
    try:
        return importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name in NEEDS:
            return None
        pytest.fail(f"line {line}: {module.__name__} has no {name}")
