"""A balancer from outside the package: every sample to the rank that holds the least so far, in the order they come."""

from __future__ import annotations

import numpy as np

from freescale.registry import register


@register("balancer", "least_loaded")
class LeastLoaded:
    def assign(self, costs, num_ranks, *, tokens, max_tokens, speeds):
        loads, parts = np.zeros(num_ranks), [[] for _ in range(num_ranks)]
        for sample, cost in enumerate(costs):
            rank = int(loads.argmin())
            loads[rank] += cost / speeds[rank]
            parts[rank].append(sample)
        return parts
