"""The temporal split: train before one moment, validate from it on, test from a later one on.

    time      ── train ──────────────┤ valid_from ── valid ──┤ test_from ── test ──
    target    every next event        a user's first event     a user's first event
    inputs    what was before it      all events before it     all events before it

Nothing of what comes from `valid_from` on is learnt from: items that occur before it are the catalogue, their events
before it are the counts, and negatives are drawn from that catalogue. So an item that is new by then cannot be
recommended. As a target it is a miss; in a history it is left out, as an exported model leaves it out.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.columns.ids import IdKind
from freescale.data.features.feature_source import FeatureSource, ItemFeatures, schema_of
from freescale.data.features.feature_statistics import FeatureStatistics, Statistics
from freescale.data.scan import row_blocks, spread_rows
from freescale.data.schema.feature import Schema
from freescale.data.source import Histories, IntArray, ItemCatalog, SequenceSource, Split
from freescale.data.stored.digest import digest_parts
from freescale.data.words.item_names import ItemNames, names_of_items
from freescale.data.words.table_words import table_kinds, table_words
from freescale.errors import DataError
from freescale.jagged import offsets_of

_SAMPLED_EVENTS = 1 << 22
"""A share of events is turned into a moment by at most so many of them."""

_SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_KEYS = ("data.valid_from", "data.test_from")


class TemporalSource:
    """A data set split at two moments; implements `SequenceSource` and `SplitSource`.

    Histories end at a user's test target and hold items of the catalogue alone. It goes through all histories three
    times when it is made, on every rank.

    Args:
        source: the whole data set; it needs time stamps.
        valid_from: when training ends: a share of the events, seconds since 1970, or an ISO date (UTC unless it says).
        test_from: when validation ends; the same.
    """

    def __init__(self, source: SequenceSource, *, valid_from: str, test_from: str) -> None:
        if "time" not in source.features:
            raise DataError(
                "data.split=temporal needs the time of every event",
                got=f"{source.name} has {', '.join(source.features)}",
                next_step="prepare the data with its time column, or use data.split=leave_one_out",
            )
        self.inner, self.name, self.features = source, source.name, source.features
        self.valid_from, self.test_from = _moments(source, (valid_from, test_from))
        self.items, self._known = self._catalog()
        self._cut()
        self._check()

    @property
    def lengths(self) -> IntArray:
        """[rows] number of events of each history, up to its test target."""
        return self._lengths

    @property
    def groups(self) -> IntArray:
        """Those of the whole data set."""
        return self.inner.groups

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for."""
        rows = np.asarray(rows, dtype=np.int64)
        whole = self.inner.read(rows)
        row = np.repeat(np.arange(len(rows)), whole.lengths)
        known = self._known[self._numbers(whole)]
        keep = known & (_before(known, whole.offsets) < self._lengths[rows][row])
        offsets = offsets_of(self._lengths[rows])
        columns = {name: values[keep] for name, values in whole.columns.items()}
        return replace(whole, offsets=offsets, columns=columns)

    def ends(self, split: Split) -> IntArray:
        """[rows] events of each history up to the target of a split, the target included; 0: it has none."""
        return self._ends[split]

    def missed(self, split: Split) -> npt.NDArray[np.bool_]:
        """[rows] whether the target of a split is an item that nothing was learnt of."""
        return self._missed[split]

    def split_facts(self) -> dict[str, object]:
        """What makes two such splits of the same data the same."""
        return {"split": "temporal", "valid_from": self.valid_from, "test_from": self.test_from}

    def item_names(self, ids: IntArray, /) -> ItemNames:
        """Those of the whole data set."""
        return names_of_items(self.inner, ids)

    @property
    def schema(self) -> Schema:
        """That of the whole data set."""
        return schema_of(self.inner)

    @cached_property
    def statistics(self) -> Statistics:
        """Of events before `valid_from`, items of the catalogue, and users who have such events."""
        return self._measure()

    @property
    def table_kinds(self) -> dict[str, IdKind]:
        """Those of the whole data set."""
        return table_kinds(self.inner)

    def find_words(self, table: str, ids: IntArray, /) -> Any:
        """Those of the whole data set."""
        return table_words(self.inner, table, ids)

    def known_ids(self, table: str) -> IntArray | None:
        """Those of the whole data set: what has not been met yet keeps its first values."""
        return self.inner.known_ids(table) if isinstance(self.inner, FeatureSource) else None

    def item_features(self) -> ItemFeatures:
        """Of the items of the catalogue."""
        if not isinstance(self.inner, FeatureSource):
            return ItemFeatures({}, {})
        return self.inner.item_features().of(self._known_rows)

    @cached_property
    def _known_rows(self) -> IntArray:
        """Where the items of the catalogue stand among all items."""
        return np.flatnonzero(self._known)

    def digests(self) -> Mapping[str, str]:
        """Those of the whole data set."""
        return digest_parts(self.inner)

    def _catalog(self) -> tuple[ItemCatalog, npt.NDArray[np.bool_]]:
        """The items that occur before `valid_from`, and which of all items they are."""
        ids = self.inner.items.ids
        counts = np.zeros(len(ids), dtype=np.int64)
        for rows in row_blocks(self.inner):
            histories = self.inner.read(rows)
            _check_order(histories, rows)
            early = _times(histories) < self.valid_from
            counts += np.bincount(self._numbers(histories)[early], minlength=len(ids))
        known = counts > 0
        return ItemCatalog(ids=ids[known], counts=counts[known], train_counts=counts[known]), known

    def _cut(self) -> None:
        """Where each history's targets stand, items that nothing was learnt of left out."""
        num_rows = len(self.inner.lengths)
        self._lengths = np.zeros(num_rows, dtype=np.int64)
        self._ends: dict[Split, IntArray] = {split: np.zeros(num_rows, dtype=np.int64) for split in _SPLITS}
        self._missed = {split: np.zeros(num_rows, dtype=bool) for split in _SPLITS}
        for rows in row_blocks(self.inner):
            histories = self.inner.read(rows)
            offsets, time = histories.offsets, _times(histories)
            known = np.append(self._known[self._numbers(histories)], False)
            running = offsets_of(known)
            starts, ends = offsets[:-1], offsets[1:]
            early, middle = (starts + _count(time < at, offsets) for at in (self.valid_from, self.test_from))
            self._ends["train"][rows] = early - starts
            periods: dict[Split, tuple[IntArray, IntArray]] = {
                "valid": (early, middle),
                "test": (middle, ends),
            }
            for split, (first, last) in periods.items():
                inputs = running[first] - running[starts]
                asked = (first < last) & (inputs > 0)
                self._ends[split][rows] = np.where(asked & known[first], inputs + 1, 0)
                self._missed[split][rows] = asked & ~known[first]
            self._lengths[rows] = np.maximum(running[middle] - running[starts], self._ends["test"][rows])

    def _measure(self) -> Statistics:
        """Means and deviations of what is trained on; the longest lists are those of the whole data set."""
        if not isinstance(self.inner, FeatureSource):
            return {}
        scaled = [each for each in self.inner.schema if each.kind == "number"]
        found = FeatureStatistics(scaled)
        if any(each.of != "item" for each in scaled):
            for rows in row_blocks(self.inner):
                histories = self.inner.read(rows)
                early = _times(histories) < self.valid_from
                found.add(histories.columns, early)
                found.add(histories.user_columns, _count(early, histories.offsets) > 0)
        names = [each.name for each in scaled if each.of == "item"]
        number = np.arange(len(self.items.ids))
        found.add(self.item_features().take(number, names), np.ones(len(number), dtype=bool))
        return {**self.inner.statistics, **found.result()}

    def _numbers(self, histories: Histories) -> IntArray:
        """The number of every event's item among all items."""
        return np.searchsorted(self.inner.items.ids, histories.columns["item"])

    def _check(self) -> None:
        """Something to learn from, and somebody to ask before and after `test_from`."""
        examples = {split: int((self._ends[split] > 1).sum()) for split in self._ends}
        for split, key in zip(_SPLITS, (_KEYS[0], *_KEYS)):
            if not examples[split]:
                raise DataError(
                    f"the temporal split leaves no history to {_VERBS[split]}",
                    got=f"{_KEYS[0]} is {written(self.valid_from)}, {_KEYS[1]} is {written(self.test_from)}",
                    next_step=f"choose another {key}, e.g. a share of the events such as 0.8",
                )


