"""Requests of a log: the new events of a window are candidates, and what came before them is the history.

A request never leaves its window: where a run of equal values goes on in the next one, it is two requests. Which
requests a window has follows from the window alone, so steps keep their numbers when the log grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from freescale.data.batches.log_examples import LogExamples, NextWindow, WindowFacts
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.data.requests.request_examples import RequestExamples
from freescale.data.requests.request_index import RequestIndex, find_runs, with_groups
from freescale.data.source import IntArray, ItemCatalog
from freescale.data.sources.parquet import ParquetSource
from freescale.jagged import group_index

_OPEN = 3
"""Windows whose requests are kept in memory, as many as the log keeps open."""


@dataclass(frozen=True, kw_only=True)
class WindowRequests(RequestExamples):
    """The requests of one window.

    Args:
        fresh: [rows] how many of the last events of each row are new.
        most: requests that are taken, spread evenly; None: all.
    """

    fresh: IntArray
    most: int | None = None

    @cached_property
    def index(self) -> RequestIndex:
        """All requests, in the order of the rows."""
        lengths = np.asarray(self.source.lengths)
        first = lengths - self.fresh
        if self.by is not None or self.window is not None:
            user, start, stop = find_runs(self.source, by=self.by, window=self.window)
            start = np.maximum(start, first[user])
        else:
            counts = -(-self.fresh // self.candidates)
            user, number = group_index(counts)
            # From the end on, so that all but the first request of a row are full.
            stop = lengths[user] - (counts[user] - 1 - number) * self.candidates
            start = np.maximum(stop - self.candidates, first[user])
        kept = np.flatnonzero(stop > start)
        if self.most is not None and self.most < len(kept):
            kept = kept[np.linspace(0, len(kept) - 1, self.most, dtype=np.int64)]
        return with_groups(self.source, user[kept], start[kept], stop[kept])


@dataclass(frozen=True, kw_only=True)
class LogRequests(LogExamples):
    """Makes batches of requests of a log; its rows are requests, counted through all windows.

    Args:
        options: of `WindowRequests`: outcomes, candidates, by, weights, window, logs, pools.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_ends")}

    @cached_property
    def _opened(self) -> dict[int, WindowRequests]:
        return {}

    @cached_property
    def _ends(self) -> list[int]:
        """Where the requests of each window end, as far as they were counted."""
        return [0]

    def of_window(self, number: int) -> WindowRequests:
        """The requests of a window."""
        if number not in self._opened:
            made = self._made(self.source.window(number), self.source.targets(number))
            while len(self._opened) >= _OPEN:
                self._opened.pop(next(iter(self._opened)))
            self._opened[number] = made
        return self._opened[number]

    def next_window(self, number: int, *, most: int | None) -> NextRequests:
        """The requests of a window before it is learnt."""
        known = NextWindow(self.source, number)
        source = BeforeWindow(self.source.window(number), known.items)
        return NextRequests(self._made(source, self.source.targets(number), most=most), known)

    def num_rows(self, window: int) -> int:
        """How many requests a window has."""
        return len(self.of_window(window).index.user)

    def facts_of(self, window: int) -> WindowFacts:
        """Tokens and candidates of its requests."""
        found = self.of_window(window)
        counts = found.index.counts
        assert counts is not None  # anchors are no requests of a log
        return WindowFacts(found.lengths(), found.groups, counts)

    def lengths(self) -> IntArray:
        """Tokens of every request."""
        return np.concatenate([self.of_window(n).lengths() for n in range(self.source.num_windows)])

    def batch(self, rows: Sequence[int] | IntArray, *, step: int = 0) -> SequenceBatch:
        """These requests, all of one window, as one jagged batch."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return self.of_window(self.source.num_windows - 1).batch(rows)
        window = self._window_of(int(rows[0]))
        made = self.of_window(window).batch(rows - self._ends[window])
        return made.with_samples(row=torch.from_numpy(rows))

    def _window_of(self, request: int) -> int:
        while self._ends[-1] <= request:
            self._ends.append(self._ends[-1] + self.num_rows(len(self._ends) - 1))
        return int(np.searchsorted(self._ends, request, side="right")) - 1

    def _made(self, source: Any, fresh: IntArray, most: int | None = None) -> WindowRequests:
        return WindowRequests(
            source=source,
            fresh=fresh,
            most=most,
            max_length=self.max_length,
            use_time=self.use_time,
            features=self.features,
            **self.options,
        )


class BeforeWindow:
    """A window with the catalogue that was known before it; whatever else it is asked for is the window's.

    Args:
        window: as it is stored.
        items: those of the windows before.
    """

    def __init__(self, window: ParquetSource, items: ItemCatalog) -> None:
        self._window, self.items = window, items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._window, name)


class NextRequests:
    """The requests of a window before it is learnt: stands where `NextExamples` does, and reads like its requests.

    Args:
        requests: what is asked.
        known: the same window, target by target.
    """

    def __init__(self, requests: WindowRequests, known: NextWindow) -> None:
        self.requests, self._known = requests, known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.requests, name)

    @property
    def num_targets(self) -> int:
        """New events of the window that something is before."""
        return len(self._known.unknown)

    @property
    def num_unknown(self) -> int:
        """Those of them whose items nobody had met."""
        return int(self._known.unknown.sum())

    def words(self) -> str:
        """What is asked, for people."""
        index = self.requests.index
        asked = index.num_candidates
        few = f"{asked:,} of " if asked < self.num_targets else ""
        return (
            f"{len(index.user):,} requests with {few}{self.num_targets:,} candidates, "
            f"{self.num_unknown:,} of these of unknown items"
        )
