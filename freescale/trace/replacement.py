"""Files that are there as a whole or as they were before, whoever is killed while writing one."""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
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
    # No name comes twice: whoever looks at an old one never removes a new one.
    own = f"{platform.node().replace('/', '-')}.{os.getpid()}.{uuid.uuid4().hex[:12]}"
    aside = path.with_name(f".{path.name}.{own}")
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
    """The new file, locked; one that another writer took for abandoned, before it was locked, is made again.

    Waits for that writer, who holds the lock for a moment: the file may be there still, and gone when he is done.
    """
    while True:
        file = aside.open("w", encoding="utf-8", errors="replace")
        with contextlib.suppress(OSError, AttributeError):  # a file system or a system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if aside.exists():
            return file
        file.close()


def _remove_abandoned(aside: Path) -> None:
    """Unless somebody holds its lock."""
    with contextlib.suppress(OSError, AttributeError), aside.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside.unlink(missing_ok=True)
