"""The door of a room: what its `__init__` lists is what others may use, imported when it is first asked for.

    if TYPE_CHECKING:
        from freescale.balance.sampler import BalancedSampler     # the list, once: for readers, mypy and the door
    else:
        __getattr__, __dir__ = open_door(__name__)

So `freescale.comm.world.launch` starts ranks without importing torch, though `Ranks` stands behind the same door.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def open_door(room: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a room whose `__init__` lists its names under `if TYPE_CHECKING`."""
    module = sys.modules[room]
    homes = _listed(inspect.getsource(module))

    def load(name: str) -> Any:
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home, inner = homes[name]
        value = getattr(importlib.import_module(home), inner)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *homes})


def _listed(source: str) -> dict[str, tuple[str, str]]:
    """Where each name under `if TYPE_CHECKING` comes from: the module, and its name there."""
    return {
        alias.asname or alias.name: (line.module or "", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
