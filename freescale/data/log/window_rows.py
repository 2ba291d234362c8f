"""Rows of a window: new events of users behind the latest of their older ones, cut so that each is a target once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.data.source import Histories, IntArray
from freescale.jagged import group_index, spans


class Rows(NamedTuple):
    """Rows cut from sequences that stand one after another.

    Args:
        events: [events of all rows] where each event stands.
        lengths: [rows] events of each row.
        targets: [rows] how many of its last events are to be learnt.
    """

    events: IntArray
    lengths: IntArray
    targets: IntArray


class Sequences(NamedTuple):
    """What some users did: older events, then new ones.

    Args:
        users: [n] ascending.
        lengths: [n] events of each.
        fresh: [n] how many of its last events are new.
        columns: one flat array a feature.
    """

    users: IntArray
    lengths: IntArray
    fresh: IntArray
    columns: dict[str, npt.NDArray[np.generic]]


def join(older: Histories | None, newer: Histories, keep: IntArray) -> Sequences:
    """Both in one sequence a user, every user of either once.

    Args:
        older: the latest events of users, ascending.
        newer: new events of users, ascending.
        keep: [events] which of the new events count, ascending.
    """
    owner = np.repeat(newer.users, newer.lengths)[keep]
    columns = {name: values[keep] for name, values in newer.columns.items()}
    is_new = np.ones(len(owner), dtype=bool)
    if older is not None:
        owner = np.concatenate([np.repeat(older.users, older.lengths), owner])
        columns = {
            name: np.concatenate([older.columns[name].astype(values.dtype, copy=False), values])
            for name, values in columns.items()
        }
        is_new = np.concatenate([np.zeros(len(owner) - len(is_new), dtype=bool), is_new])
    # Stable: older events stay before new ones, and both in their own order.
    order = np.argsort(owner, kind="stable")
    users, starts, lengths = np.unique(owner[order], return_index=True, return_counts=True)
    fresh = (
        np.add.reduceat(is_new[order].astype(np.int64), starts)
        if len(starts)
        else np.zeros(0, dtype=np.int64)
    )
    return Sequences(users, lengths, fresh, {name: values[order] for name, values in columns.items()})


def num_targets(lengths: IntArray, fresh: IntArray) -> IntArray:
    """How many new events of each sequence have an event before them."""
    return lengths - np.maximum(lengths - fresh, np.minimum(lengths, 1))


def cut_rows(lengths: IntArray, fresh: IntArray, *, max_length: int) -> Rows:
    """Rows of at most max_length inputs and a target behind them; every new event but a user's first is a target once.

    A sequence with more targets than fit gives several rows, cut from its end.
    """
    targets = num_targets(lengths, fresh)
    counts = -(-targets // max_length)
    owner, number = group_index(counts)
    stop = lengths[owner] - (counts[owner] - 1 - number) * max_length
    first_target = np.maximum(lengths[owner] - targets[owner], stop - max_length)
    start = np.maximum(stop - max_length - 1, 0)
    base = (np.cumsum(lengths) - lengths)[owner]
    sizes = stop - start
    index, _ = spans(base + start, sizes)
    return Rows(index, sizes, stop - first_target)


def latest(lengths: IntArray, *, max_length: int) -> tuple[IntArray, IntArray]:
    """Where the last max_length events of each sequence stand, and how many they are."""
    kept = np.minimum(lengths, max_length)
    index, _ = spans(np.cumsum(lengths) - kept, kept)
    return index, kept
