"""Kinds from outside the package, forgotten when a test is over; those that ship stay, as their modules do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freescale import registry


@contextmanager
def own_kinds(module: str | None = None, *, folder: Path | None = None) -> Iterator[None]:
    """What is registered inside, by this module of this folder or otherwise, is gone afterwards."""
    before = set(registry._kinds)
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        if module is not None:
            registry.load_plugin(module)
        yield
    finally:
        for key in set(registry._kinds) - before:
            if not registry._kinds[key].ships:
                del registry._kinds[key]
        if folder is not None:
            sys.path.remove(str(folder))
        sys.modules.pop(module or "", None)
