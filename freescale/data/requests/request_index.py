"""RequestIndex: which events of a data set are requests.

    by number    the training events of a user, cut from the end into runs of k: each run is a request, the events
                 before it its history. Every event but a user's first is a label once. Needs no reading to be planned.
    by column    neighbouring events with the same value of a column ("request", or "time" for what was shown together)
                 are a request: one row an impression. Read through once, to know how long they are.
    by window    all that a user did in one window of so many seconds is a request, and what was before it its history:
                 windows begin at 0, one, two, ... times their length since 1970. Read through once, too.
    anchors      single events with a label and enough of a history, the latest days held back whole (`anchors.py`);
                 of a large log they stand in files that all processes of a machine share (`stored_anchors.py`).

Validation and test have one request a user: its target by number, by column all of the last request but one, and of the
last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from freescale.data.batches.examples import HELD_BACK
from freescale.data.requests.anchors import AnchorRule, find_anchors
from freescale.data.scan import row_blocks
from freescale.data.source import IntArray, SequenceSource, Split, SplitSource
from freescale.jagged import group_index, number_inside

_HELD_BACK_REQUESTS = {"valid": 1, "test": 0}


class RequestIndex(NamedTuple):
    """Every request of a split. Arrays may be of any whole numbers, and lie in files.

    Args:
        user: [n] row of its user.
        start: [n] its first candidate there.
        counts: [n] candidates; None: one each.
        groups: requests of each run that is stored together.
        tokens: [n] tokens of each, where somebody has counted them; None: nobody has.
    """

    user: IntArray
    start: IntArray
    counts: IntArray | None
    groups: IntArray
    tokens: IntArray | None = None

    @property
    def stop(self) -> IntArray:
        """[n] where its candidates end."""
        return self.start + (1 if self.counts is None else self.counts)

    @property
    def num_candidates(self) -> int:
        """Of all requests together."""
        return len(self.user) if self.counts is None else int(self.counts.sum())

    def of(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(user, start, counts) of these requests; what is not asked for is not looked at."""
        counts = np.ones(len(rows), np.int64) if self.counts is None else self.counts[rows].astype(np.int64)
        return self.user[rows].astype(np.int64), self.start[rows].astype(np.int64), counts


def index_by_number(source: SequenceSource, split: Split, *, candidates: int) -> RequestIndex:
    """Runs of so many candidates from the end of the training part; one target a user elsewhere."""
    ends = _ends(source, split)
    if split != "train":
        user = np.flatnonzero(ends > 0)
        return with_groups(source, user, ends[user] - 1, ends[user])
    counts = -(-np.maximum(ends - 1, 0) // candidates)
    user, number = group_index(counts)
    # From the end on, so that all but a user's first request are full.
    stop = ends[user] - (counts[user] - 1 - number) * candidates
    return with_groups(source, user, np.maximum(stop - candidates, 1), stop)


def index_by_runs(
    source: SequenceSource, split: Split, *, by: str | None, window: int | None
) -> RequestIndex:
    """Runs of equal values in a column, or windows of so many seconds, those of a split."""
    return with_groups(source, *_of_split(source, split, *find_runs(source, by=by, window=window)))


def index_of_anchors(source: SequenceSource, split: Split, rule: AnchorRule) -> RequestIndex:
    """One request an anchor; those of one user and day are stored together."""
    user, event = find_anchors(source, rule, split, row_blocks(source))
    runs = np.flatnonzero(np.append(True, user[1:] != user[:-1]))
    return RequestIndex(user, event, None, np.diff(np.append(runs, len(user))))


def with_groups(source: SequenceSource, user: IntArray, start: IntArray, stop: IntArray) -> RequestIndex:
    """These requests, by user; those whose users are stored together are so, too."""
    edges = np.cumsum(np.asarray(source.groups))
    group = np.searchsorted(edges, user, side="right")
    return RequestIndex(user, start, stop - start, np.bincount(group, minlength=len(edges)).astype(np.int64))


def find_runs(
    source: SequenceSource, *, by: str | None, window: int | None
) -> tuple[IntArray, IntArray, IntArray]:
    """User, first event and end of every run of equal values in a column, or of a window, some users at a time."""
    found: list[tuple[IntArray, IntArray, IntArray]] = []
    for users in row_blocks(source):
        histories = source.read(users)
        values, count = histories.columns["time" if by is None else by], int(histories.offsets[-1])
        values = values if window is None else values // window
        owner = np.repeat(np.arange(len(users)), histories.lengths)
        fresh = np.ones(count, bool)
        fresh[1:] = (values[1:] != values[:-1]) | (owner[1:] != owner[:-1])
        start = np.flatnonzero(fresh)
        first = histories.offsets[:-1][owner[start]]
        found.append((users[owner[start]], start - first, np.append(start[1:], count)[: len(start)] - first))
    none = np.zeros(0, np.int64)
    user, start, stop = (np.concatenate([none, *part]) for part in zip(*found)) if found else (none,) * 3
    return user, start, stop


def _ends(source: SequenceSource, split: Split) -> IntArray:
    """[users] events up to the target of the split, it included; 0 where there is none."""
    if isinstance(source, SplitSource):
        return source.ends(split)
    known = np.asarray(source.lengths) - HELD_BACK[split] - 1
    return np.where(known > 0, known + 1, 0)


def _of_split(
    source: SequenceSource, split: Split, user: IntArray, start: IntArray, stop: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Requests are held back whole: those with the targets of a split; by itself a user's last is for the test."""
    if isinstance(source, SplitSource):
        ends = source.ends(split)[user]
        mine = stop <= ends if split == "train" else (start < ends) & (ends <= stop)
    else:
        counts = np.bincount(user, minlength=len(source.lengths))
        number = number_inside(counts)
        left = counts[user] - 1 - number
        # Where there is no request before it, nothing is known of the user.
        mine = left >= 2 if split == "train" else (left == _HELD_BACK_REQUESTS[split]) & (number > 0)
    return user[mine], start[mine], stop[mine]
