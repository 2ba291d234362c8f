"""Compiled CPU loops over the rows of a table. Import this module where it is used: loading numba takes half a second.

Every loop goes through its input in the order it stands, so sums come out the same in every run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int64, njit, void
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Int32Array = NDArray[np.int32]
FloatArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
INTS = int64[::1]
FLOAT_TYPES = (float32, float64)
# Bits of one pass of the radix sort: a table of 2,048 counters stays in the first-level cache.
DIGIT = 11


@njit(cache=True, nogil=True, error_model="numpy")
def _unique_among_few(ids: IntArray, smallest: int, num_values: int) -> tuple[IntArray, IntArray]:
    """The same where there are not many more values than ids: a mark for each value instead of a sort."""
    places = np.full(num_values, -1, np.int64)
    for value in ids:
        places[value - smallest] = 0
    values, found = np.empty(num_values, np.int64), 0
    for number in range(num_values):
        if places[number] == 0:
            places[number] = found
            values[found] = number + smallest
            found += 1
    inverse = np.empty(len(ids), np.int64)
    for at in range(len(ids)):
        inverse[at] = places[ids[at] - smallest]
    return values[:found].copy(), inverse


@njit((INTS,), cache=True, nogil=True, error_model="numpy")
def unique(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Unique values, ascending, and the position of every id among them; a fifth of the time of torch.unique."""
    count, smallest, largest = len(ids), ids[0], ids[0]
    for value in ids:
        smallest, largest = min(smallest, value), max(largest, value)
    # Differences may wrap: only their bits count below, so any two int64 can stand side by side.
    width = largest - smallest
    if 0 <= width < 4 * count:
        return _unique_among_few(ids, smallest, width + 1)
    keys, order = np.empty(count, np.int64), np.empty(count, np.int64)
    for at in range(count):
        keys[at] = ids[at] - smallest
        order[at] = at
    other_keys, other_order = np.empty_like(keys), np.empty_like(order)
    ends = np.empty((1 << DIGIT) + 1, np.int64)
    shift = 0
    while shift < 64 and width >> shift != 0:
        ends[:] = 0
        for key in keys:
            ends[((key >> shift) & ((1 << DIGIT) - 1)) + 1] += 1
        for digit in range(1 << DIGIT):
            ends[digit + 1] += ends[digit]
        for at in range(count):
            digit = (keys[at] >> shift) & ((1 << DIGIT) - 1)
            end = ends[digit]
            ends[digit] = end + 1
            other_keys[end] = keys[at]
            other_order[end] = order[at]
        keys, other_keys = other_keys, keys
        order, other_order = other_order, order
        shift += DIGIT
    values, inverse, found = other_keys, other_order, -1
    for at in range(count):
        if at == 0 or keys[at] != keys[at - 1]:
            found += 1
            values[found] = keys[at] + smallest
        inverse[order[at]] = found
    return values[: found + 1].copy(), inverse


@njit([void(INTS, t[:, ::1], t[:, ::1]) for t in FLOAT_TYPES], cache=True, nogil=True, error_model="numpy")
def sum_by_row(index: IntArray, values: FloatArray, out: FloatArray) -> None:
    """out[row] = sum of the values[n] with index[n] = row, for n = 0, 1, ...; what `out` held before is gone."""
    # The first value of a row is copied: that saves filling `out` with zeros and reading them back.
    seen = np.zeros(len(out), np.bool_)
    for n in range(len(index)):
        row = index[n]
        if not 0 <= row < len(out):
            raise IndexError("row index out of range")
        if seen[row]:
            for column in range(values.shape[1]):
                out[row, column] += values[n, column]
        else:
            seen[row] = True
            for column in range(values.shape[1]):
                out[row, column] = values[n, column]
    for row in range(len(out)):
        if not seen[row]:
            out[row] = 0


@njit(
    [void(t[:, ::1], INTS, t[:, ::1], t[::1]) for t in FLOAT_TYPES],
    cache=True,
    nogil=True,
    error_model="numpy",
)
def add_scaled(table: FloatArray, rows: IntArray, values: FloatArray, scale: FloatArray) -> None:
    """table[rows[n]] += scale[n] * values[n], in place."""
    for n in range(len(rows)):
        row, factor = rows[n], scale[n]
        if not 0 <= row < len(table):
            raise IndexError("row index out of range")
        for column in range(values.shape[1]):
            table[row, column] += factor * values[n, column]


@njit(void(INTS, INTS, boolean[::1], boolean[::1]), cache=True, nogil=True, error_model="numpy")
def overlap(first: IntArray, second: IntArray, in_second: BoolArray, in_first: BoolArray) -> None:
    """Which values of two ascending lists of unique values stand in the other one, too: one walk through both."""
    m = n = 0
    while m < len(first) and n < len(second):
        if first[m] < second[n]:
            m += 1
        elif first[m] > second[n]:
            n += 1
        else:
            in_second[m] = in_first[n] = True
            m += 1
            n += 1


@njit([void(t[:, ::1], t[::1]) for t in FLOAT_TYPES], cache=True, nogil=True, error_model="numpy")
def mean_squares(values: FloatArray, out: FloatArray) -> None:
    """out[n] = mean of the squares of values[n], added from left to right."""
    for n in range(len(values)):
        total = values[n, 0] * values[n, 0]
        for column in range(1, values.shape[1]):
            total += values[n, column] * values[n, column]
        out[n] = total / values.dtype.type(values.shape[1])


@njit(
    [void(t[:, ::1], t[:, ::1], t[:, ::1], t[:, ::1], t, t, t, t) for t in FLOAT_TYPES],
    cache=True,
    nogil=True,
    error_model="numpy",
)
def adam(
    grad: FloatArray,
    moment1: FloatArray,
    moment2: FloatArray,
    direction: FloatArray,
    beta1: float,
    beta2: float,
    correction2: float,
    eps: float,
) -> None:
    """Both moments of every row, in place, and direction = moment1 / (sqrt(moment2 / correction2) + eps)."""
    one = grad.dtype.type(1)
    for n in range(len(grad)):
        for column in range(grad.shape[1]):
            g = grad[n, column]
            first = moment1[n, column] + (one - beta1) * (g - moment1[n, column])
            second = beta2 * moment2[n, column] + (one - beta2) * g * g
            moment1[n, column], moment2[n, column] = first, second
            direction[n, column] = first / (np.sqrt(second / correction2) + eps)


@njit((INTS, int64), cache=True, nogil=True, error_model="numpy")
def order_by_row(inverse: IntArray, num_rows: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Values by their row, equal ones as they stand; where each row begins among them; the row of each."""
    starts = np.zeros(num_rows + 1, np.int32)
    for row in inverse:
        if not 0 <= row < num_rows:
            raise IndexError("row index out of range")
        starts[row + 1] += 1
    for row in range(num_rows):
        starts[row + 1] += starts[row]
    ends = starts[:num_rows].copy()
    order, index = np.empty(len(inverse), np.int32), np.empty(len(inverse), np.int32)
    for at in range(len(inverse)):
        row = inverse[at]
        order[ends[row]] = at
        index[ends[row]] = row
        ends[row] += 1
    return order, starts, index
