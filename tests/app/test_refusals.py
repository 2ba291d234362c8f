"""What is said of the system's refusals: the reason, and what to do about it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable

import pytest
import torch

from freescale.app.refusals import as_problem
from freescale.errors import FreeScaleError

NO_FOLDER = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")
NO_DESCRIPTOR = [
    OSError(errno.EMFILE, os.strerror(errno.EMFILE), "shard-00000.parquet"),
    RuntimeError("unable to open file: Too many open files (24)"),
]


def told(error: Exception) -> str:
    problem = as_problem(error)
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
    assert "let this user read and write there" in told(
        PermissionError(errno.EACCES, "Permission denied", "run")
    )
    assert "another path" in told(FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), "run"))
    assert "FREESCALE_DEBUG" in told(OSError(errno.EIO, os.strerror(errno.EIO), "run"))
    lost = ConnectionResetError(errno.ECONNRESET, "reset")
    assert as_problem(lost) is lost


def test_a_taken_port_is_no_file_operation() -> None:
    taken = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    assert told(taken).startswith("this address cannot be listened on: Address already in use")
    assert "--port" in told(taken)


def _too_much_of_torch() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


@pytest.mark.parametrize("error", [_too_much_of_torch, MemoryError], ids=["torch", "python"])
def test_too_little_memory_is_told_with_what_to_ask_less_of(error: Callable[[], Exception]) -> None:
    assert told(error()).startswith("the memory of this machine was not enough")
    assert "model.dim" in told(error())


def test_how_much_memory_was_asked_for_is_told() -> None:
    assert "4,194,304.0 GiB more" in told(_too_much_of_torch())
