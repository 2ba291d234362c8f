"""No rank below so many samples: some collectives fail on a rank that has none."""

from __future__ import annotations

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray


def with_least_counts(owner: IntArray, costs: FloatArray, num_ranks: int, *, least: int) -> IntArray:
    """New owner of every sample, so that each rank has at least so many; with too few samples, as even as can be.

    The rank with most samples gives its cheapest one to the rank with fewest, again and again: the same on every
    rank that calls it with the same numbers, and nothing moves where counts are large enough.
    """
    counts = np.bincount(owner, minlength=num_ranks)
    if least < 1 or counts.min() >= least:
        return owner
    new = owner.copy()
    while True:
        few, many = int(counts.argmin()), int(counts.argmax())
        if counts[few] >= least or counts[many] <= counts[few] + 1:
            return new
        own = np.flatnonzero(new == many)
        given = own[np.argmin(costs[own])]
        new[given] = few
        counts[few] += 1
        counts[many] -= 1
