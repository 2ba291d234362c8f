"""A thread that calls a function every now and then, for as long as it is there.

Such threads end before the interpreter is torn down: one that then still holds a tensor or a process group is ended in
the middle of their destructors, and takes the process with it ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from freescale.kernels.runtime import start_thread

T = TypeVar("T")

_PATIENCE_S = 1.0
_over = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def poll_in_background(subject: T, look: Callable[[T], None], *, every_s: float) -> None:
    """Call `look` with the subject from a thread of its own until nobody else holds it, or the program ends.

    Args:
        subject: not kept alive by this.
        look: a function that does not hold it either.
        every_s: pause between two looks.
    """
    _threads.add(start_thread(_run, weakref.ref(subject), look, every_s))


def _run(subject_of: Callable[[], T | None], look: Callable[[T], None], every_s: float) -> None:
    while not _over.wait(every_s) and (subject := subject_of()) is not None:
        look(subject)
        del subject


@atexit.register
def _end() -> None:
    _over.set()
    for thread in list(_threads):
        thread.join(_PATIENCE_S)


def _begin_anew() -> None:
    """In a forked process: its parent's threads are not there, and one of them may have held a lock."""
    global _over
    _over = threading.Event()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
