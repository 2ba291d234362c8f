"""Compiled loop that improves a partition: exchanges between the most and the least loaded ranks.

Integer costs and ties by (load, rank), as in `partition_kernels`: all ranks make the same exchanges. Samples
come sorted from the most to the least costly, so a list of sample numbers in ascending order is sorted by
cost.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit

from freescale.balance.arrays import FloatArray, IntArray

INTS = int64[::1]
FLOATS = float64[::1]

# Room in a rank's list for samples that later exchanges move to it.
SPARE_PLACES = 16
# Partners tried for the most loaded rank before the plan is taken to be final.
PARTNERS = 24


@njit((INTS, FLOATS, int64, float64), cache=True, nogil=True, error_model="numpy")
def update(tree: IntArray, keys: FloatArray, rank: int, key: float) -> None:
    """Set a rank's key and replay its matches in a tree whose root [1] is the rank of the smallest key.

    The lower rank wins a tie. The match is not a function of its own: the calls took more than half of the
    time.
    """
    keys[rank] = key
    place = (len(tree) // 2 + rank) >> 1
    while place >= 1:
        left, right = tree[2 * place], tree[2 * place + 1]
        tree[place] = right if right < len(keys) and keys[right] < keys[left] else left
        place >>= 1


@njit((FLOATS,), cache=True, nogil=True, error_model="numpy")
def winner_tree(keys: FloatArray) -> IntArray:
    """Tree for `update`, with the ranks as leaves in its second half."""
    leaves = 1
    while leaves < len(keys):
        leaves *= 2
    tree = np.zeros(2 * leaves, np.int64)
    for place in range(2 * leaves - 1, 0, -1):
        tree[place] = place - leaves if place >= leaves else tree[2 * place]
    for rank in range(len(keys)):
        update(tree, keys, rank, keys[rank])
    return tree


@njit((INTS, int64, int64, int64), cache=True, nogil=True, error_model="numpy")
def _replace(places: IntArray, size: int, out: int, value: int) -> None:
    """Put a value in the place of entry `out` of a list and keep the list sorted."""
    place = out
    while place > 0 and places[place - 1] > value:
        places[place] = places[place - 1]
        place -= 1
    while place + 1 < size and places[place + 1] < value:
        places[place] = places[place + 1]
        place += 1
    places[place] = value


@njit(
    (INTS, INTS, INTS, INTS, INTS, INTS, FLOATS, int64, int64, int64, boolean),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def _best_exchange(
    costs: IntArray,
    tokens: IntArray,
    given: IntArray,
    taken: IntArray,
    loads: IntArray,
    used: IntArray,
    speeds: FloatArray,
    giver: int,
    taker: int,
    max_tokens: int,
    may_move: bool,
) -> tuple[int, int]:
    """The giver's entry, and the taker's in return (or -1), whose exchange lowers the later finish most.

    The later finish grows with the distance of what changes hands from `wanted`, which would let both finish
    together. Both lists are sorted, so the best partner moves one way only while the giver's list is walked.
    """
    give_room, take_room = max_tokens - used[giver], max_tokens - used[taker]
    short, over = -1.0 / speeds[giver], 1.0 / speeds[taker]
    surplus = loads[giver] * speeds[taker] - loads[taker] * speeds[giver]
    wanted = surplus / (speeds[giver] + speeds[taker])
    best_delay = wanted * -short
    best_give, best_take = -1, -1
    near = 0
    for give in range(len(given)):
        cost, size = costs[given[give]], tokens[given[give]]
        if may_move and size <= take_room:
            excess = cost - wanted
            delay = excess * (over if excess > 0 else short)
            if delay < best_delay:
                best_delay, best_give, best_take = delay, give, -1
        while near < len(taken) and cost - costs[taken[near]] < wanted:
            near += 1
        for take in range(max(0, near - 2), min(len(taken), near + 2)):
            growth = size - tokens[taken[take]]
            if growth > take_room or -growth > give_room:
                continue
            excess = cost - costs[taken[take]] - wanted
            delay = excess * (over if excess > 0 else short)
            if delay < best_delay:
                best_delay, best_give, best_take = delay, give, take
    return best_give, best_take


@njit((INTS, INTS, INTS, INTS, int64, int64, int64, int64), cache=True, nogil=True, error_model="numpy")
def _apply(
    lists: IntArray,
    starts: IntArray,
    counts: IntArray,
    owner: IntArray,
    giver: int,
    taker: int,
    give: int,
    take: int,
) -> tuple[int, int]:
    """Exchange two list entries, or move one; the sample that left the giver and the one that came or -1."""
    from_list, to_list = lists[starts[giver] :], lists[starts[taker] :]
    out, back = from_list[give], -1
    if take >= 0:
        back = to_list[take]
        _replace(from_list, counts[giver], give, back)
        _replace(to_list, counts[taker], take, out)
        owner[back] = giver
    else:
        for place in range(give, counts[giver] - 1):
            from_list[place] = from_list[place + 1]
        counts[giver] -= 1
        counts[taker] += 1
        _replace(to_list, counts[taker], counts[taker] - 1, out)
    owner[out] = taker
    return out, back


@njit((INTS, int64), cache=True, nogil=True, error_model="numpy")
def lists_of(owner: IntArray, num_ranks: int) -> tuple[IntArray, IntArray, IntArray]:
    """Samples by rank in one array with spare places, where each rank starts, and their counts."""
    counts = np.zeros(num_ranks, np.int64)
    for sample in range(len(owner)):
        counts[owner[sample]] += 1
    starts = np.zeros(num_ranks + 1, np.int64)
    for rank in range(num_ranks):
        starts[rank + 1] = starts[rank] + counts[rank] + SPARE_PLACES
    lists = np.empty(starts[num_ranks], np.int64)
    ends = starts[:-1].copy()
    for sample in range(len(owner)):
        rank = owner[sample]
        lists[ends[rank]] = sample
        ends[rank] += 1
    return lists, starts, counts


@njit((INTS, INTS, FLOATS, int64, int64, float64, int64, INTS), cache=True, nogil=True, error_model="numpy")
def exchange(
    costs: IntArray,
    tokens: IntArray,
    speeds: FloatArray,
    max_tokens: int,
    max_count: int,
    enough: float,
    max_exchanges: int,
    owner: IntArray,
) -> bool:
    """Move or swap samples until no rank finishes after `enough`; whether that was reached."""
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
    for _ in range(max_exchanges):
        giver, taker, give, take, num_tried = latest[1], -1, -1, -1, 0
        if times[giver] <= enough:
            return True
        given = lists[starts[giver] : starts[giver] + counts[giver]]
        while give < 0 and num_tried < PARTNERS and open_times[earliest[1]] < times[giver]:
            taker = earliest[1]
            taken = lists[starts[taker] : starts[taker] + counts[taker]]
            may_move = len(taken) < min(max_count, starts[taker + 1] - starts[taker])
            give, take = _best_exchange(
                costs, tokens, given, taken, loads, used, speeds, giver, taker, max_tokens, may_move
            )
            if give < 0:
                tried[num_tried] = taker
                num_tried += 1
                update(earliest, open_times, taker, np.inf)
        for number in range(num_tried):
            update(earliest, open_times, tried[number], times[tried[number]])
        if give < 0:
            return False
        out, back = _apply(lists, starts, counts, owner, giver, taker, give, take)
        gain = costs[out] - (costs[back] if back >= 0 else 0)
        growth = tokens[out] - (tokens[back] if back >= 0 else 0)
        loads[giver], loads[taker] = loads[giver] - gain, loads[taker] + gain
        used[giver], used[taker] = used[giver] - growth, used[taker] + growth
        for rank in (giver, taker):
            times[rank] = loads[rank] / speeds[rank]
            update(latest, lateness, rank, -times[rank])
            update(earliest, open_times, rank, times[rank])
    return False
