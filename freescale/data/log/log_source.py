"""LogSource: the windows of a log, read by row numbers that count through all of them and never change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data.features.feature_source import ItemFeatures
from freescale.data.features.feature_statistics import Statistics
from freescale.data.log.log_file import TARGETS_FILE, Log, WindowEntry, damaged_log, load_log, window_name
from freescale.data.log.log_schema import schema_of
from freescale.data.log.window_writer import content_of
from freescale.data.schema.feature import Schema
from freescale.data.source import Histories, IntArray, ItemCatalog
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.storage import local_path
from freescale.data.words.item_names import ItemNames
from freescale.errors import DataError

_OPEN = 3
"""Windows that are kept open: the one that is learnt, and its neighbours."""
_PATIENCE_S = 30.0
"""How long a window that another rank sees may take to show here."""


class LogSource:
    """A log on disk, as far as it is known; implements `SequenceSource`.

    Args:
        path: the folder.
        cache_mb: see `ParquetSource`.
        recent: windows whose items are the catalogue, each window with those before it; None: all so far.
    """

    def __init__(self, path: str | Path, *, cache_mb: float = 256, recent: int | None = None) -> None:
        self.path = local_path(path)
        self.cache_mb = cache_mb
        self.recent = recent
        self.log: Log = load_log(self.path)
        self.name = self.path.name
        self.features: tuple[str, ...] = self.log.rules.features
        self.id_kinds: dict[str, Any] = dict(self.log.rules.ids)
        self.schema: Schema = schema_of(self.log.rules)
        self.statistics: Statistics = {}
        self._windows: dict[int, ParquetSource] = {}
        self._targets: dict[int, IntArray] = {}
        self._recent: dict[int, ItemCatalog] = {}
        self._first_rows: IntArray = _first_rows(self.log)
        if not self.log.windows:
            raise DataError(
                f"The log {self.path} has no windows yet", next_step=f"freescale log append {path} INPUT"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": {}, "_targets": {}, "_recent": {}}

    @property
    def num_windows(self) -> int:
        """Windows that are known."""
        return len(self.log.windows)

    @property
    def max_length(self) -> int:
        """Inputs of a row at most."""
        return self.log.rules.max_length

    def num_sealed(self) -> int:
        """Windows there are by now; no less than those that are known."""
        return len(load_log(self.path).windows)

    def use(self, num_windows: int) -> None:
        """Know this many windows, no more and no less; waits for those that do not show here yet.

        Raises:
            DataError: a window that was known is another one now, or they do not show.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            log = load_log(self.path)
            if len(log.windows) >= num_windows:
                break
            if time.monotonic() > deadline:
                raise DataError(
                    f"{self.path} has {len(log.windows)} windows here, and {num_windows} on rank 0",
                    next_step="put the log on a file system that all machines share",
                )
            time.sleep(0.05)
        for known, now in zip(self.log.windows, log.windows):
            if known.fingerprint != now.fingerprint:
                raise damaged_log(self.path, f"{known.folder} was sealed again, differently")
        self.log = Log(log.path, log.rules, log.windows[:num_windows])
        self._first_rows = _first_rows(self.log)

    def entry(self, window: int) -> WindowEntry:
        """What log.json says of a window."""
        return self.log.windows[window]

    def window(self, number: int) -> ParquetSource:
        """A window, its folder compared with what log.json says of it."""
        if number not in self._windows:
            entry = self.entry(number)
            path = self.log.window_path(number)
            if entry.deleted:
                raise DataError(
                    f"{entry.folder} of {self.path} was deleted (`freescale log drop`), and its steps are asked for",
                    next_step="go on from a checkpoint that has learnt it (--resume RUN_DIR), or train on a new log of "
                    "the inputs that are left",
                )
            if not path.exists():
                raise damaged_log(path, "it is not there")
            source = ParquetSource(path, cache_mb=self.cache_mb)
            if content_of(path) != entry.content:
                raise damaged_log(path, "it holds other events than log.json says")
            while len(self._windows) >= _OPEN:
                oldest = next(iter(self._windows))
                del self._windows[oldest]
                self._targets.pop(oldest, None)
            self._windows[number] = source
            self._targets[number] = np.load(path / TARGETS_FILE, allow_pickle=False)
        return self._windows[number]

    def targets(self, number: int) -> IntArray:
        """[rows of a window] how many of the last events of each are to be learnt."""
        self.window(number)
        return self._targets[number]

    def items_of(self, number: int) -> ItemCatalog:
        """The catalogue of a window: items so far, or those that occurred in it and the last few before it."""
        if self.recent is None or number < self.recent:
            return self.all_items_of(number)
        if number not in self._recent:
            now, before = self.all_items_of(number), self.all_items_of(number - self.recent)
            counts = now.counts.copy()
            counts[np.searchsorted(now.ids, before.ids)] -= before.counts
            alive = np.flatnonzero(counts)
            while len(self._recent) >= _OPEN:
                del self._recent[next(iter(self._recent))]
            self._recent[number] = ItemCatalog(now.ids[alive], counts[alive], counts[alive])
        return self._recent[number]

    def all_items_of(self, number: int) -> ItemCatalog:
        """All items up to a window."""
        return self.window(number).items

    def window_of(self, rows: IntArray) -> int:
        """The window that these rows lie in."""
        ends = np.searchsorted(self._first_rows, [rows.min(), rows.max()], side="right") - 1
        first, last = ends.tolist()
        if first != last:
            raise DataError(
                "Rows of a batch lie in one window", got=f"{window_name(first)}, {window_name(last)}"
            )
        return first

    def local(self, window: int, rows: IntArray) -> IntArray:
        """Rows counted through all windows as rows of their own window."""
        return rows - self._first_rows[window]

    @property
    def lengths(self) -> IntArray:
        """[rows] events of each row of windows that were not deleted; of those 0."""
        return np.concatenate([self._lengths(entry) for entry in self.log.windows])

    @property
    def groups(self) -> IntArray:
        """One for each window."""
        return np.diff(self._first_rows)

    @property
    def items(self) -> ItemCatalog:
        """The catalogue of the last window that is known."""
        return self.items_of(self.num_windows - 1)

    def item_features(self) -> ItemFeatures:
        """Nothing: a log keeps features of events and requests."""
        return ItemFeatures({}, {})

    def known_ids(self, table: str, /) -> IntArray | None:
        """None: what comes with later windows is not known."""
        return None

    def item_names(self, ids: IntArray, /) -> ItemNames:
        """The user's own ids of these items."""
        return self.window(self.num_windows - 1).item_names(ids)

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The rows, all of one window, in the order asked for."""
        wanted = np.asarray(rows, dtype=np.int64)
        if not len(wanted):
            return self.window(self.num_windows - 1).read(wanted)
        window = self.window_of(wanted)
        return self.window(window).read(self.local(window, wanted))

    def _lengths(self, entry: WindowEntry) -> IntArray:
        if entry.deleted:
            return np.zeros(entry.rows, np.int64)
        return np.asarray(self.window(entry.number).lengths)


def _first_rows(log: Log) -> IntArray:
    """Where the rows of each window begin, and where the last ends."""
    return np.cumsum([0, *(entry.rows for entry in log.windows)])
