"""Files that are there as a whole or as they were before, whoever is killed while writing one."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_ABANDONED_S = 3600.0
"""Of another machine nobody here can ask whether its process still writes."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A text file to write aside; it takes its place at the end, and leaves nothing where that is not reached.

    What a killed process has left of the same file is removed first.
    """
    host = platform.node().replace("/", "-")
    for left in path.parent.glob(f".{path.name}.*"):
        if _is_abandoned(left, host):
            left.unlink(missing_ok=True)
    aside = path.with_name(f".{path.name}.{host}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _is_abandoned(aside: Path, host: str) -> bool:
    whose, _, process = aside.name.rpartition(".")
    if whose.endswith(f".{host}") and process.isdigit() and os.path.isdir("/proc/self"):
        return not os.path.isdir(f"/proc/{process}")
    with contextlib.suppress(OSError):
        return time.time() - aside.stat().st_mtime > _ABANDONED_S
    return False
