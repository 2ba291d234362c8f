"""Rules about data sources: reading changes nothing, and what is promised is what comes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import numpy as np

from freescale.check.report import CheckReport, Violation
from freescale.data import IntArray, SequenceSource
from freescale.errors import in_one_line

_NUM_ROWS = 64


def check_source_rules(source: SequenceSource) -> CheckReport:
    """Try every rule about sources on some of its rows."""
    rules: dict[str, Callable[[SequenceSource, IntArray], Iterator[str]]] = {
        "reading a source is pure": _pure,
        "a source keeps its promises": _promises,
        "a source can be sent to loader processes": _picklable,
    }
    num = len(source.lengths)
    rows = np.unique(np.linspace(0, num - 1, min(_NUM_ROWS, num)).astype(np.int64))
    violations = []
    for rule, find in rules.items():
        try:
            violations += [Violation(rule, sentence) for sentence in find(source, rows)]
        except Exception as error:
            violations.append(Violation(rule, f"your source failed: {in_one_line(error)}"))
    return CheckReport(tuple(rules), tuple(violations))


def _pure(source: SequenceSource, rows: IntArray) -> Iterator[str]:
    state = repr(np.random.get_state())
    first = _by_row(source, rows)
    if _by_row(source, rows) != first:
        yield "reading the same rows of your source twice gives other histories: read() must be a function of the rows"
        return
    if (
        _by_row(source, rows[::-1]) != first
        or _by_row(source, rows[len(rows) // 2 :]).items() - first.items()
    ):
        yield "histories of your source depend on the order in which rows are read, or on those read with them"
    if repr(np.random.get_state()) != state:
        yield "your source draws from numpy.random: batches must follow from seed, step and data alone"


def _promises(source: SequenceSource, rows: IntArray) -> Iterator[str]:
    read = source.read(rows)
    promised = np.asarray(source.lengths)[rows]
    wrong = np.flatnonzero(read.lengths != promised)
    if len(wrong):
        row = int(wrong[0])
        yield (
            f"lengths promise {int(promised[row])} events for row {int(rows[row])}, and read() gives "
            f"{int(read.lengths[row])}: batches are planned from lengths"
        )
    missing = [name for name in source.features if name not in read.columns]
    if missing:
        yield f"features name {missing[0]!r}, and read() gives no such column"
        return
    uneven = [name for name in source.features if len(read.columns[name]) != read.offsets[-1]]
    if uneven:
        yield f"column {uneven[0]!r} of read() has not one value an event"
    ids = np.asarray(source.items.ids)
    if np.any(np.diff(ids) <= 0):
        yield "items.ids must be ascending, each id once"
    elif not np.isin(read.columns["item"], ids).all():
        yield "read() gives items that are not among items.ids: they could never be recommended"
    if "time" in source.features:
        late = np.diff(read.columns["time"]) < 0
        late[read.offsets[1:-1][(read.offsets[1:-1] > 0) & (read.offsets[1:-1] <= len(late))] - 1] = False
        if late.any():
            yield "times fall within a history: the oldest event comes first"


def _picklable(source: SequenceSource, rows: IntArray) -> Iterator[str]:
    try:
        copy = pickle.loads(pickle.dumps(source))
    except Exception as error:
        yield f"your source cannot be pickled, so data.workers cannot load from it: {in_one_line(error)}"
        return
    if _by_row(copy, rows) != _by_row(source, rows):
        yield "a pickled copy of your source gives other histories"


def _by_row(source: SequenceSource, rows: IntArray) -> dict[int, bytes]:
    """What each row holds, as bytes."""
    read = source.read(rows)
    starts, ends = read.offsets[:-1], read.offsets[1:]
    return {
        int(row): b"".join(
            np.ascontiguousarray(column[start:end]).tobytes() for _, column in sorted(read.columns.items())
        )
        for row, start, end in zip(rows, starts, ends)
    }
