"""Compiled loop for lengths of few distinct values: splits parts of two ranks anew in the best way.

With short histories the costs are nearly whole numbers, and no swap of two samples moves less than one token.
Sets of several samples differ by less. Integer costs and fixed order, as in `swap_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, njit

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.loops.swap_kernels import lists_of, update, winner_tree

INTS = int64[::1]
FLOATS = float64[::1]

# Samples of each of two ranks that are split anew: 2^8 sums on each side, met in the middle in 3
# microseconds.
PART = 8
PARTNERS = 8


@njit((INTS, INTS, INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def _choice(lists: IntArray, starts: IntArray, counts: IntArray, rank: int, shift: int) -> IntArray:
    """At most PART samples of a rank, spread over its lengths; another `shift`, other samples.

    Spread, because sets of equal tokens differ in cost by their squares: one long sample against many short
    ones.
    """
    count = min(PART, counts[rank])
    chosen = np.empty(count, np.int64)
    for number in range(count):
        place = (number * counts[rank] // count + shift) % counts[rank]
        chosen[number] = lists[starts[rank] + place]
    return chosen


@njit((INTS, INTS), cache=True, nogil=True, error_model="numpy")
def _subset_sums(values: IntArray, chosen: IntArray) -> IntArray:
    """All sums of subsets of the chosen values in ascending order, each as (sum << PART) | subset."""
    sums = np.zeros(1 << len(chosen), np.int64)
    merged = np.empty(1 << len(chosen), np.int64)
    size = 1
    for number in range(len(chosen)):
        step = (values[chosen[number]] << PART) | (1 << number)
        left, right = 0, 0
        for place in range(2 * size):
            if right == size or (left < size and sums[left] <= sums[right] + step):
                merged[place] = sums[left]
                left += 1
            else:
                merged[place] = sums[right] + step
                right += 1
        size *= 2
        sums[:size] = merged[:size]
    return sums


@njit((int64,), cache=True, nogil=True, error_model="numpy")
def _ones(subset: int) -> int:
    """Number of samples in a subset."""
    count = 0
    while subset:
        subset &= subset - 1
        count += 1
    return count


@njit((INTS, INTS), cache=True, nogil=True, error_model="numpy")
def _by_subset(values: IntArray, chosen: IntArray) -> IntArray:
    """Sum of the values of each subset, by its bits."""
    sums = np.zeros(1 << len(chosen), np.int64)
    for number in range(len(chosen)):
        for subset in range(1 << number):
            sums[subset | (1 << number)] = sums[subset] + values[chosen[number]]
    return sums


@njit(
    (INTS, INTS, INTS, INTS, INTS, INTS, INTS, FLOATS, float64), cache=True, nogil=True, error_model="numpy"
)
def _best_subsets(
    costs: IntArray,
    tokens: IntArray,
    given: IntArray,
    taken: IntArray,
    loads: IntArray,
    rooms: IntArray,
    places: IntArray,
    speeds: FloatArray,
    enough: float,
) -> tuple[int, int]:
    """Which of the giver's samples to hand over and which of the taker's to get back, as bits; 0, 0 for none.

    The best pair of subsets, or the first that lets both finish by `enough`. Pairs of arguments are
    (giver, taker): loads, tokens still free, samples still free, and speeds.
    """
    short, over = -1.0 / speeds[0], 1.0 / speeds[1]
    wanted = (loads[0] * speeds[1] - loads[1] * speeds[0]) / (speeds[0] + speeds[1])
    best_delay, best_give, best_take = wanted * -short * (1 - 1e-9), 0, 0
    good = enough - (loads[0] + loads[1]) / (speeds[0] + speeds[1])
    gives, takes = _subset_sums(costs, given), _subset_sums(costs, taken)
    give_tokens, take_tokens = _by_subset(tokens, given), _by_subset(tokens, taken)
    mask = (1 << PART) - 1
    near = 0
    for place in range(len(gives)):
        cost, give = gives[place] >> PART, gives[place] & mask
        while near < len(takes) and cost - (takes[near] >> PART) > wanted:
            near += 1
        for other in range(max(0, near - 1), min(len(takes), near + 1)):
            excess = cost - (takes[other] >> PART) - wanted
            delay = excess * (over if excess > 0 else short)
            if delay >= best_delay:
                continue
            take = takes[other] & mask
            growth, more = give_tokens[give] - take_tokens[take], _ones(give) - _ones(take)
            if growth <= rooms[1] and -growth <= rooms[0] and more <= places[1] and -more <= places[0]:
                best_delay, best_give, best_take = delay, give, take
        if best_delay <= good:
            break
    return best_give, best_take


@njit((INTS, INTS, INTS, INTS, INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def _hand_over(
    costs: IntArray,
    tokens: IntArray,
    loads: IntArray,
    used: IntArray,
    owner: IntArray,
    sample: int,
    rank: int,
) -> None:
    """Give a sample to another rank."""
    loads[owner[sample]] -= costs[sample]
    used[owner[sample]] -= tokens[sample]
    loads[rank] += costs[sample]
    used[rank] += tokens[sample]
    owner[sample] = rank


@njit((INTS, INTS, INTS, INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def _refill(
    lists: IntArray, starts: IntArray, counts: IntArray, owner: IntArray, one: int, other: int
) -> None:
    """Rebuild the sorted lists of two ranks after samples changed owner between them."""
    both = np.concatenate(
        (lists[starts[one] : starts[one] + counts[one]], lists[starts[other] : starts[other] + counts[other]])
    )
    both.sort()
    counts[one], counts[other] = 0, 0
    for sample in both:
        rank = owner[sample]
        lists[starts[rank] + counts[rank]] = sample
        counts[rank] += 1


@njit((INTS, INTS, FLOATS, int64, int64, float64, int64, INTS), cache=True, nogil=True, error_model="numpy")
def resplit(
    costs: IntArray,
    tokens: IntArray,
    speeds: FloatArray,
    max_tokens: int,
    max_count: int,
    enough: float,
    max_resplits: int,
    owner: IntArray,
) -> None:
    """Split parts of the latest and an early rank anew until none finishes after `enough`."""
    num_ranks = len(speeds)
    loads, used = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for sample in range(len(costs)):
        loads[owner[sample]] += costs[sample]
        used[owner[sample]] += tokens[sample]
    lists, starts, counts = lists_of(owner, num_ranks)
    times = loads / speeds
    open_times, lateness = times.copy(), -times
    latest, earliest = winner_tree(lateness), winner_tree(open_times)
    tried = np.empty(PARTNERS, np.int64)
    pair = np.empty(2, np.int64)
    for _ in range(max_resplits):
        give, take, num_tried = 0, 0, 0
        pair[0] = latest[1]
        last_finish = times[pair[0]]
        if last_finish <= enough:
            return
        given = taken = lists[:0]
        while give == take == 0 and num_tried < PARTNERS and open_times[earliest[1]] < last_finish:
            pair[1] = earliest[1]
            given = _choice(lists, starts, counts, pair[0], num_tried)
            taken = _choice(lists, starts, counts, pair[1], num_tried)
            places = np.minimum(max_count, starts[pair + 1] - starts[pair]) - counts[pair]
            rooms = max_tokens - used[pair]
            give, take = _best_subsets(
                costs, tokens, given, taken, loads[pair], rooms, places, speeds[pair], enough
            )
            tried[num_tried] = pair[1]
            num_tried += 1
            update(earliest, open_times, pair[1], np.inf)
        for number in range(num_tried):
            update(earliest, open_times, tried[number], times[tried[number]])
        if give == take == 0:
            return
        for number in range(PART):
            if give >> number & 1:
                _hand_over(costs, tokens, loads, used, owner, given[number], pair[1])
            if take >> number & 1:
                _hand_over(costs, tokens, loads, used, owner, taken[number], pair[0])
        _refill(lists, starts, counts, owner, pair[0], pair[1])
        for rank in (pair[0], pair[1]):
            times[rank] = loads[rank] / speeds[rank]
            update(latest, lateness, rank, -times[rank])
            update(earliest, open_times, rank, times[rank])
