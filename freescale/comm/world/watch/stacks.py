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

_OURS = f"/{__name__.partition('.')[0]}/"
_LIBRARIES = re.compile(r"/(?:site-packages|dist-packages|lib/python[\d.]+)(?=/)")
_ERROR = "Fatal Python error"
_MET = "Current thread"
_THREAD = re.compile(rf"^({_MET}|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)
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
    """Of all that a process has written, the stack of the thread that a signal met; empty where there is none.

    Where that was a thread of a library, which Python does not know, that of the main one, which comes last.
    """
    words = words[max(0, words.rfind(_ERROR)) :]  # it may have shown its threads before, when it was asked to
    threads = list(_THREAD.finditer(words))
    met = [thread for thread in threads if thread[1] == _MET] or threads
    return words[met[-1].start() :].partition("\n\n")[0] if met else ""


def place_met(words: str, *, most: int = 6) -> str:
    """Where a signal met a process, by its last calls, and the last one of ours; empty where nobody knows."""
    stack = thread_met(words)
    calls = [call for call in map(_CALL.match, stack.splitlines()) if call]
    if not calls:
        return ""
    own = next((number for number, call in enumerate(calls) if _is_ours(call[1])), 0)
    told = [f"{Path(call[1]).name}:{call[2]} {call[3]}" for call in calls]
    where = " < ".join([*told[:most], *(["...", told[own]] if own >= most else [])])
    return f"in {where}" if stack.startswith(_MET) else f"in a library's thread, while Python was in {where}"


def _is_ours(path: str) -> bool:
    """Whether a file is of this package, wherever that and its libraries lie: in a clone of its name, often."""
    return _OURS in _LIBRARIES.split(path)[-1]
