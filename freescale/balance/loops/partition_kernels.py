"""Compiled loops that build a partition: longest-first with caps, and best fit by tokens.

Samples come sorted from the most to the least costly, costs and tokens are integers and every tie is broken
by (load, rank), so that all ranks compute the same plan. Import this module only where a plan is made:
loading numba takes half a second.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit

from freescale.balance.arrays import FloatArray, IntArray

INTS = int64[::1]
FLOATS = float64[::1]
# Bits of one pass of the radix sort: a table of 2,048 counters stays in the first-level cache.
DIGIT = 11


@njit((INTS,), cache=True, nogil=True, error_model="numpy")
def largest_first(weights: IntArray) -> IntArray:
    """Order from the largest weight to the smallest, ties by number; a third of numpy's time."""
    order, other = np.arange(len(weights)), np.empty(len(weights), np.int64)
    largest, shift = weights.max(), 0
    while largest >> shift > 0:
        ends = np.zeros((1 << DIGIT) + 1, np.int64)
        for weight in weights:
            ends[(((largest - weight) >> shift) & ((1 << DIGIT) - 1)) + 1] += 1
        for digit in range(1 << DIGIT):
            ends[digit + 1] += ends[digit]
        for place in range(len(order)):
            digit = ((largest - weights[order[place]]) >> shift) & ((1 << DIGIT) - 1)
            other[ends[digit]] = order[place]
            ends[digit] += 1
        order, other = other, order
        shift += DIGIT
    return order


@njit((INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def _sift_down(heap: IntArray, size: int, place: int) -> None:
    """Restore a min-heap after the value at a place grew."""
    value = heap[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value


@njit((INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def _push(heap: IntArray, size: int, value: int) -> int:
    """Add a value to a min-heap; the new size."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent] <= value:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = value
    return size + 1


@njit((INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def _remove(heap: IntArray, size: int, place: int) -> int:
    """Remove the top of a min-heap or one of its children; the new size."""
    heap[place] = heap[size - 1]
    _sift_down(heap, size - 1, place)
    return size - 1


@njit(
    (INTS, int64, INTS, INTS, FLOATS, int64, int64, int64),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def _first_to_finish(
    active: IntArray,
    size: int,
    loads: IntArray,
    rooms: IntArray,
    speeds: FloatArray,
    cost: int,
    need: int,
    rank_bits: int,
) -> int:
    """Place in the heap of the one of the two least loaded ranks that finishes a sample first.

    A rank other than the least loaded wins only when it is faster by more than its lead. Looking at eight
    gave the same bubble once the exchanges had run, and took twice the time.
    """
    if size == 1:
        return 0
    mask = (1 << rank_bits) - 1
    place = 2 if size > 2 and active[2] < active[1] else 1
    first, second = active[0] & mask, active[place] & mask
    sooner = (loads[second] + cost) / speeds[second] < (loads[first] + cost) / speeds[first]
    return place if sooner and rooms[second] >= need else 0


@njit((INTS, INTS, FLOATS, int64, int64, int64, boolean, INTS), cache=True, nogil=True, error_model="numpy")
def longest_first(
    costs: IntArray,
    tokens: IntArray,
    speeds: FloatArray,
    max_tokens: int,
    max_count: int,
    rank_bits: int,
    even: bool,
    owner: IntArray,
) -> int:
    """Give each sample to the rank with room that finishes it first; the number of samples placed.

    `speeds` fall from rank to rank, `even` says that they are all 1. The heap holds (time << rank_bits) |
    rank. A rank without room for the sample at hand is parked in a second heap by room and comes back when
    samples have become short enough, so that caps cost no scan over the ranks.
    """
    num_ranks = len(speeds)
    mask = (1 << rank_bits) - 1
    active = np.arange(num_ranks)
    parked = np.empty(num_ranks, np.int64)
    size, num_parked = num_ranks, 0
    loads = np.zeros(num_ranks, np.int64)
    rooms = np.full(num_ranks, max_tokens)
    counts = np.zeros(num_ranks, np.int64)
    for sample in range(len(costs)):
        cost, need = costs[sample], tokens[sample]
        while num_parked > 0 and max_tokens - (parked[0] >> rank_bits) >= need:
            rank = parked[0] & mask
            num_parked = _remove(parked, num_parked, 0)
            size = _push(active, size, (np.int64(loads[rank] / speeds[rank]) << rank_bits) | rank)
        while size > 0 and rooms[active[0] & mask] < need:
            rank = active[0] & mask
            size = _remove(active, size, 0)
            num_parked = _push(parked, num_parked, ((max_tokens - rooms[rank]) << rank_bits) | rank)
        if size == 0:
            return sample
        place = 0 if even else _first_to_finish(active, size, loads, rooms, speeds, cost, need, rank_bits)
        rank = active[place] & mask
        owner[sample] = rank
        loads[rank] += cost
        rooms[rank] -= need
        counts[rank] += 1
        if counts[rank] < max_count:
            time = loads[rank] if even else np.int64(loads[rank] / speeds[rank])
            active[place] = (time << rank_bits) | rank
            _sift_down(active, size, place)
        else:
            size = _remove(active, size, place)
    return len(costs)


@njit((INTS, int64, int64, int64, INTS), cache=True, nogil=True, error_model="numpy")
def best_fit(tokens: IntArray, num_ranks: int, max_tokens: int, max_count: int, owner: IntArray) -> int:
    """Put each sample (longest first) where it leaves the least room; the number of samples placed."""
    rooms = np.full(num_ranks, max_tokens)
    counts = np.zeros(num_ranks, np.int64)
    for sample in range(len(tokens)):
        best, best_room = -1, np.int64(0)
        for rank in range(num_ranks):
            fits = counts[rank] < max_count and rooms[rank] >= tokens[sample]
            if fits and (best < 0 or rooms[rank] < best_room):
                best, best_room = rank, rooms[rank]
        if best < 0:
            return sample
        owner[sample] = best
        rooms[best] -= tokens[sample]
        counts[best] += 1
    return len(tokens)
