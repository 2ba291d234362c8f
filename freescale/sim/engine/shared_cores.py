"""When ranks finish that share fewer cores than there are ranks: everybody with work gets an equal part."""

from __future__ import annotations

import numpy as np

from freescale.balance import FloatArray


def shared_finish(start: FloatArray, work: FloatArray, cores: int) -> FloatArray:
    """[ranks] end of each rank's work, begun at `start`, on `cores` equal cores that no rank may use two of.

    Between two moments at which a rank begins or ends, each rank with work runs at min(1, cores / busy ranks).
    """
    num_ranks = len(start)
    if cores >= num_ranks:
        return start + work
    left = work.astype(np.float64).copy()
    finish = start.astype(np.float64).copy()
    waiting = sorted(range(num_ranks), key=lambda rank: float(start[rank]), reverse=True)
    busy: list[int] = []
    now = float(start.min()) if num_ranks else 0.0
    while waiting or busy:
        while waiting and float(start[waiting[-1]]) <= now:
            rank = waiting.pop()
            if left[rank] > 0:
                busy.append(rank)
        if not busy:
            if waiting:
                now = float(start[waiting[-1]])
            continue
        speed = min(1.0, cores / len(busy))
        least = min(float(left[rank]) for rank in busy)
        until = now + least / speed
        if waiting and float(start[waiting[-1]]) < until:
            until = float(start[waiting[-1]])
            left[busy] -= (until - now) * speed
            now = until
            continue
        now = until
        # Those with the least left are done by definition: what rounding leaves of it would never end.
        done = [rank for rank in busy if left[rank] <= least * (1 + 1e-9)]
        left[busy] -= least
        finish[done] = now
        busy = [rank for rank in busy if rank not in done]
    return finish
