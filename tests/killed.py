"""A process that is killed just before it changes a file: for loops over all such moments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "open")


def dies(act: Callable[[], Any], place: Path, *, at: int, deep: bool = True) -> bool:
    """Act in a process that is gone just before change `at` of files below a folder; whether it was.

    Without `deep` only names in the folder itself count, not those of folders inside it.
    """
    child = os.fork()
    if child == 0:
        left = at

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            paths = [Path(path) for path in map(str, arguments[:2]) if path[:1] == "/"]
            if event not in _CHANGES or not any(path.is_relative_to(place) for path in paths):
                return
            if not deep and not any(path.parent in (place, place.parent) for path in paths):
                return
            if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
                return
            if left == 0:
                os._exit(9)
            left -= 1

        sys.addaudithook(count)
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9
