"""How much more the busiest owners serve: every rank asks for the most popular rows, and somebody has each of them.

A row that a rank asks for with probability s is asked for by s x ranks of them. Rows are dealt to their owners as
hashing does, at random, or evenly by their popularity (`embedding.spread_hot`); what each owner then serves, over the
mean of all, stays the same from step to step, since it is always the same rows that are popular.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.id_traffic import IdModel

_PLACES = 65_536
"""Even placement knows this many of the most popular rows; the others lie as hashing has put them."""


@lru_cache(maxsize=256)
def owner_loads(
    ids: IdModel, *, draws: float, other: float, num_ranks: int, which: str, even: bool, seed: int
) -> tuple[float, ...]:
    """What each owner serves, times the mean of all.

    Args:
        ids: how popular rows are.
        draws: ids of one rank's batch.
        other: ids of the whole next batch.
        num_ranks: owners, and ranks that ask.
        which: rows that count: all, "shared" with the next batch, or "alone".
        even: the most popular rows are dealt evenly, not as hashing does.
        seed: of the hashing.
    """
    counts, asked = ids.asked_by(draws, other, which=which)
    rng = np.random.default_rng([seed, 21])
    loads = np.zeros(num_ranks)
    known = 0
    for number, weight in zip(counts, asked):
        if even and known + number <= _PLACES:
            # One after the other, there and back again.
            turns = (known + np.arange(int(number))) % (2 * num_ranks)
            np.add.at(loads, np.minimum(turns, 2 * num_ranks - 1 - turns), weight)
            known += int(number)
            continue
        # Many rows of like weight: their number at each owner is near its mean, with the spread of chance.
        mean = number / num_ranks
        if number < 1e6:
            at_owner = rng.multinomial(int(number), np.full(num_ranks, 1 / num_ranks))
        else:
            at_owner = mean + np.sqrt(mean * (1 - 1 / num_ranks)) * rng.standard_normal(num_ranks)
        loads += weight * at_owner
    total = loads.mean()
    return tuple((loads / total if total > 0 else np.ones(num_ranks)).tolist())


def busiest(loads: FloatArray) -> float:
    """The most of them."""
    return float(np.max(loads)) if len(loads) else 1.0
