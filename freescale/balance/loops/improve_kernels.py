"""Compiled loops that improve a partition: exchanges of samples, and parts of two ranks split anew.

Integer costs and ties by (load, rank), as in `partition_kernels`: all ranks make the same exchanges. Samples
come sorted from the most to the least costly, so a list of sample numbers in ascending order is sorted by
cost.

    exchange    of samples between the most and the least loaded ranks
    resplit     for lengths of few distinct values: with short histories the costs are nearly whole numbers, and no
                swap of two samples moves less than one token. Sets of several samples differ by less

Both are in one file since numba keeps compiled loops by the file they are in: one that calls a loop of another file
would go on with the old one after a change there.
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
RESPLIT_PARTNERS = 8
# Samples of each of two ranks that are split anew: 2^8 sums on each side, met in the middle in 3
# microseconds.
PART = 8


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


@njit((INTS, INTS, INTS, int64), cache=True, nogil=True, error_model="numpy")
def _loads(costs: IntArray, tokens: IntArray, owner: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Cost and tokens of every rank."""
    loads, used = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for sample in range(len(costs)):
        loads[owner[sample]] += costs[sample]
        used[owner[sample]] += tokens[sample]
    return loads, used


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
    loads, used = _loads(costs, tokens, owner, num_ranks)
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
    loads, used = _loads(costs, tokens, owner, num_ranks)
    lists, starts, counts = lists_of(owner, num_ranks)
    times = loads / speeds
    open_times, lateness = times.copy(), -times
    latest, earliest = winner_tree(lateness), winner_tree(open_times)
    tried = np.empty(RESPLIT_PARTNERS, np.int64)
    pair = np.empty(2, np.int64)
    for _ in range(max_resplits):
        give, take, num_tried = 0, 0, 0
        pair[0] = latest[1]
        last_finish = times[pair[0]]
        if last_finish <= enough:
            return
        given = taken = lists[:0]
        while give == take == 0 and num_tried < RESPLIT_PARTNERS and open_times[earliest[1]] < last_finish:
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
