"""When a process stood still: stopped, without a core, swapped out. Seen by a thread that should have run meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque

from freescale.comm.world import poll_in_background
from freescale.trace import Interval

_EVERY_S = 0.01
_SHORTEST_S = 0.03
"""Shorter ones are the scheduler's business: a thread waits for a core, or for the interpreter, that long."""


class Stalls:
    """Watches this process; costs a thread that wakes a hundred times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: deque[Interval] = deque(maxlen=1000)
        self._looked = time.monotonic()
        poll_in_background(self, Stalls.look, every_s=_EVERY_S)

    def look(self) -> None:
        """Note the time since the last look where it was too long."""
        with self._lock:
            last, self._looked = self._looked, time.monotonic()
            if self._looked - last > _SHORTEST_S:
                self._found.append((last + _EVERY_S, self._looked))

    def take(self) -> list[Interval]:
        """Those found since the last call, by the monotonic clock."""
        self.look()  # whoever asks may be awake before the thread is
        with self._lock:
            found = list(self._found)
            self._found.clear()
        return found
