"""How a command ends: its exit code, and what is said of a failure, by a user's process or by one rank of many."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from freescale.errors import FreeScaleError


def run_to_exit_code(command: Callable[[], object]) -> None:
    """Run a command; a problem the user can fix is printed without a traceback and ends with exit code 1."""
    from freescale.comm.world import note_failure

    try:
        command()
    except (ConnectionError, TimeoutError) as error:
        # Another rank is gone; its own failure says more than the connection it left behind.
        if not note_failure(error):
            raise
        _leave(1)
    except (FreeScaleError, OSError) as error:
        if os.environ.get("FREESCALE_DEBUG"):
            raise
        problem = _as_problem(error)
        if not note_failure(problem):
            text = f"[red]error:[/] {escape(str(problem))}"
            Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        _leave(problem.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:
        # Ctrl-C arrives as the one, or as what the command line makes of it.
        code = 130 if isinstance(end, KeyboardInterrupt) else end.code
        if code == 130 and "RANK" not in os.environ:  # said once, not by every rank
            resumes = (
                "; the same command goes on from the last checkpoint" if "train" in sys.argv[1:2] else ""
            )
            Console(stderr=True).print(f"stopped{resumes}", highlight=False)
        sys.exit(code)
    except Exception as error:
        if not note_failure(error):
            raise
        _leave(1)


def _leave(code: int) -> NoReturn:
    """End this process. A thread that waits for another rank cannot be ended, so nothing is torn down under it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


def _as_problem(error: FreeScaleError | OSError) -> FreeScaleError:
    """A full or read-only disk, a missing permission: the machine's refusal is the user's to mend."""
    if isinstance(error, FreeScaleError):
        return error
    where = f"{error.filename}: " if error.filename else ""
    return FreeScaleError(
        f"the system refused a file operation: {where}{error.strerror or error}",
        next_step="free disk space or choose another folder; a run resumes from its last checkpoint"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "set FREESCALE_DEBUG=1 to see where it happened",
    )
