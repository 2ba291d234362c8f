"""How much of the machine a test had: on a virtual one, the host may give the cores to others meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WAITS_S = 240.0
"""What the tests of one process wait for a calm machine, all together."""


class Calm:
    """Waits until the host lends its cores again, as long as its time is not used up.

    Args:
        most_s: that time.
        look: the share of the cores that the host takes, looked at for a second.
    """

    def __init__(self, most_s: float = WAITS_S, look: Callable[[], float] | None = None) -> None:
        self.left_s = most_s
        self._look = look or _share_of_a_second

    def wait(self) -> None:
        """Return when less than a third is taken away, or when time is up."""
        while self.left_s > 0:
            began = time.monotonic()
            if self._look() < 1 / 3:
                return
            self.left_s -= time.monotonic() - began


class Stolen:
    """The share of the cores' time that the host has taken since this was made; 0 where nobody says."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        taken, every = (now - before for now, before in zip(_ticks(), self._before, strict=True))
        return taken / every if every else 0.0


def _share_of_a_second() -> float:
    stolen = Stolen()
    time.sleep(1)
    return stolen.share()


def _ticks() -> tuple[int, int]:
    try:
        counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return (counts[7] if len(counts) > 7 else 0), sum(counts)
