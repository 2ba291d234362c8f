"""The order in which an epoch visits the rows, drawn from (seed, epoch) and kinder to files if asked."""

from __future__ import annotations

import itertools

import numpy as np

from freescale.balance.arrays import IntArray
from freescale.jagged import spans

# What a stream of random numbers is for; two streams of one seed and epoch never share numbers.
ROWS, GROUPS, WINDOW = 0, 1, 2


def random_order(count: int, *, seed: int, purpose: int, draw: tuple[int, ...]) -> IntArray:
    """A permutation of range(count) that is a pure function of its arguments.

    Sorting raw words of a counter-based generator, not numpy's shuffle: numpy keeps the raw stream stable
    over its versions but not the shuffle, and a run must resume on the same batches after an upgrade.
    """
    generator = np.random.Philox(np.random.SeedSequence((seed, purpose, *draw)))
    return np.argsort(generator.random_raw(count), kind="stable").astype(np.int64, copy=False)


def epoch_order(
    num_rows: int,
    *,
    seed: int,
    epoch: int,
    groups: IntArray | None = None,
    shuffle_rows: int | None = None,
) -> IntArray:
    """Every row once, in the order of this epoch.

    With `groups` and `shuffle_rows` the groups are permuted and rows shuffled only inside runs of whole
    groups of at least `shuffle_rows` rows, so that a reader holds few groups open; else any order is equally
    likely.
    """
    if groups is None or shuffle_rows is None or shuffle_rows >= num_rows:
        return random_order(num_rows, seed=seed, purpose=ROWS, draw=(epoch,))
    group_order = random_order(len(groups), seed=seed, purpose=GROUPS, draw=(epoch,))
    rows = _rows_of_groups(groups, group_order)
    bounds = _run_bounds(groups[group_order], at_least=shuffle_rows)
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        inside = random_order(stop - start, seed=seed, purpose=ROWS, draw=(epoch, number))
        rows[start:stop] = rows[start:stop][inside]
    return rows


def _rows_of_groups(groups: IntArray, group_order: IntArray) -> IntArray:
    """Row numbers group by group, in the given order of groups."""
    rows, _ = spans((np.cumsum(groups) - groups)[group_order], groups[group_order])
    return rows


def _run_bounds(sizes: IntArray, *, at_least: int) -> list[int]:
    """Row offsets that cut consecutive groups into runs of at least so many rows; a rest joins the last."""
    ends = np.cumsum(sizes)
    bounds = [0]
    while True:
        place = int(np.searchsorted(ends, bounds[-1] + at_least, side="left"))
        if place >= len(ends) - 1 or int(ends[-1] - ends[place]) < at_least:
            return [*bounds, int(ends[-1])]
        bounds.append(int(ends[place]))
