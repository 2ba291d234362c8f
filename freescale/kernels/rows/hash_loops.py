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
