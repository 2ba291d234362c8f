"""Compiled CPU loops that cut what a batch asks for in two: what is marked, and what is not.

They let go of the interpreter: the thread that launches kernels goes on beside them. Import this module where it is
used: loading numba takes half a second.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, int64, njit
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
INTS, BITS = int64[::1], boolean[::1]


@njit((BITS, INTS), cache=True, nogil=True, error_model="numpy")
def split_index(marks: BoolArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Positions that are marked, positions that are not, and how many are marked in each of consecutive blocks."""
    inside, outside = np.empty(len(marks), np.int64), np.empty(len(marks), np.int64)
    counts = np.zeros(len(sizes), np.int64)
    ins = outs = at = 0
    for block in range(len(sizes)):
        before = ins
        for _ in range(sizes[block]):
            if marks[at]:
                inside[ins] = at
                ins += 1
            else:
                outside[outs] = at
                outs += 1
            at += 1
        counts[block] = ins - before
    return inside[:ins].copy(), outside[:outs].copy(), counts


@njit((BITS, INTS), cache=True, nogil=True, error_model="numpy")
def split_values(marks: BoolArray, values: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Values that are marked, values that are not, and the position of each within its own list."""
    inside, outside = np.empty(len(marks), np.int64), np.empty(len(marks), np.int64)
    number = np.empty(len(marks), np.int64)
    ins = outs = 0
    for at in range(len(marks)):
        if marks[at]:
            inside[ins] = values[at]
            number[at] = ins
            ins += 1
        else:
            outside[outs] = values[at]
            number[at] = outs
            outs += 1
    return inside[:ins].copy(), outside[:outs].copy(), number


@njit((BITS, INTS, INTS, INTS, INTS), cache=True, nogil=True, error_model="numpy")
def split_wanted(
    marks: BoolArray, number: IntArray, wanted: IntArray, inverse: IntArray, sizes: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Rows wanted whose unique row is marked, and those whose is not, each with the `number` of that unique row.

    In this order: rows marked, their numbers, rows not marked, their numbers, how many are marked in each of
    consecutive blocks.
    """
    rows_in, rows_out = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    inverse_in, inverse_out = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    counts = np.zeros(len(sizes), np.int64)
    ins = outs = at = 0
    for block in range(len(sizes)):
        before = ins
        for _ in range(sizes[block]):
            row = inverse[at]
            if marks[row]:
                rows_in[ins], inverse_in[ins] = wanted[at], number[row]
                ins += 1
            else:
                rows_out[outs], inverse_out[outs] = wanted[at], number[row]
                outs += 1
            at += 1
        counts[block] = ins - before
    return (
        rows_in[:ins].copy(),
        inverse_in[:ins].copy(),
        rows_out[:outs].copy(),
        inverse_out[:outs].copy(),
        counts,
    )
