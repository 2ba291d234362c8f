"""One run a folder: a second one would write over the metrics and checkpoints of the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freescale.errors import TrainingError

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def sole_run(out: Path, *, first: bool) -> Iterator[None]:
    """Keep other runs out of this folder, by the first rank of this one; however the process ends, so does the lock.

    A lock of the process, not of the file: loader processes forked later, which may outlive a rank that was killed, do
    not hold it.

    Args:
        out: folder of the run.
        first: whether this is the rank that writes there.
    """
    if not first or fcntl is None:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise TrainingError(
                "a run is already going on in this folder",
                got=str(out),
                next_step="wait for it, or give this one a folder of its own with run.out=...",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
