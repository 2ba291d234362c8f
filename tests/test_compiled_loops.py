"""A compiled loop calls only loops of its own file: numba keeps what it has compiled until that file changes."""

from __future__ import annotations

import ast
from pathlib import Path

import freescale

PACKAGE = Path(freescale.__file__).parent


def loops_of(tree: ast.Module) -> set[str]:
    """Names of the functions that numba compiles."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {each.name for each in functions if any("njit" in ast.unparse(by) for by in each.decorator_list)}


def test_no_loop_calls_one_of_another_file():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.glob("**/*.py"))}
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): loops_of(tree)
        for path, tree in trees.items()
    }
    assert sum(map(bool, modules.values())) > 5
    found = [
        f"{path.name} has {alias.name} of {node.module}"
        for path, tree in trees.items()
        if loops_of(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in modules.get(node.module or "", ())
    ]
    assert found == []