_VERBS = {"train": "train on", "valid": "validate on", "test": "test on"}


def written(moment: int) -> str:
    """A moment in seconds since 1970, for people."""
    try:
        return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{moment}"


def read_moment(text: str) -> float | int:
    """A share of the events (between 0 and 1), or seconds since 1970.

    Raises:
        ValueError: it is neither, nor an ISO date.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        share = float(text)
    except ValueError:
        moment = datetime.datetime.fromisoformat(text)
        zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
        return int(zoned.timestamp())
    if not 0 < share < 1:
        raise ValueError("a share of the events lies between 0 and 1")
    return share


def _moments(source: SequenceSource, given: tuple[str, str]) -> tuple[int, int]:
    """Both moments in seconds."""
    wanted = [read_moment(text) for text in given]
    rows = spread_rows(source, max_events=_SAMPLED_EVENTS)
    times = np.sort(_times(source.read(rows)))
    first, second = (
        int(times[min(len(times) - 1, int(moment * len(times)))]) if isinstance(moment, float) else moment
        for moment in wanted
    )
    if first >= second:
        raise DataError(
            f"{_KEYS[0]} must be before {_KEYS[1]}",
            got=f"{given[0]} is {written(first)}, {given[1]} is {written(second)}",
            allowed=f"the times of the data go from {written(int(times[0]))} to {written(int(times[-1]))}",
        )
    return first, second


def _check_order(histories: Histories, rows: IntArray) -> None:
    """Refuse a history whose events do not stand in the order of time."""
    falls = np.flatnonzero(np.diff(_times(histories)) < 0) + 1
    inside = falls[~np.isin(falls, histories.offsets)]
    if len(inside):
        row = int(rows[np.searchsorted(histories.offsets, inside[0], side="right") - 1])
        raise DataError(
            "data.split=temporal needs histories in the order of time",
            got=f"the times of row {row} fall",
            next_step="`freescale prepare` sorts by time",
        )


def _times(histories: Histories) -> IntArray:
    return histories.columns["time"].astype(np.int64, copy=False)


def _before(flags: npt.NDArray[np.bool_], offsets: IntArray) -> IntArray:
    """How many flags stand before each event in its own history."""
    running = offsets_of(flags)
    return running[:-1] - np.repeat(running[offsets[:-1]], np.diff(offsets))


def _count(flags: npt.NDArray[np.bool_], offsets: IntArray) -> IntArray:
    """How many flags each history has."""
    counts: IntArray = np.diff(offsets_of(flags)[offsets])
    return counts
