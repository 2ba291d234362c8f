"""How easy the house is to read: public names, long functions, long files, the files to read first; of any checkout.

python docs/measure_house.py [FOLDER OF A CHECKOUT]
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

READ_FIRST = (
    "app/commands/run.py",
    "recipe/assembly.py",
    "train/loop.py",
    "pipeline/schedule.py",
    "embedding/sharding/sharded.py",
    "model/recommender.py",
)


def modules(package: Path) -> Iterator[tuple[Path, ast.Module, int]]:
    """(path inside the package, syntax tree, lines) of every file."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(package), ast.parse(text), len(text.splitlines())


def public_names(tree: ast.Module) -> list[str]:
    """Functions and classes at the top of a file that are not private."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def statement_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def main() -> None:
    """Print the figures."""
    package = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]) / "freescale"
    names: dict[str, int] = defaultdict(int)
    used: dict[str, set[str]] = defaultdict(set)
    functions, long_files, files = [], [], defaultdict(int)
    for path, tree, lines in modules(package):
        room = path.parts[0] if len(path.parts) > 1 else "."
        files[str(path.parent)] += 1
        names[room] += len(public_names(tree))
        if lines > 300:
            long_files.append((lines, str(path)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.append((statement_lines(node), f"{path}:{node.name}"))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("freescale."):
                target = (node.module or "").split(".")[1]
                if target != room:
                    used[target] |= {alias.name for alias in node.names}
    print("| room | files | public names | used from other rooms |\n|---|---|---|---|")
    for room in sorted(names):
        count = sum(n for folder, n in files.items() if folder == room or folder.startswith(room + "/"))
        print(f"| {room} | {count} | {names[room]} | {len(used[room])} |")
    print(f"\nlargest folder: {max((n, folder) for folder, n in files.items())}")
    print(
        "longest functions:",
        *(f"{n} {where}" for n, where in sorted(functions, reverse=True)[:5]),
        sep="\n  ",
    )
    print(f"files over 300 lines: {len(long_files)}", *sorted(long_files, reverse=True)[:20], sep="\n  ")
    first = [(package / name) for name in READ_FIRST if (package / name).exists()]
    sizes = {str(path.relative_to(package)): len(path.read_text().splitlines()) for path in first}
    print(f"read first: {sizes}, {sum(sizes.values())} lines")


if __name__ == "__main__":
    main()
