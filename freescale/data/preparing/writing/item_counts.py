"""How often each item occurs, in memory that does not grow with their number: what is counted waits in sorted runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data.source import IntArray

Counts = tuple[IntArray, IntArray, IntArray]
"""Ids ascending, how often each occurs, and how often to train on."""
_NUM_COLUMNS = 3
_SAMPLES_A_RANGE = 16


class ItemCounts:
    """How often each item occurs, over all events and over those to train on.

    Up to `run_items` different items are counted in memory. What goes beyond is written to a file without a name, as
    runs of ascending ids, and added up range by range in the end.

    Args:
        folder: where there is room for the runs: 24 bytes an item and more.
        run_items: that memory has room for.
    """

    def __init__(self, folder: Path, *, run_items: int = 1 << 21) -> None:
        self._folder = folder
        self._run_items = run_items
        self._parts: list[Counts] = []
        self._num_parts = 0
        self._file: Any = None
        self._runs: list[tuple[int, int]] = []

    def add(self, items: IntArray, lengths: IntArray) -> None:
        """Count the items of whole histories; the last two events of each are not to train on."""
        train = np.ones(len(items), dtype=bool)
        ends = np.cumsum(lengths)
        train[ends - 1] = False
        train[ends[lengths >= 2] - 2] = False
        if items.min() >= 0 and items.max() < 8 * len(items):
            counts = np.bincount(items)
            ids = np.flatnonzero(counts)
            counts, train_counts = counts[ids], np.bincount(items[train], minlength=len(counts))[ids]
        else:
            ids, inverse, counts = np.unique(items, return_inverse=True, return_counts=True)
            train_counts = np.bincount(inverse[train], minlength=len(ids))
        self._parts.append((ids, counts, train_counts))
        self._num_parts += len(ids)
        if self._num_parts > self._run_items:
            self._add_up(self._run_items // 2)

    def merged(self) -> Counts:
        """All of it; in memory, or on a file that memory is mapped to where there were too many items for that."""
        if not self._runs:
            return _summed(self._parts)
        self._add_up(0)
        columns = [self._nameless_file() for _ in range(_NUM_COLUMNS)]
        for part in map(_summed, self._ranges()):
            for column, values in zip(columns, part, strict=True):
                values.tofile(column)
        mapped = []
        for column in columns:
            column.flush()
            mapped.append(np.memmap(column, dtype=np.int64, mode="r"))
            column.close()
        return mapped[0], mapped[1], mapped[2]

    def _nameless_file(self) -> Any:
        return tempfile.TemporaryFile(dir=self._folder)

    def _add_up(self, stay: int) -> None:
        """Make one part of all; it goes to the file if it has more items than may stay."""
        part = _summed(self._parts)
        self._parts, self._num_parts = [part], len(part[0])
        if self._num_parts <= stay:
            return
        if self._file is None:
            self._file = self._nameless_file()
        self._runs.append((self._file.tell(), self._num_parts))
        for values in part:
            values.astype(np.int64, copy=False).tofile(self._file)
        self._file.flush()
        self._parts, self._num_parts = [], 0

    def _ranges(self) -> Iterator[list[Counts]]:
        """Slices of all runs, one range of ids after the other, about `run_items` ids each."""
        runs = [
            np.memmap(self._file, dtype=np.int64, mode="r", offset=start, shape=(_NUM_COLUMNS, count))
            for start, count in self._runs
        ]
        total = sum(count for _, count in self._runs)
        stride = max(1, self._run_items // _SAMPLES_A_RANGE)
        samples = np.sort(np.concatenate([run[0, ::stride] for run in runs]))
        lasts = [*samples[_SAMPLES_A_RANGE::_SAMPLES_A_RANGE], None] if total > self._run_items else [None]
        starts = [0] * len(runs)
        for last in lasts:
            ends = [
                run.shape[1] if last is None else int(np.searchsorted(run[0], last, side="right"))
                for run in runs
            ]
            cut = [run[:, start:end] for run, start, end in zip(runs, starts, ends, strict=True)]
            starts = ends
            yield [(part[0], part[1], part[2]) for part in cut if part.shape[1]]


def _summed(parts: Iterable[Counts]) -> Counts:
    """Equal ids once, with their counts added up."""
    columns = list(zip(*parts, strict=True))
    if not columns:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    ids, counts, train_counts = (np.concatenate(arrays) for arrays in columns)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    summed, summed_train = (np.add.reduceat(values[order], starts) for values in (counts, train_counts))
    return ids[starts], summed, summed_train
