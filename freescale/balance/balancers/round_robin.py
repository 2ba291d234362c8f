"""Samples dealt out in turn: random assignment with equal counts, what training without balance does."""

from __future__ import annotations

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray
from freescale.registry import register


@register("balancer", "round_robin")
class RoundRobin:
    """Blind to costs, caps and speeds: what balancing is held against."""

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
        return [np.arange(rank, len(costs), num_ranks, dtype=np.int64) for rank in range(num_ranks)]
