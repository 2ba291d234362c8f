"""How a command ends: its exit code, and what is said of a failure, by a user's process or by one rank of many."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from freescale.app.unbroken_output import unbroken_output
from freescale.errors import FreeScaleError, Preempted

_NO_FOLDER = "No usable temporary directory"
"""What Python says where it could not write into any folder for temporary files, whatever kept it from that."""

_CLOSED_SINCE = 8
"""Files that may have been closed between an error and its telling."""


def run_to_exit_code(command: Callable[[], object]) -> None:
    """Run a command and end the process with the exit code of what happened (freescale/errors.py, docs/clusters.md).

    A problem the user can mend is told without a traceback.
    """
    with unbroken_output():
        _run_to_exit_code(command)


def _run_to_exit_code(command: Callable[[], object]) -> None:
    try:
        command()
    except Preempted as stop:
        if "RANK" not in os.environ or os.environ["RANK"] == "0":  # said once, not by every rank
            Console(stderr=True).print(escape(str(stop)), highlight=False, soft_wrap=True)
        _leave(stop.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:
        # Ctrl-C arrives as the one, or as what the command line makes of it.
        code = 130 if isinstance(end, KeyboardInterrupt) else end.code
        if code == 130 and "RANK" not in os.environ:
            resumes = (
                "; the same command goes on from the last checkpoint" if "train" in sys.argv[1:2] else ""
            )
            Console(stderr=True).print(f"stopped{resumes}", highlight=False)
        if isinstance(code, int | None) and "RANK" in os.environ:
            _leave(code or 0)
        sys.exit(code)
    except Exception as error:
        from freescale.comm.world import report_failure, was_reported

        problem = _as_problem(error)
        if os.environ.get("FREESCALE_DEBUG") and problem is not error:
            raise
        others_know = was_reported(problem)
        note = report_failure(problem)
        if not others_know and "RANK" in os.environ:
            from freescale.comm.world import send_word

            send_word(note)
        _leave(note.exit_code)


def _leave(code: int) -> NoReturn:
    """End this process; with threads, or as one of several ranks, nothing is torn down that may wait for others."""
    if threading.active_count() > 1 or "RANK" in os.environ:
        from freescale.comm.world import end_process

        end_process(code)
    sys.exit(code)


def _as_problem(error: Exception) -> Exception:
    """A full or read-only disk, a missing permission: the machine's refusal is the user's to mend."""
    if _too_many_files(error):
        return FreeScaleError(
            "this process may not open more files",
            got=f"{os.strerror(errno.EMFILE)} ({str(error).splitlines()[0]})",
            next_step="raise the limit (`ulimit -n`)",
        )
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError):
        return error
    if _NO_FOLDER in str(error):
        return FreeScaleError(
            f"there is no folder for temporary files: {error.strerror or error}",
            next_step="set TMPDIR to a folder that this user may write to, on a disk that is not full",
        )
    where = f"{error.filename}: " if error.filename else ""
    return FreeScaleError(
        f"the system refused a file operation: {where}{error.strerror or error}",
        next_step="free disk space or choose another folder; a run resumes from its last checkpoint"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "set FREESCALE_DEBUG=1 to see where it happened",
    )


def _too_many_files(error: Exception) -> bool:
    """Whether this process had no descriptor left; libraries say so in words of their own, or of something else."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return True
    if isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error):
        return True
    return isinstance(error, OSError) and _NO_FOLDER in str(error) and _few_left()


def _few_left() -> bool:
    """Whether almost as many files are open as may be."""
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError as refused:
        return refused.errno == errno.EMFILE
    return num_open + _CLOSED_SINCE >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
