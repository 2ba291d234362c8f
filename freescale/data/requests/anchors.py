"""AnchorRule: single events of a log as requests, the latest days held back.

    anchor     an event with a label and enough events before it; the request has it as its only candidate
    history    what stands before it in the log, ties in the clock included: rows are in the order they happened
    moment     that of the last event before it: nothing of the anchor but its features is known

The last days are the test, as many days before them validation. Training goes through days one after the other, and
inside a day through users: the order in which a log is met (`data.order=listed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freescale.data.source import IntArray, SequenceSource, Split
from freescale.errors import DataError

DAY_S = 86_400


@dataclass(frozen=True)
class AnchorRule:
    """Which events are requests.

    Args:
        column: an event that has a number there is one; NaN: none.
        history: events that must have happened before it.
        days: of the test, and of validation before it, counted in whole days from the end of the log.
    """

    column: str
    history: int = 1
    days: int = 1


def find_anchors(
    source: SequenceSource, rule: AnchorRule, split: Split, blocks: Iterable[IntArray]
) -> tuple[IntArray, IntArray]:
    """(user, event) of every anchor of a split: by day, inside a day by user, inside a user by time.

    Args:
        source: read through once, some users at a time.
        rule: which events are anchors.
        split: part of the log.
        blocks: users that are read together.
    """
    users, events, days = [], [], []
    last = -1
    for block in blocks:
        histories = source.read(block)
        time = np.asarray(histories.columns["time"], np.int64)
        label: npt.NDArray[np.generic] = histories.columns[rule.column]
        row = np.repeat(np.arange(len(block)), histories.lengths)
        number = np.arange(len(row)) - histories.offsets[row]
        found = (number >= rule.history) & has_label(label)
        users.append(np.asarray(block)[row[found]])
        events.append(number[found])
        days.append(time[found] // DAY_S)
        last = max(last, int(time.max(initial=-1)) // DAY_S)
    user, event, day = (np.concatenate([np.zeros(0, np.int64), *part]) for part in (users, events, days))
    begin, end = days_of(rule, last)[split]
    mine = (day >= begin) & (day < end)
    if not mine.any():
        raise no_anchors(split, rule, len(user))
    user, event, day = user[mine], event[mine], day[mine]
    order = np.lexsort((event, user, day))
    return user[order], event[order]


def has_label(column: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """[n] which events have a number there."""
    if np.issubdtype(column.dtype, np.floating):
        return ~np.isnan(column)
    return np.ones(len(column), dtype=bool)


def days_of(rule: AnchorRule, last: int) -> dict[Split, tuple[int, int]]:
    """First day of every split, and the day after its last, where `last` is the last of the log."""
    test = last + 1 - rule.days
    return {
        "train": (-1, test - rule.days),
        "valid": (test - rule.days, test),
        "test": (test, last + 1),
    }


def no_anchors(split: Split, rule: AnchorRule, count: int) -> DataError:
    """What is said where a split has none, of so many in all."""
    return DataError(
        f"head.anchors: no event of the {split} part is an anchor",
        got=f"{count:,} in all; {rule.days} days held back twice, {rule.history} events before each",
        next_step="lower head.anchor_history, or raise head.anchor_days",
    )
