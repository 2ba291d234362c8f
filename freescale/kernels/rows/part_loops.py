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
def split_places(marks: BoolArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Places that are marked, places that are not, and how many are marked in each of consecutive blocks."""
    inside, outside = np.empty(len(marks), np.int64), np.empty(len(marks), np.int64)
    counts = np.zeros(len(sizes), np.int64)
    ins = outs = place = 0
    for block in range(len(sizes)):
        before = ins
        for _ in range(sizes[block]):
            if marks[place]:
                inside[ins] = place
                ins += 1
            else:
                outside[outs] = place
                outs += 1
            place += 1
        counts[block] = ins - before
    return inside[:ins].copy(), outside[:outs].copy(), counts


@njit((BITS, INTS), cache=True, nogil=True, error_model="numpy")
def split_values(marks: BoolArray, values: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Values that are marked, values that are not, and the place of each within its own list."""
    inside, outside = np.empty(len(marks), np.int64), np.empty(len(marks), np.int64)
    number = np.empty(len(marks), np.int64)
    ins = outs = 0
    for place in range(len(marks)):
        if marks[place]:
            inside[ins] = values[place]
            number[place] = ins
            ins += 1
        else:
            outside[outs] = values[place]
            number[place] = outs
            outs += 1
    return inside[:ins].copy(), outside[:outs].copy(), number


@njit((BITS, INTS, INTS, INTS, INTS), cache=True, nogil=True, error_model="numpy")
def split_wanted(
    marks: BoolArray, number: IntArray, wanted: IntArray, slots: IntArray, sizes: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Rows wanted whose slot is marked, and those whose slot is not, each with the `number` of its slot.

    In this order: rows marked, their numbers, rows not marked, their numbers, how many are marked in each of
    consecutive blocks.
    """
    rows_in, rows_out = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    slots_in, slots_out = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    counts = np.zeros(len(sizes), np.int64)
    ins = outs = place = 0
    for block in range(len(sizes)):
        before = ins
        for _ in range(sizes[block]):
            slot = slots[place]
            if marks[slot]:
                rows_in[ins], slots_in[ins] = wanted[place], number[slot]
                ins += 1
            else:
                rows_out[outs], slots_out[outs] = wanted[place], number[slot]
                outs += 1
            place += 1
        counts[block] = ins - before
    return (
        rows_in[:ins].copy(),
        slots_in[:ins].copy(),
        rows_out[:outs].copy(),
        slots_out[:outs].copy(),
        counts,
    )
