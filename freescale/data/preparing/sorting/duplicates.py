"""Events that the input has twice: the same user, item, time and action as one before.

A target that is a copy of the event in front of it is easy to foresee, so copies make every metric too good. Without
times nothing tells a copy from somebody who came back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freescale.data.preparing.reading.event_columns import Events

KEEP, DROP = "keep", "drop"
DUPLICATES = (KEEP, DROP)

_AT_ONE_TIME = ("user", "time", "fraction")


class Duplicates:
    """Counts copies in blocks of whole users, and leaves them out if told so.

    Args:
        drops: leave them out; the first of equal events stays.
    """

    def __init__(self, *, drops: bool) -> None:
        self._drops = drops
        self.num = 0

    def seen(self, events: Events) -> Events:
        """The events of a block to keep; sorted by user and time."""
        copies = find_copies(events)
        self.num += int(copies.sum())
        if not self._drops or not copies.any():
            return events
        kept = np.flatnonzero(~copies)
        return {name: column[kept] for name, column in events.items()}

    def describe(self) -> list[str]:
        """A line on what was found, if something was."""
        if not self.num:
            return []
        what = f"{self.num:,} events have user, item, time and action of one before"
        told = "dropped" if self._drops else "kept; `freescale prepare --duplicates drop` leaves them out"
        return [f"duplicates: {what}: {told}"]


def find_copies(events: Events) -> npt.NDArray[np.bool_]:
    """Which of these events, sorted by user and time, equal one before."""
    copies = np.zeros(len(events["user"]), dtype=np.bool_)
    if "time" not in events or not len(copies):
        return copies
    together = np.ones(len(copies) - 1, dtype=np.bool_)
    for name in _AT_ONE_TIME:
        if name in events:
            together &= events[name][1:] == events[name][:-1]
    if not together.any():
        return copies
    moments = np.concatenate([[0], np.cumsum(~together)])
    tied = np.flatnonzero(np.append(together, False) | np.insert(together, 0, False))
    keys = [moments[tied], *(events[name][tied] for name in ("item", "action") if name in events)]
    order = np.lexsort(keys[::-1])  # stable: of equal events the first stays
    same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    copies[tied[order[1:][same]]] = True
    return copies
