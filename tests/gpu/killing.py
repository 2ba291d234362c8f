"""A training of virtual GPUs of which one rank is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.sandbox import descendants

REPOSITORY = Path(__file__).parents[2]


class Killed(NamedTuple):
    """How a run ended: its exit code, what it said, and seconds since the kill."""

    code: int
    said: str
    seconds: float


def kill_rank_1(keys: Sequence[str], folder: Path, *, behind: int, within_s: float = 60.0) -> Killed:
    """Train into a folder, and kill rank 1 some steps behind this one; nothing of the run is left afterwards."""
    command = [sys.executable, "-m", "freescale", "train", *keys, f"run.out={folder}"]
    log, told = folder / "metrics.jsonl", folder.with_suffix(".stderr")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with told.open("w") as errors:
        run = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=folder.parent
        )
        try:
            deadline = time.monotonic() + 120
            while not log.exists() or log.read_text().count('"event": "step"') < behind:
                assert run.poll() is None, told.read_text()[-4000:]
                assert time.monotonic() < deadline, told.read_text()[-4000:]
                time.sleep(0.01)
            # Helpers of a rank were told the same as it; the launcher's own children are the ranks.
            [victim] = [each for each in descendants(run.pid) if _told(each) == (run.pid, "1")]
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            code = run.wait(timeout=within_s)
            return Killed(code, told.read_text(), time.monotonic() - began)
        finally:
            for process in (run.pid, *descendants(run.pid)) if run.poll() is None else ():
                os.kill(process, signal.SIGKILL)
            run.wait()


def _told(process: int) -> tuple[int, str | None] | None:
    """The parent of a process, and the rank that it was told."""
    try:
        parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        words = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return parent, next((word.partition("=")[2] for word in words if word.startswith("RANK=")), None)
