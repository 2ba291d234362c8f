"""Compiled CPU loops of keyed dropout. Import this module where it is used: loading numba takes half a second.

numba widens what it computes from 32-bit numbers to 64 bits; casting back after every operation lets the compiler use
vectors of 32-bit numbers, eight or sixteen columns at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, njit, uint32, uint64, void
from numpy.typing import NDArray

from freescale.kernels.dropout import constants

IntArray = NDArray[np.int64]
FloatArray = NDArray[Any]
INTS = int64[::1]
u32, u64 = np.uint32, np.uint64

GOLDEN, LEFT, RIGHT = u64(constants.GOLDEN), u64(constants.LEFT), u64(constants.RIGHT)
COLUMN, FIRST, SECOND = u32(constants.COLUMN), u32(constants.FIRST), u32(constants.SECOND)


@njit(uint64(uint64), cache=True, nogil=True)
def _mix(x: Any) -> Any:
    x = (x ^ (x >> u64(30))) * LEFT
    x = (x ^ (x >> u64(27))) * RIGHT
    return x ^ (x >> u64(31))


@njit(void(uint64, INTS, INTS, INTS), cache=True, nogil=True, error_model="numpy")
def token_keys(step: Any, samples: IntArray, offsets: IntArray, out: IntArray) -> None:
    """out[t] = key of token t, position by position in each sample."""
    for n in range(len(samples)):
        sample = _mix(step + (u64(samples[n]) + u64(1)) * GOLDEN)
        for token in range(offsets[n], offsets[n + 1]):
            out[token] = np.int64(_mix(sample + (u64(token - offsets[n]) + u64(1)) * GOLDEN))


@njit(
    [void(t[:, ::1], INTS, t[:, ::1], uint32, t, uint64) for t in (float32, float64)],
    cache=True,
    nogil=True,
    error_model="numpy",
)
def dropout(x: FloatArray, keys: IntArray, out: FloatArray, threshold: Any, scale: Any, site: Any) -> None:
    """out[n, c] = scale * x[n, c] where the hash of n's key, site and c reaches the threshold, else 0."""
    zero = x.dtype.type(0)
    for n in range(len(x)):
        key = _mix(u64(keys[n]) + (site + u64(1)) * GOLDEN)
        low, high = u32(key), u32(key >> u64(32))
        for c in range(x.shape[1]):
            h = u32(low + u32(u32(c) * COLUMN))
            h = u32(u32(h ^ (h >> u32(16))) * FIRST)
            h = u32(h ^ high)
            h = u32(u32(h ^ (h >> u32(15))) * SECOND)
            h = u32(h ^ (h >> u32(16)))
            out[n, c] = x[n, c] * scale if h >= threshold else zero
