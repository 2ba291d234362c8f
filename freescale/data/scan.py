"""Going through a data set once, block by block, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freescale.data.source import IntArray, SequenceSource

_BLOCK_EVENTS = 1 << 20


def row_blocks(source: SequenceSource, *, max_events: int = _BLOCK_EVENTS) -> Iterator[IntArray]:
    """All rows in their order, in blocks of about so many events; one history alone may have more."""
    ends = np.cumsum(source.lengths)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_events, side="right")))
        yield np.arange(start, stop)
        start = stop


def spread_rows(source: SequenceSource, *, max_events: int) -> IntArray:
    """All rows of a small data set; of a large one whole groups, spread evenly over it, of about so many events.

    The same for every rank and every run: it follows from the lengths and groups alone.
    """
    lengths, groups = np.asarray(source.lengths), np.asarray(source.groups)
    total = int(lengths.sum())
    if total <= max_events:
        return np.arange(len(lengths))
    if len(groups) < 2 * total // max_events:
        return np.unique(
            np.linspace(0, len(lengths) - 1, max(1, len(lengths) * max_events // total), dtype=np.int64)
        )
    chosen = np.unique(
        np.linspace(0, len(groups) - 1, max(1, len(groups) * max_events // total), dtype=np.int64)
    )
    starts = np.cumsum(groups) - groups
    return np.concatenate([np.arange(starts[n], starts[n] + groups[n]) for n in chosen])
