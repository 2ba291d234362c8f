"""Blocks of rows in another order: arithmetic of exchanges that go through several hands. Pure NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
IntArray = NDArray[np.int64]


def reorder_blocks(rows: Bytes, counts: IntArray, order: IntArray) -> Bytes:
    """[rows, bytes] the blocks of some rows each, put into another order; `rows` itself where it is the same order.

    Args:
        rows: block after block.
        counts: rows of each block.
        order: block `order[n]` is the n-th afterwards.
    """
    if len(order) == 0 or bool((order[1:] > order[:-1]).all()):
        return rows
    sizes = counts[order]
    starts = np.cumsum(counts) - counts
    # Row by row: where its block begins, and how far it is into it.
    first = np.repeat(starts[order] - (np.cumsum(sizes) - sizes), sizes)
    return rows.take(first + np.arange(len(first)), axis=0)


def ends_of(counts: IntArray) -> list[int]:
    """Where each of consecutive blocks begins, and where the last one ends."""
    return [0, *np.cumsum(counts).tolist()]
