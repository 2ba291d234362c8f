"""What a log must hold, by dicts and loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from freescale.data import Log, ParquetSource
from freescale.data.log.log_file import TARGETS_FILE

Event = tuple[int, int, int]
"""User, item, time."""
Row = tuple[int, tuple[int, ...], int]
"""User, items, how many of them are targets."""


@dataclass
class ReferenceLog:
    """A log of lists."""

    max_length: int
    max_late: int | None = None
    every: int | None = None
    histories: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    windows: list[list[Row]] = field(default_factory=list)
    catalogues: list[dict[int, int]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    end: int | None = None

    def append(self, events: list[Event]) -> None:
        """Seal the events of one input."""
        end = self.end
        if end is not None and self.max_late is not None:
            events = [event for event in events if event[2] >= end - self.max_late]
        events = sorted(events, key=lambda event: (event[0], event[2]))
        bins: dict[int, list[Event]] = {}
        for event in events:
            opened = event[2] if end is None else max(event[2], end)
            bins.setdefault(0 if self.every is None else opened // self.every, []).append(event)
        waiting: list[Event] = []
        parts: list[list[Event]] = []
        seen = set(self.histories)
        for number in sorted(bins):
            part = bins[number]
            has_target = False
            for user, _, _ in part:
                has_target |= user in seen
                seen.add(user)
            waiting += part
            if has_target:
                parts.append(waiting)
                waiting = []
        parts[-1] += waiting
        for part in parts:
            self._seal(part, end)

    def _seal(self, events: list[Event], end: int | None) -> None:
        new: dict[int, list[tuple[int, int]]] = {}
        for user, item, time in sorted(events, key=lambda event: (event[0], event[2])):
            new.setdefault(user, []).append((item, time))
        rows: list[Row] = []
        for user, fresh in new.items():
            whole = self.histories.get(user, []) + fresh
            old = max(1, len(whole) - len(fresh))
            stop, mine = len(whole), []
            while stop > old:
                first = max(old, stop - self.max_length)
                row = whole[max(0, stop - self.max_length - 1) : stop]
                mine.append((user, tuple(item for item, _ in row), stop - first))
                stop = first
            rows += reversed(mine)
            self.histories[user] = whole
        self.windows.append(rows)
        counts = Counter(self.catalogues[-1] if self.catalogues else {})
        counts.update(item for _, item, _ in events)
        self.catalogues.append(dict(sorted(counts.items())))
        self.late.append(0 if end is None else sum(time < end for _, _, time in events))
        self.end = max([time for _, _, time in events] + ([] if self.end is None else [self.end]))


def write_csv(path: Path, events: list[Event]) -> Path:
    """Events as a file."""
    lines = [f"{user},{item},{time}" for user, item, time in events]
    path.write_text("\n".join(["user,item,time", *lines]) + "\n", encoding="utf-8")
    return path


def window_rows(log: Log, number: int) -> list[Row]:
    """The rows of a window as it stands on disk."""
    path = log.window_path(number)
    source = ParquetSource(path)
    targets = np.load(path / TARGETS_FILE)
    read = source.read(np.arange(len(source)))
    items = np.split(read.columns["item"], read.offsets[1:-1])
    return [
        (int(user), tuple(int(item) for item in each), int(count))
        for user, each, count in zip(read.users, items, targets)
    ]


def catalogue(log: Log, number: int) -> dict[int, int]:
    """The items of a window and how often they occurred up to it."""
    items = ParquetSource(log.window_path(number)).items
    return dict(zip(items.ids.tolist(), items.counts.tolist()))


def check(log: Log, reference: ReferenceLog) -> None:
    """A log on disk holds what the reference holds."""
    assert len(log.windows) == len(reference.windows)
    for number, entry in enumerate(log.windows):
        assert window_rows(log, number) == reference.windows[number]
        assert catalogue(log, number) == reference.catalogues[number]
        assert entry.late == reference.late[number]
        assert entry.rows == len(reference.windows[number])
        assert entry.targets == sum(row[2] for row in reference.windows[number])
    assert log.end == reference.end
