"""Where the threads of a rank stand, written to its stderr without its interpreter.

A rank that a library has ended by a signal, or whose interpreter a call does not let go of, cannot say it itself.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

_SHOW = signal.SIGUSR2

_MET = "Current thread "
_CALL = re.compile(r'\s*File "(.+)", line (\d+) in (.+)')


def show_stacks_of_errors() -> None:
    """From now on this process writes where its threads stand when it is ended by an error's signal."""
    # Where stderr is no file, nobody would read it.
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        if not faulthandler.is_enabled():
            faulthandler.enable()


def show_stacks_when_asked() -> None:
    """From now on it also does when it is asked to; what a program has chosen for that signal stays."""
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        if signal.getsignal(_SHOW) is signal.SIG_DFL:
            faulthandler.register(_SHOW, chain=False)


def ask_for_stacks(pid: int) -> None:
    """Let a rank that gives no sign of life write where it stands; it is ended right after."""
    with suppress(OSError):
        os.kill(pid, _SHOW)


def thread_met(words: str) -> str:
    """Of all that a process has written, the stack of the thread that a signal met; empty where there is none."""
    start = words.rfind(_MET)
    return "" if start < 0 else words[start:].partition("\n\n")[0]


def innermost_calls(words: str, *, most: int = 6) -> list[str]:
    """The last calls of that thread, as `file:line function`, without folders."""
    calls = map(_CALL.match, thread_met(words).splitlines())
    return [f"{Path(call[1]).name}:{call[2]} {call[3]}" for call in calls if call][:most]
