"""How much of the machine a test had: on a virtual one, the host may give the cores to others meanwhile."""

from __future__ import annotations

from pathlib import Path


class Stolen:
    """The share of the cores' time that the host has taken since this was made; 0 where nobody says."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        taken, every = (now - before for now, before in zip(_ticks(), self._before, strict=True))
        return taken / every if every else 0.0


def _ticks() -> tuple[int, int]:
    try:
        counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return (counts[7] if len(counts) > 7 else 0), sum(counts)
