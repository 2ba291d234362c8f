"""How a command ends: its exit code, and what is said of a failure, by a user's process or by one rank of many."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from freescale.app.refusals import as_problem
from freescale.app.unbroken_output import unbroken_output
from freescale.errors import Preempted


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

        problem = as_problem(error)
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
