"""Files that are there as a whole or as they were before, whoever is killed while writing one."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A text file to write aside; it takes its place at the end, and leaves nothing where that is not reached.

    What a killed process has left of the same file is removed first. A writer holds a lock, which ends with it.
    """
    aside = path.with_name(f".{path.name}.{platform.node().replace('/', '-')}.{os.getpid()}")
    for left in path.parent.glob(f".{path.name}.*"):
        _remove_abandoned(left)
    file = _locked(aside)
    try:
        with file:
            yield file
            file.flush()
            aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _locked(aside: Path) -> IO[str]:
    """The new file, locked; one that another writer took for abandoned, before it was, is made again."""
    while True:
        file = aside.open("w", encoding="utf-8", errors="replace")
        with contextlib.suppress(OSError, AttributeError):  # a file system or a system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if aside.exists():
            return file
        file.close()


def _remove_abandoned(aside: Path) -> None:
    """Unless somebody holds its lock."""
    with contextlib.suppress(OSError, AttributeError), aside.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside.unlink(missing_ok=True)
