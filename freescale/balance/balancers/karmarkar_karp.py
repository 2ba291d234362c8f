"""Karmarkar-Karp with equal counts, the balancer most systems use today: a baseline for comparison."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.limits import checked_problem
from freescale.errors import PlanError
from freescale.registry import register


@register("balancer", "karmarkar_karp")
class KarmarkarKarp:
    """Equal counts by largest differencing; it knows no caps and no speeds, as its kind never does."""

    def assign(
        self,
        costs: FloatArray,
        num_ranks: int,
        *,
        tokens: IntArray,
        max_tokens: int | None,
        speeds: FloatArray,
    ) -> list[IntArray]:
        """Sample numbers for each rank; what does not make a full round is filled up with samples of no cost."""
        filled = np.concatenate((costs, np.zeros(-len(costs) % num_ranks)))
        return [part[part < len(costs)] for part in karmarkar_karp_equal(filled, num_ranks)]


def karmarkar_karp_equal(costs: Sequence[float] | npt.NDArray[np.floating], num_ranks: int) -> list[IntArray]:
    """Sample numbers for each rank, the same count on every rank, by largest differencing.

    The sorted samples are cut into strata of one sample a rank. The two strata with the widest spread of
    loads are merged, the heaviest part of one with the lightest of the other, until one is left. Every rank
    thus gets one sample of each stratum, which is why it cannot even out a long tail: the rank with the
    longest sample also gets one of each of the other strata.

    Args:
        costs: [samples] a multiple of the number of ranks.
        num_ranks: number of ranks.
    """
    values = checked_problem(costs, num_ranks, tokens=None, speeds=None).costs
    if len(values) == 0 or len(values) % num_ranks:
        raise PlanError(
            "Equal counts need a multiple of the number of ranks.",
            got=f"{len(values)} samples, {num_ranks} ranks",
        )
    strata = np.argsort(-values, kind="stable").reshape(-1, num_ranks)
    heap: list[tuple[float, int, npt.NDArray[np.float64], IntArray]] = []
    for number, members in enumerate(strata):
        loads = values[members]
        heap.append((float(loads[-1] - loads[0]), number, loads, members[:, None]))
    heapq.heapify(heap)
    number = len(strata)
    while len(heap) > 1:
        _, _, loads, members = heapq.heappop(heap)
        _, _, other_loads, other_members = heapq.heappop(heap)
        merged = loads + other_loads[::-1]
        order = np.argsort(-merged, kind="stable")
        merged = merged[order]
        parts = np.concatenate((members, other_members[::-1]), axis=1)[order]
        heapq.heappush(heap, (float(merged[-1] - merged[0]), number, merged, parts))
        number += 1
    return [np.sort(part) for part in heap[0][3]]
