"""Longest first to the rank that finishes it first, then exchanges: the default, see `balance/partition.py`."""

from __future__ import annotations

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.partition import Partition, soft_partition_report
from freescale.registry import register


@register("balancer", "lpt")
class LongestFirst:
    """Ranks finish together, under the cap on tokens; the cap gives way only where no assignment keeps it."""

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
        """The same with its numbers."""
        return soft_partition_report(costs, num_ranks, tokens=tokens, max_tokens=max_tokens, speeds=speeds)
