"""Compiled CPU loops of jagged SiLU attention: exactly the causal pairs, nothing padded, nothing stored but one row.

Import this module where it is used: loading numba takes half a second. A work item is one sequence and head; items
touch disjoint rows of every output, so threads can take them in any order. Inner loops run over contiguous numbers
with four terms at a time, which is what compilers turn into vector code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[Any]
Ints = NDArray[np.int64]

# Compiled for a type when it is first used (about 7 s), then kept on disk.
# Sums may be reordered and contracted; infinities and NaN must stay what they are.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


@njit(cache=True, nogil=True)
def pair_buckets(
    starts: Ints,
    pair_starts: Ints,
    query_time: Ints,
    key_time: Ints,
    out: NDArray[np.uint8],
    width: float,
    last: int,
) -> None:
    """Time bucket of every causal pair (i, j <= i), row by row, sequence by sequence."""
    for b in range(len(starts) - 1):
        index = pair_starts[b]
        for i in range(starts[b], starts[b + 1]):
            for j in range(starts[b], i + 1):
                delta = abs(query_time[i] - key_time[j])
                out[index] = min(last, int(math.log(float(max(delta, 1))) / width))
                index += 1


@njit(fastmath=_FAST, nogil=True, error_model="numpy")
def _dots(row: Floats, columns: Floats, out: Floats, count: int) -> None:
    """out[j] += row . columns[:, j] for j < count."""
    width = len(row)
    whole = width - width % 4
    for d in range(0, whole, 4):
        r0, r1, r2, r3 = row[d], row[d + 1], row[d + 2], row[d + 3]
        c0, c1, c2, c3 = columns[d], columns[d + 1], columns[d + 2], columns[d + 3]
        for j in range(count):
            out[j] += r0 * c0[j] + r1 * c1[j] + r2 * c2[j] + r3 * c3[j]
    for d in range(whole, width):
        r0, c0 = row[d], columns[d]
        for j in range(count):
            out[j] += r0 * c0[j]


@njit(fastmath=_FAST, nogil=True, error_model="numpy")
def _weighted_sum(weights: Floats, rows: Floats, out: Floats, count: int) -> None:
    """Out += sum of weights[j] * rows[j] for j < count."""
    width = len(out)
    whole = count - count % 4
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        for d in range(width):
            out[d] += w0 * r0[d] + w1 * r1[d] + w2 * r2[d] + w3 * r3[d]
    for j in range(whole, count):
        w0, r0 = weights[j], rows[j]
        for d in range(width):
            out[d] += w0 * r0[d]


@njit(fastmath=_FAST, nogil=True, error_model="numpy")
def _spread(weights: Floats, rows: Floats, out: Floats, count: int) -> None:
    """out[j] += sum of weights[r, j] * rows[r] over the four rows, for j < count."""
    width = rows.shape[1]
    r0, r1, r2, r3 = rows[0], rows[1], rows[2], rows[3]
    for j in range(count):
        w0, w1, w2, w3 = weights[0, j], weights[1, j], weights[2, j], weights[3, j]
        target = out[j]
        for d in range(width):
            target[d] += w0 * r0[d] + w1 * r1[d] + w2 * r2[d] + w3 * r3[d]


@njit(fastmath=_FAST, nogil=True, error_model="numpy")
def _set_bias(
    out: Floats, i: int, position: Floats, time: Floats, buckets: NDArray[np.uint8], row: int, positions: Ints
) -> None:
    """out[j] = bias of the pair (i, j), j <= i; tables of length 0 are absent, `positions` where they are i, j."""
    for j in range(i + 1):
        out[j] = 0.0
    if len(position) > 0 and len(positions) > 0:
        for j in range(i + 1):
            out[j] += position[positions[i] - positions[j]]
    elif len(position) > 0:
        for j in range(i + 1):
            out[j] += position[i - j]
    if len(time) > 0:
        for j in range(i + 1):
            out[j] += time[buckets[row + j]]


@njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")
def forward(
    q: Floats,
    k: Floats,
    v: Floats,
    starts: Ints,
    heads: int,
    work: Ints,
    scale: float,
    position: Floats,
    time: Floats,
    buckets: NDArray[np.uint8],
    pair_starts: Ints,
    positions: Ints,
    out: Floats,
) -> None:
    """Out = scale * SiLU(q k^T + bias) v for the given work items (sequence * heads + head)."""
    for item in work:
        b, h = item // heads, item % heads
        first, length = starts[b], starts[b + 1] - starts[b]
        keys = np.ascontiguousarray(k[first : first + length, h].T)
        values = np.ascontiguousarray(v[first : first + length, h])
        scores = np.empty(length, q.dtype)
        own_positions = positions[first : first + length] if len(positions) > 0 else positions
        for i in range(length):
            _set_bias(scores, i, position, time, buckets, pair_starts[b] + i * (i + 1) // 2, own_positions)
            _dots(q[first + i, h], keys, scores, i + 1)
            for j in range(i + 1):
                scores[j] = scale * scores[j] / (1 + math.exp(-scores[j]))
            target = out[first + i, h]
            target[:] = 0
            _weighted_sum(scores, values, target, i + 1)


@njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")
def backward(
    q: Floats,
    k: Floats,
    v: Floats,
    starts: Ints,
    heads: int,
    work: Ints,
    scale: float,
    position: Floats,
    time: Floats,
    buckets: NDArray[np.uint8],
    pair_starts: Ints,
    positions: Ints,
    grad: Floats,
    dq: Floats,
    dk: Floats,
    dv: Floats,
    d_position: Floats,
    d_time: Floats,
) -> None:
    """Gradients for the given work items; four query rows at a time share every key and value row they touch."""
    for item in work:
        b, h = item // heads, item % heads
        first, length = starts[b], starts[b + 1] - starts[b]
        own_k = np.ascontiguousarray(k[first : first + length, h])
        keys, values = np.ascontiguousarray(own_k.T), np.ascontiguousarray(v[first : first + length, h].T)
        own_positions = positions[first : first + length] if len(positions) > 0 else positions
        own_dk, own_dv = np.zeros_like(own_k), np.zeros((length, v.shape[2]), v.dtype)
        weights, d_scores = np.zeros((4, length), q.dtype), np.zeros((4, length), q.dtype)
        four_q, four_g = np.zeros((4, q.shape[2]), q.dtype), np.zeros((4, v.shape[2]), q.dtype)
        for block in range(0, length, 4):
            rows = min(4, length - block)
            weights[:, : block + 4] = 0
            d_scores[:, : block + 4] = 0
            four_q[rows:] = 0
            four_g[rows:] = 0
            for r in range(rows):
                i = block + r
                four_q[r] = q[first + i, h]
                for d in range(four_g.shape[1]):
                    four_g[r, d] = scale * grad[first + i, h, d]
                pair = pair_starts[b] + i * (i + 1) // 2
                _set_bias(weights[r], i, position, time, buckets, pair, own_positions)
                _dots(four_q[r], keys, weights[r], i + 1)
                _dots(four_g[r], values, d_scores[r], i + 1)
                for j in range(i + 1):
                    score = weights[r, j]
                    gate = 1 / (1 + math.exp(-score))
                    weights[r, j] = score * gate
                    d_scores[r, j] *= gate + score * gate * (1 - gate)
                if len(position) > 0 and len(positions) > 0:
                    for j in range(i + 1):
                        d_position[own_positions[i] - own_positions[j]] += d_scores[r, j]
                elif len(position) > 0:
                    for j in range(i + 1):
                        d_position[i - j] += d_scores[r, j]
                if len(time) > 0:
                    for j in range(i + 1):
                        d_time[buckets[pair + j]] += d_scores[r, j]
                target = dq[first + i, h]
                target[:] = 0
                _weighted_sum(d_scores[r], own_k, target, i + 1)
            _spread(weights, four_g, own_dv, block + rows)
            _spread(d_scores, four_q, own_dk, block + rows)
        dk[first : first + length, h] = own_dk
        dv[first : first + length, h] = own_dv
