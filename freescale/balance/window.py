"""Deals the samples of several steps again so that long ones meet in the same step.

One sample longer than a rank's fair share makes all other ranks wait, whatever the assignment. Such samples
are rare, so a few steps are given most of them and the cost to match, and the other steps have none. The
result is a function of lengths and recipe only: no measured cost, no number of ranks that happens to run.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.epoch_order import WINDOW, random_order

# Attention equals linear work at this length. The steps must not change when a cost model is refitted, so the
# window has a fixed one; what is needed is only the order of magnitude.
SQUARE_LENGTH = 2048
# A step may hold this many times the mean of samples, and of tokens this many times the mean or, if that is
# more, its longest sample on every rank.
MOST_SWING = 2.0
# What a step with twice the mean of samples costs, in parts of a window's ideal time spread over its steps.
SWING_PRICE = 0.01


def deal_by_count(
    steps: list[IntArray], lengths: npt.NDArray[np.integer], *, num_ranks: int, draw: tuple[int, int, int]
) -> list[IntArray]:
    """The same samples in as many steps, cut from the longest to the shortest where ranks wait least.

    Finds the cuts of the sorted samples that minimise the sum over steps of what `num_ranks` ranks need at
    least (fair share, longest sample, too many long ones), preferring equal counts. Steps then come in a
    random order, samples in their old one.
    """
    rows = np.concatenate(steps)
    if len(steps) == 1 or len(rows) < 2 * len(steps):
        return steps
    sizes = lengths[rows].astype(np.int64, copy=False)
    order = np.argsort(-sizes, kind="stable")
    cuts = _best_cuts(sizes[order], num_steps=len(steps), num_ranks=num_ranks)
    parts = [order[start:stop] for start, stop in itertools.pairwise(cuts)]
    return _shuffled(rows, parts, draw=draw)


def _best_cuts(sizes: IntArray, *, num_steps: int, num_ranks: int) -> list[int]:
    """Cut places of sizes sorted from the longest, by dynamic programming over a grid of places."""
    places = _grid(len(sizes), num_steps)
    price = _prices(sizes, places, num_steps=num_steps, num_ranks=num_ranks)
    best = price[0]
    came_from: list[IntArray] = []
    for _ in range(num_steps - 1):
        totals = best[:, None] + price
        came_from.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    place = len(places) - 1
    path = [place]
    for previous in reversed(came_from):
        place = int(previous[place])
        path.append(place)
    return [0, *(int(places[place]) for place in reversed(path))]


def _grid(num_samples: int, num_steps: int) -> IntArray:
    """Places where a cut may fall: eight a step, and finer among the longest samples.

    Whole-number arithmetic, since logarithms round differently from machine to machine.
    """
    places = {num_samples * part // (8 * num_steps) for part in range(8 * num_steps + 1)}
    place = 1
    while place < num_samples:
        places.add(place)
        place = max(place + 1, place * 9 // 8)
    return np.array(sorted(places), dtype=np.int64)


def _prices(sizes: IntArray, places: IntArray, *, num_steps: int, num_ranks: int) -> FloatArray:
    """[start, stop] time of a step cut at these places, in ideal times of a mean step, plus its swing."""
    work = np.concatenate(([0], np.cumsum(sizes * SQUARE_LENGTH + sizes * sizes)))
    tokens = np.concatenate(([0], np.cumsum(sizes)))[places]
    longest = np.append(sizes, 0)[places]
    time = (work[places][None, :] - work[places][:, None]) / num_ranks
    for crowd in range(4):
        # Of crowd * ranks + 1 samples some rank gets crowd + 1, at least the smallest of them.
        full = places + crowd * num_ranks
        ends = np.minimum(full + 1, len(sizes))
        together = (work[ends] - work[np.minimum(full - crowd, ends)]).astype(np.float64)
        time = np.maximum(time, np.where(places[None, :] > full[:, None], together[:, None], 0.0))
    share = (places[None, :] - places[:, None]) / (len(sizes) / num_steps)
    most_tokens = MOST_SWING * np.maximum(tokens[-1] / num_steps, longest * num_ranks)
    crowded = (share > MOST_SWING) | (tokens[None, :] - tokens[:, None] > most_tokens[:, None])
    ideal = max(int(work[-1]) / num_ranks / num_steps, 1.0)
    price = time / ideal + SWING_PRICE * (share - 1.0) ** 2 + np.where(crowded, 10.0 * num_steps, 0.0)
    return np.where(places[None, :] > places[:, None], price, np.inf)


def deal_by_tokens(
    steps: list[IntArray], lengths: npt.NDArray[np.integer], *, max_tokens: int, draw: tuple[int, int, int]
) -> list[IntArray]:
    """The same samples in as many steps of at most `max_tokens`, cut from the longest to the shortest.

    The shortest samples fill what the cuts leave open. Where that does not come out (a sample above the
    budget, a last window that is hardly filled) the steps stay as they were.
    """
    rows = np.concatenate(steps)
    sizes = lengths[rows].astype(np.int64, copy=False)
    order = np.argsort(-sizes, kind="stable")
    ends = np.cumsum(sizes[order])
    target = min(max_tokens, -(-int(ends[-1]) // len(steps)) + int(sizes.max()))
    parts: list[list[int]] = []
    start = 0
    for _ in steps:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + target, side="right"))
        parts.append(order[start:stop].tolist())
        start = stop
    rooms = [max_tokens - int(sizes[part].sum()) for part in parts]
    for sample in order[start:].tolist():
        roomiest = int(np.argmax(rooms))
        rooms[roomiest] -= int(sizes[sample])
        parts[roomiest].append(sample)
    if min(rooms) < 0 or not all(parts):
        return steps
    return _shuffled(rows, [np.asarray(part, dtype=np.int64) for part in parts], draw=draw)


def _shuffled(rows: IntArray, parts: list[IntArray], *, draw: tuple[int, int, int]) -> list[IntArray]:
    """Steps in a random order, each with its samples in the order of the epoch."""
    seed, epoch, number = draw
    order = random_order(len(parts), seed=seed, purpose=WINDOW, draw=(epoch, number))
    return [rows[np.sort(parts[place])] for place in order]
