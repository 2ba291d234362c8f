"""Sorts more events than memory holds: sorted runs on disk, merged back one range of users at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from freescale.data.columns.lists import bytes_a_row, from_arrow, to_arrow
from freescale.data.preparing.reading.event_columns import (
    MAX_INT64,
    MIN_INT64,
    Events,
    concat_events,
    features_of,
    sort_events,
)
from freescale.data.source import IntArray

_RUN_BATCHES = 256


class EventSorter:
    """Takes events in input order, gives them back by user, then time, then input order.

    Args:
        folder: where runs are spilled; made when the first one is, its parent must be there then.
        memory: bytes that events may take while they are sorted.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self.features: tuple[str, ...] = ()
        self._folder = folder
        self._memory = memory
        self._pending: list[Events] = []
        self._num_pending = 0
        self._run_events = 0
        self._runs: list[_Run] = []

    def add(self, events: Events) -> None:
        """Take some more events; those that no longer fit go to disk."""
        if not self._run_events:
            self.features = features_of(events)
        # At the peak an event is there three times (as read, put together, sorted), with key, order and
        # working memory of the sort, and once more in the Parquet writer. Lists may become longer on the way.
        row_bytes = sum(bytes_a_row(column) for column in events.values())
        fits = max(4, self._memory // (6 * row_bytes + 24))
        self._run_events = min(self._run_events or fits, fits)
        self._pending.append(events)
        self._num_pending += len(events["user"])
        if self._num_pending >= self._run_events:
            self._spill()

    def blocks(self) -> Iterator[tuple[Events, float]]:
        """All events in order, cut between users into blocks that fit, with the fraction given so far."""
        if not self._runs:
            yield self._take_pending(), 1.0
            return
        if self._num_pending:
            self._spill()
        lows, highs = self._ranges()
        for number, (low, high) in enumerate(zip(lows.tolist(), highs.tolist())):
            parts = [part for run in self._runs if (part := run.read(low, high))]
            if parts:
                yield sort_events(concat_events(parts)), (number + 1) / len(lows)

    def _spill(self) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"run-{len(self._runs):06d}.arrow"
        self._runs.append(_write_run(path, self._take_pending(), max(1, self._run_events // _RUN_BATCHES)))

    def _take_pending(self) -> Events:
        parts, self._pending, self._num_pending = self._pending, [], 0
        return sort_events(concat_events(parts))

    def _ranges(self) -> tuple[IntArray, IntArray]:
        """Ranges of users that hold about one run's worth of events each."""
        # One batch is a small part of a run, and each run may add one that straddles the border of a range.
        step = max(_RUN_BATCHES // 8, _RUN_BATCHES - len(self._runs), 1)
        starts = np.sort(np.concatenate([run.first_users for run in self._runs]))
        lows = np.unique(np.append(starts[step::step], MIN_INT64))
        return lows, np.append(lows[1:] - 1, MAX_INT64)


class _Run(NamedTuple):
    """Sorted events on disk, in batches whose first and last users are known."""

    path: Path
    first_users: IntArray
    last_users: IntArray

    def read(self, low: int, high: int) -> Events | None:
        """The events of users from low to high, both included."""
        start = int(np.searchsorted(self.last_users, low, side="left"))
        stop = int(np.searchsorted(self.first_users, high, side="right"))
        if start >= stop:
            return None
        # Read, not memory mapped: mapped pages would count as memory of this process.
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_file(file) as reader:
            table = pa.Table.from_batches([reader.get_batch(number) for number in range(start, stop)])
        events: Events = {name: from_arrow(table[name]) for name in table.column_names}
        first = np.searchsorted(events["user"], low, side="left")
        last = np.searchsorted(events["user"], high, side="right")
        return {name: column[first:last] for name, column in events.items()}


def _write_run(path: Path, events: Events, batch_rows: int) -> _Run:
    batch = pa.record_batch({name: to_arrow(column) for name, column in events.items()})
    starts = np.arange(0, batch.num_rows, batch_rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for start in starts.tolist():
            writer.write_batch(batch.slice(start, batch_rows))
    users = events["user"]
    return _Run(path, users[starts], users[np.append(starts[1:], len(users)) - 1])
