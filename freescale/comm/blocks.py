"""Blocks of rows in another order: the arithmetic of messages that are made of parts. Pure NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def reorder_blocks(rows: NDArray[Any], counts: IntArray, order: IntArray) -> NDArray[Any]:
    """[rows, ...] the blocks of some rows each, put into another order; `rows` itself where it is the same order.

    Args:
        rows: block after block.
        counts: rows of each block.
        order: block `order[n]` is the n-th afterwards.
    """
    if bool((order[1:] > order[:-1]).all()):
        return rows
    sizes = counts[order]
    starts = np.cumsum(counts) - counts
    # Row by row: where its block begins, and how far it is into it.
    first = np.repeat(starts[order] - (np.cumsum(sizes) - sizes), sizes)
    return rows.take(first + np.arange(len(first)), axis=0)


def turned(outer: int, inner: int) -> IntArray:
    """The order that puts blocks which stand by `outer`, then `inner`, by `inner`, then `outer`."""
    return np.arange(outer * inner).reshape(outer, inner).T.reshape(-1)


def ends_of(counts: IntArray) -> list[int]:
    """Where each of consecutive blocks begins, and where the last one ends."""
    return [0, *np.cumsum(counts).tolist()]
