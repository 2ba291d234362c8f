"""For models that pad: a rank computes every sample of its batch at the length of the longest."""

from __future__ import annotations

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.limits import checked_problem
from freescale.balance.partition import Partition
from freescale.registry import register

_HALVINGS = 50


@register("balancer", "padded")
class Padded:
    """Samples of like lengths on one rank, so many that count x longest is even; the latest finish is the earliest.

    On ranks of one speed no other assignment finishes earlier: where two ranks hold mixed lengths, samples may be
    exchanged until one holds the longer ones, and neither longest gets larger. Memory follows the same product, so the
    cap on tokens is not asked for.
    """

    def assign(
        self,
        costs: FloatArray,
        num_ranks: int,
        *,
        tokens: IntArray,
        max_tokens: int | None,
        speeds: FloatArray,
    ) -> list[IntArray]:
        """Sample numbers for each rank."""
        return self.report(costs, num_ranks, tokens=tokens, max_tokens=max_tokens, speeds=speeds).ranks

    def report(
        self,
        costs: FloatArray,
        num_ranks: int,
        *,
        tokens: IntArray,
        max_tokens: int | None,
        speeds: FloatArray,
    ) -> Partition:
        """The same with its numbers: times are those of padded batches."""
        problem = checked_problem(costs, num_ranks, tokens=tokens, speeds=speeds)
        order = np.argsort(-problem.costs, kind="stable")
        longest = problem.costs[order]
        # The fastest rank gets the longest samples: it can take more than one of them.
        ranks = np.argsort(-problem.speeds, kind="stable")
        starts = _earliest(longest, problem.speeds[ranks])
        counts = np.zeros(num_ranks, dtype=np.int64)
        counts[ranks] = np.diff(starts)
        owner = np.empty(len(longest), dtype=np.int64)
        owner[order] = np.repeat(ranks, np.diff(starts))
        times = np.zeros(num_ranks)
        np.maximum.at(times, owner, problem.costs)
        times *= counts / problem.given_speeds
        mean = float(times.mean())
        return Partition(
            owner=owner,
            times=times,
            tokens=np.bincount(owner, weights=problem.tokens, minlength=num_ranks).astype(np.int64),
            counts=counts,
            imbalance=float(times.max()) / mean if mean > 0 else 1.0,
            bound=1.0,
            reason=None,
            max_tokens=None,
        )


def _earliest(longest: FloatArray, speeds: FloatArray) -> IntArray:
    """[ranks + 1] where in the falling costs each rank begins, for the earliest finish of the latest rank."""
    if not len(longest) or longest[0] <= 0:
        return np.linspace(0, len(longest), len(speeds) + 1).astype(np.int64)
    low, high = 0.0, float(2 * len(longest) * longest[0] / speeds.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(longest, speeds, middle)[-1] == len(longest) else (middle, high)
    return _fits(longest, speeds, high)


def _fits(longest: FloatArray, speeds: FloatArray, limit: float) -> IntArray:
    """Where each rank begins if it takes what it can finish by the limit, and leaves one sample for each other rank."""
    starts = np.zeros(len(speeds) + 1, dtype=np.int64)
    for rank, speed in enumerate(speeds.tolist()):
        first, others = int(starts[rank]), len(speeds) - rank - 1
        left = len(longest) - first
        most = max(left - others, min(left, 1))
        if left and longest[first] > 0:
            most = min(most, int(limit * speed / longest[first]))
        starts[rank + 1] = first + most
    return starts
