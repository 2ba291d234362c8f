"""Batches of a log: to learn from, with losses at new events only; and the next window as the test of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from freescale.data.batches.examples import Examples
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.data.log.log_source import LogSource
from freescale.data.negatives import draw_negatives
from freescale.data.source import Histories, IntArray, ItemCatalog, Split
from freescale.jagged import find_sorted, number_inside, offsets_of


class WindowFacts(NamedTuple):
    """What is known of the rows of a window without reading them.

    Args:
        lengths: [rows] tokens of each.
        groups: sizes of the runs of rows that are stored together.
        targets: [rows] tokens of each that have a loss.
    """

    lengths: IntArray
    groups: IntArray
    targets: IntArray


@dataclass(frozen=True, kw_only=True)
class LogExamples(Examples):
    """Makes batches of rows of a log. Older events are inputs alone; negatives are of the catalogue of the window."""

    source: LogSource

    def num_rows(self, window: int) -> int:
        """How many rows a window has; known of deleted ones, too."""
        return self.source.entry(window).rows

    def facts_of(self, window: int) -> WindowFacts:
        """Tokens and targets of the rows of a window."""
        stored = self.source.window(window)
        return WindowFacts(np.asarray(stored.lengths) - 1, stored.groups, self.source.targets(window))

    def lengths(self) -> IntArray:
        """Inputs of every row."""
        return np.maximum(self.source.lengths - 1, 0)

    def batch(self, rows: Sequence[int] | IntArray, *, step: int = 0) -> SequenceBatch:
        """These rows, all of one window, as one jagged batch."""
        rows = np.asarray(rows, dtype=np.int64)
        batch = super().batch(rows, step=step)
        return batch.with_learnt(torch.from_numpy(self._targets(rows)))

    def _targets(self, rows: IntArray) -> IntArray:
        if not len(rows):
            return np.zeros(0, np.int64)
        window = self.source.window_of(rows)
        return self.source.targets(window)[self.source.local(window, rows)]

    def _known(self, histories: Histories, rows: IntArray) -> IntArray:
        return np.maximum(histories.lengths - 1, 0)

    def _negatives(self, rows: IntArray, step: int) -> IntArray:
        if not len(rows):
            return np.zeros((0, self.num_negatives), np.int64)
        ids = self.source.items_of(self.source.window_of(rows)).ids
        drawn = draw_negatives(
            rows, num_negatives=self.num_negatives, num_items=len(ids), seed=self.seed, step=step
        )
        return ids[drawn]


class NextWindow:
    """A window before it is learnt: one row a target, ranked among what was known before; implements `SplitSource`.

    Args:
        log: the log.
        window: its number, from 1.
        most: targets that are asked for, spread evenly over those that are known; None: all.
    """

    def __init__(self, log: LogSource, window: int, *, most: int | None = None) -> None:
        self._most = most
        self._window, self._targets = log.window(window), log.targets(window)
        self.name = f"{log.name}, window {window}"
        self.features = log.features
        self.items: ItemCatalog = log.items_of(window - 1)
        self._log = log

    @cached_property
    def _rows(self) -> IntArray:
        """[targets] the row of the window that each is in."""
        return np.repeat(np.arange(len(self._targets)), self._targets)

    @cached_property
    def _ends(self) -> IntArray:
        """[targets] events of its row up to each target, the target included."""
        place = number_inside(self._targets)
        return np.asarray(self._window.lengths)[self._rows] - self._targets[self._rows] + place + 1

    @cached_property
    def unknown(self) -> npt.NDArray[np.bool_]:
        """[targets] whether nobody had met the item of the target before this window."""
        items = []
        rows = np.arange(len(self._targets))
        for block in np.array_split(rows, max(1, len(rows) // 4096)):
            read = self._window.read(block)
            index = np.arange(int(read.offsets[-1]))
            first = np.repeat(read.offsets[1:] - self._targets[block], read.lengths)
            items.append(read.columns["item"][index >= first].astype(np.int64))
        found = np.concatenate(items)
        return ~find_sorted(self.items.ids, found)[1]

    @property
    def lengths(self) -> IntArray:
        """[targets] events of the row that each target is in."""
        return np.asarray(self._window.lengths)[self._rows]

    @property
    def groups(self) -> IntArray:
        """All in one."""
        return np.array([len(self._rows)])

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The rows that these targets are in."""
        return self._window.read(self._rows[np.asarray(rows, dtype=np.int64)])

    def ends(self, split: Split) -> IntArray:
        """[targets] events up to each target; 0 where nobody had met its item, and where it is not asked for."""
        asked = np.flatnonzero(~self.unknown)
        if self._most is not None and self._most < len(asked):
            asked = asked[np.linspace(0, len(asked) - 1, self._most, dtype=np.int64)]
        ends = np.zeros(len(self._ends), np.int64)
        ends[asked] = self._ends[asked]
        return ends

    def missed(self, split: Split) -> npt.NDArray[np.bool_]:
        """None: targets that nobody had met are counted apart."""
        return np.zeros(len(self._rows), bool)

    def split_facts(self) -> dict[str, object]:
        """The name of the split."""
        return {"split": "next_window"}

    def item_names(self, ids: IntArray, /) -> Any:
        """The user's own ids of these items."""
        return self._log.item_names(ids)


@dataclass(frozen=True, kw_only=True)
class NextExamples(Examples):
    """Makes batches of targets of the next window; histories may hold items that the catalogue does not have yet."""

    source: NextWindow

    @property
    def num_targets(self) -> int:
        """New events of the window that something is before."""
        return len(self.source.unknown)

    @property
    def num_unknown(self) -> int:
        """Those of them whose items nobody had met: they are left out."""
        return int(self.source.unknown.sum())

    def words(self) -> str:
        """What is asked, for people."""
        known, asked = self.num_targets - self.num_unknown, int((self.lengths() > 0).sum())
        few = f"{asked:,} of " if asked < known else ""
        return (
            f"{few}{known:,} targets among {len(self.source.items.ids):,} items, "
            f"{self.num_unknown:,} targets of unknown items left out"
        )

    def seen(self, rows: Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
        """(offsets, items) of what these users did before their targets, of items that are in the catalogue."""
        offsets, items = super().seen(rows)
        _, known = find_sorted(self.source.items.ids, items)
        return offsets_of(known)[offsets], items[known]
