"""Balance samples that already lie on ranks, moving as few as possible; for streams that were read before planning.

From the assignment at arrival, the most loaded rank gives to the least loaded one, again and again: one sample, or one
sample against a smaller one, whichever brings the two closest together. On long-tailed lengths about a tenth of the
samples moves for a 1 % bubble; a fresh partition would move nearly all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.least_counts import with_least_counts
from freescale.errors import PlanError


def min_moves(
    costs: Sequence[float] | FloatArray,
    owner: Sequence[int] | npt.NDArray[np.integer],
    num_ranks: int,
    *,
    tolerance: float = 0.01,
    speeds: Sequence[float] | FloatArray | None = None,
    min_count: int = 0,
) -> IntArray:
    """New owner of every sample; the same on every rank that calls it with the same numbers.

    Args:
        costs: [n] predicted cost of each sample.
        owner: [n] the rank each sample lies on.
        num_ranks: number of ranks.
        tolerance: stop when the latest rank is this share later than the mean.
        speeds: [ranks] relative speeds.
        min_count: samples that every rank has at least, where there are as many.
    """
    cost = np.asarray(costs, dtype=np.float64)
    new = np.array(owner, dtype=np.int64)
    _check(cost, new, num_ranks)
    speed = np.ones(num_ranks) if speeds is None else np.asarray(speeds, dtype=np.float64)
    loads = np.bincount(new, weights=cost, minlength=num_ranks).astype(np.float64)
    goal = loads.sum() / speed.sum()
    for _ in range(len(cost)):
        times = loads / speed
        late, early = int(times.argmax()), int(times.argmin())
        if times[late] <= goal * (1 + tolerance):
            break
        give, take = _best_trade(cost, new, late, early, loads, speed)
        if give is None:
            break
        new[give] = early
        moved = cost[give]
        if take is not None:
            new[take] = late
            moved -= cost[take]
        loads[late] -= moved
        loads[early] += moved
    return with_least_counts(new, cost, num_ranks, least=min_count)


def _best_trade(
    cost: FloatArray, owner: IntArray, late: int, early: int, loads: FloatArray, speed: FloatArray
) -> tuple[int | None, int | None]:
    """The sample to give and the one to take back (None: nothing) that leave the later of the two earliest."""
    give, back = np.flatnonzero(owner == late), np.flatnonzero(owner == early)
    # The last column stands for taking nothing back.
    moved = cost[give][:, None] - np.append(cost[back], 0.0)[None, :]
    after = np.maximum((loads[late] - moved) / speed[late], (loads[early] + moved) / speed[early])
    best = int(after.argmin())
    row, column = divmod(best, after.shape[1])
    if after[row, column] >= loads[late] / speed[late] * (1 - 1e-9):
        return None, None
    return int(give[row]), int(back[column]) if column < len(back) else None


def _check(cost: FloatArray, owner: IntArray, num_ranks: int) -> None:
    if len(cost) != len(owner):
        raise PlanError(
            "Every sample needs a cost and an owner.", got=f"{len(cost)} costs, {len(owner)} owners"
        )
    if not np.isfinite(cost).all() or (cost < 0).any():
        raise PlanError("Costs must be finite and not negative.")
    if num_ranks < 1 or (len(owner) and (owner.min() < 0 or owner.max() >= num_ranks)):
        raise PlanError("Owners must be ranks.", got=f"{num_ranks} ranks", allowed="0 <= owner < num_ranks")
