"""How old new items are when they are first recommended: after a publication the same few users are asked every time.

An item is born with its first event in the log. Its age is counted by the clock of the data, up to the end of the
windows that the version has learnt. Items that were there before the first version have no age here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from freescale.data import IntArray, LogSource
from freescale.errors import DataError
from freescale.exports import ExportedModel
from freescale.jagged import find_sorted
from freescale.model import retrieves

USERS, LIST = 64, 10
"""Users that are asked, and the length of the list that each gets."""


class FirstRecommended:
    """Which new items the versions of a run recommend, and when they do so first.

    Args:
        source: the log of the run.
        before: what was noted of earlier versions of the same chain.
    """

    def __init__(self, source: LogSource, before: Iterable[Mapping[str, Any]] = ()) -> None:
        self._source = source
        self._seen: set[int] = set()
        self._first: int | None = None
        for noted in before:
            self._seen.update(int(item) for item, _ in noted.get("fresh") or ())
            windows = noted.get("windows")
            self._first = windows if self._first is None and isinstance(windows, int) else self._first

    def ask(self, model: ExportedModel, *, windows: int) -> dict[str, Any]:
        """What a version that has learnt so many windows says: {"asked", "fresh": [[item, age in seconds], ...]}.

        Nothing where it cannot be asked: the model ranks candidates only, looks at features, or the window is deleted.
        """
        if self._first is None:
            self._first = windows
        if not retrieves(model.model.head) or model.features is not None or not len(model.items):
            return {}
        try:
            histories, times = self._histories(model, windows - 1)
            clock = self._source.entry(windows - 1).last
            timed = bool(model.manifest["encoder"]["time_bias"])
            lists = (
                model.recommend(histories, times=times if timed else None, request_time=clock, k=LIST)
                if histories
                else []
            )
            index = model.names.find([item for answer in lists for item, _ in answer])[1]
            shown = np.setdiff1d(model.items[index], np.fromiter(self._seen, np.int64, len(self._seen)))
            fresh = [[item, clock - born] for item, born in self._born(shown, windows)]
        except DataError:
            if any(entry.deleted for entry in self._source.log.windows):
                return {}
            raise
        self._seen.update(item for item, _ in fresh)
        return {"asked": len(histories), "fresh": fresh}

    def _histories(self, model: ExportedModel, window: int) -> tuple[list[list[Any]], list[list[int]]]:
        """What some users of a window have done up to its end, as far as the model knows the items."""
        source = self._source.window(window)
        rows = np.unique(np.linspace(0, len(source) - 1, min(USERS, len(source)), dtype=np.int64))
        read = source.read(rows)
        histories, times = [], []
        for start, stop in zip(read.offsets[:-1], read.offsets[1:]):
            items = read.columns["item"][start:stop].astype(np.int64, copy=False)
            place, there = find_sorted(model.items, items)
            known = np.flatnonzero(there)
            if len(known):
                histories.append([model.names[int(n)] for n in place[known]])
                times.append(read.columns["time"][start:stop][known].tolist())
        return histories, times

    def _born(self, items: IntArray, windows: int) -> list[tuple[int, int]]:
        """(item, time of its first event) of those that came after the windows of the first version."""
        assert self._first is not None
        found: list[tuple[int, int]] = []
        left = items
        for window in range(windows - 1, self._first - 1, -1):
            before = np.isin(left, self._source.all_items_of(window - 1).ids)
            found += self._first_events(window, left[~before])
            left = left[before]
            if not len(left):
                break
        return sorted(found)

    def _first_events(self, window: int, items: IntArray) -> list[tuple[int, int]]:
        if not len(items):
            return []
        source = self._source.window(window)
        first = np.full(len(items), np.iinfo(np.int64).max)
        for block in np.array_split(np.arange(len(source)), max(1, len(source) // 4096)):
            read = source.read(block)
            seen = read.columns["item"].astype(np.int64, copy=False)
            place, here = find_sorted(items, seen)
            np.minimum.at(first, place[here], read.columns["time"][here].astype(np.int64, copy=False))
        return [(int(item), int(moment)) for item, moment in zip(items, first)]
