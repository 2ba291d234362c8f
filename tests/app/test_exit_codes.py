"""What is said of the system's refusals: the reason, and what to do about it."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from freescale.app.exit_codes import _as_problem
from freescale.errors import FreeScaleError

NO_FOLDER = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")
NO_DESCRIPTOR = [
    OSError(errno.EMFILE, os.strerror(errno.EMFILE), "shard-00000.parquet"),
    RuntimeError("unable to open file: Too many open files (24)"),
]


def told(error: Exception) -> str:
    problem = _as_problem(error)
    assert isinstance(problem, FreeScaleError)
    return str(problem)


@pytest.mark.parametrize("error", NO_DESCRIPTOR, ids=["system", "torch"])
def test_a_process_without_descriptors_is_told_of_the_limit(error: Exception) -> None:
    assert "may not open more files" in told(error)
    assert "ulimit -n" in told(error)


def test_a_library_that_found_no_folder_may_have_found_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TMPDIR" in told(NO_FOLDER)
    few = len(os.listdir("/proc/self/fd")) + 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: (few, few))
    assert "ulimit -n" in told(NO_FOLDER)


def test_a_full_disk_and_other_refusals_keep_their_words() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")
    assert "run/metrics.jsonl: No space left on device" in told(full)
    assert "free disk space" in told(full)
    assert "FREESCALE_DEBUG" in told(PermissionError(errno.EACCES, "Permission denied", "run"))
    lost = ConnectionResetError(errno.ECONNRESET, "reset")
    assert _as_problem(lost) is lost
