"""Where an input is cut into windows: by time, and never so that a window has nothing to learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freescale.data.log.log_file import LogRules
from freescale.data.log.window_writer import Cut, within
from freescale.data.source import IntArray
from freescale.data.sources.parquet import ParquetSource
from freescale.errors import DataError
from freescale.jagged import find_sorted

_BLOCK_EVENTS = 1 << 21


@dataclass(frozen=True)
class WindowPlan:
    """The windows of an input.

    Args:
        cuts: one a window, in the order of time.
        dropped: events that are too late for any.
    """

    cuts: list[Cut]
    dropped: int


def plan_windows(
    new: ParquetSource,
    known: IntArray,
    *,
    end: int | None,
    rules: LogRules,
    every: int | None,
    low: int | None,
) -> WindowPlan:
    """Cut an input; every window has at least one target.

    Args:
        new: the input, prepared.
        known: users the log knows, ascending.
        end: time of the latest event of the log.
        rules: of the log.
        every: seconds of a window; None: one for all.
        low: events before this have been sealed already by an append that was killed; None: none were.
    """
    oldest = low
    if low is None and end is not None and rules.max_late is not None:
        oldest = end - rules.max_late
    all_kept = Cut(low=oldest, high=None, late=None)
    targets: dict[int, int] = {}
    dropped = 0
    for rows in _blocks(np.asarray(new.lengths)):
        histories = new.read(rows)
        times = histories.columns["time"].astype(np.int64, copy=False)
        kept = within(times, all_kept)
        dropped += int((~kept).sum()) if low is None else 0
        owner = np.repeat(np.arange(len(rows)), histories.lengths)[kept]
        is_first = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
        is_target = ~is_first | find_sorted(known, histories.users[owner])[1]
        # What is late belongs to the window that is open now.
        opened = times[kept] if end is None else np.maximum(times[kept], end)
        bins = np.zeros(len(owner), np.int64) if every is None else opened // every
        for number, count in zip(*_sums(bins, is_target)):
            targets[number] = targets.get(number, 0) + count
    if not any(targets.values()):
        raise DataError(
            "The input holds nothing to learn: no event has one of the same user before it",
            got=f"{int(np.sum(new.lengths)):,} events, {dropped:,} of them too late",
            next_step="append it together with later events",
        )
    edges = _edges(targets, every)
    starts = [oldest, *edges]
    return WindowPlan(
        [Cut(low=start, high=stop, late=end) for start, stop in zip(starts, [*edges, None])], dropped
    )


def _edges(targets: dict[int, int], every: int | None) -> list[int]:
    """Where windows end, all but the last: a time without targets goes with the one after it, or with the last."""
    if every is None:
        return []
    full = [number for number in sorted(targets) if targets[number]]
    return [(number + 1) * every for number in full[:-1]]


def _sums(bins: IntArray, flags: npt.NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    numbers, inverse = np.unique(bins, return_inverse=True)
    return numbers.tolist(), np.bincount(inverse, weights=flags, minlength=len(numbers)).astype(int).tolist()


def _blocks(lengths: IntArray) -> list[IntArray]:
    """Rows in blocks of about so many events."""
    number = np.cumsum(lengths) // _BLOCK_EVENTS
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(number)) + 1)
