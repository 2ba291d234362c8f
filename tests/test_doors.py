"""Doors: every room lists what it offers, all of it can be had, and nothing is loaded before it is asked for."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import freescale
from freescale.doors import _listed

PACKAGE = Path(freescale.__file__).parent
DOORS = sorted(
    ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    for path in PACKAGE.rglob("__init__.py")
    if "open_door(__name__)" in path.read_text()
)


def source_of(room: str) -> str:
    return (PACKAGE.parent / Path(*room.split(".")) / "__init__.py").read_text()


@pytest.mark.parametrize("room", DOORS)
def test_everything_a_door_lists_is_there(room):
    module = importlib.import_module(room)
    for name in module.__all__:
        getattr(module, name)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("room", DOORS)
def test_no_name_of_a_door_is_a_module_behind_it(room):
    # Importing the module would put it where the name is looked for.
    module = importlib.import_module(room)
    behind = {found.name for found in pkgutil.iter_modules(module.__path__)}
    assert not behind & set(module.__all__)


def test_an_unknown_name_is_told_with_its_room():
    import freescale.comm.world as world

    with pytest.raises(AttributeError, match=r"freescale\.comm\.world.*'nobody'"):
        _ = world.nobody


def test_the_list_is_what_stands_under_type_checking():
    listed = _listed(
        "if TYPE_CHECKING:\n    from a.b import C, d as e\nelse:\n    from x import y\nimport z\n"
    )
    assert listed == {"C": ("a.b", "C"), "e": ("a.b", "d")}


@pytest.mark.parametrize(
    "room",
    ["balance", "comm.world", "data", "pages", "recipe", "sim", "trace", "registry", "app.cli"],
)
def test_rooms_that_plan_parse_and_print_start_without_torch(room):
    code = f"import sys, freescale.{room}; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"


def test_launching_and_reading_recipes_need_no_torch():
    code = (
        "import sys\nfrom freescale.comm.world import launch\nfrom freescale.recipe import load_config\n"
        "load_config(None, ['model.kind=sasrec', 'embedding.optimizer=sgd'])\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"


def test_inner_modules_import_each_other_directly_not_through_their_own_door():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        room, text = ".".join(path.parent.relative_to(PACKAGE.parent).parts), path.read_text()
        if f"from {room} import" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == room
                and room in DOORS
                and room != "freescale"
            ):
                inner = {found.stem for found in path.parent.glob("*.py")} | {
                    found.name for found in path.parent.iterdir() if found.is_dir()
                }
                wrong += [f"{path}: {alias.name}" for alias in node.names if alias.name not in inner]
    assert not wrong
