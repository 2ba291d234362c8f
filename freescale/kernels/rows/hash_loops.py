"""Compiled CPU loops over ids: hashes that many operations on tensors would make one by one, holding the interpreter.

A batch with a dozen tables of hashed ids spent more time on them than on all the rest of finding its rows. As other
loops, import this module where it is used.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
INTS = int64[::1]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@njit((uint64,), cache=True, nogil=True, error_model="numpy", inline="always")
def _mix(value: np.uint64) -> np.uint64:
    """The last steps of splitmix64."""
    value = (value ^ (value >> _SHIFTS[0])) * _MIX_1
    value = (value ^ (value >> _SHIFTS[1])) * _MIX_2
    return value ^ (value >> _SHIFTS[2])


@njit((INTS, uint64, int64), cache=True, nogil=True, error_model="numpy")
def hashed_rows(ids: IntArray, start: np.uint64, num_rows: int) -> IntArray:
    """The row of every id: mix64(id * GOLDEN + start), as a signed number, modulo num_rows."""
    rows = np.empty(len(ids), np.int64)
    for at in range(len(ids)):
        rows[at] = np.int64(_mix(np.uint64(ids[at]) * GOLDEN + start)) % num_rows
    return rows


@njit((INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def scattered_rows(ids: IntArray, factor: int, num_rows: int) -> tuple[IntArray, int]:
    """The row of every id, id * factor modulo num_rows, and the place of the first that is not from 0 to num_rows - 1.

    -1: all of them are.
    """
    rows, bad = np.empty(len(ids), np.int64), -1
    for at in range(len(ids)):
        if bad < 0 and not 0 <= ids[at] < num_rows:
            bad = at
        rows[at] = ids[at] * factor % num_rows
    return rows, bad


@njit((uint64, int64[:, ::1], int64), cache=True, nogil=True, error_model="numpy")
def crossed_ids(start: np.uint64, members: IntArray, none: int) -> IntArray:
    """One id of those in each column: h = mix64(h + GOLDEN ^ id) from above to below, from `start`.

    `none` where one of them is, and only there.
    """
    crossed = np.empty(members.shape[1], np.int64)
    for at in range(members.shape[1]):
        mixed, there = start, True
        for member in range(members.shape[0]):
            there &= members[member, at] != none
            mixed = _mix((mixed + GOLDEN) ^ np.uint64(members[member, at]))
        value = np.int64(mixed)
        crossed[at] = none if not there else value + 1 if value == none else value
    return crossed
