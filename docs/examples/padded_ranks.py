"""What ranks that pad would wait for each other, planned: samples in turn, by sums, and by `padded`.

python docs/examples/padded_ranks.py
"""

from __future__ import annotations

import numpy as np

from freescale.balance import BalancedSampler, CostModel

RANKS, BATCH, STEPS = 8, 256, 100

lengths = np.exp(np.random.default_rng(0).normal(np.log(512), 1.0, BATCH * STEPS)).astype(np.int64) + 1
costs = CostModel.default().cost(lengths)
print("| samples shared out | ranks idle | step |\n|---|---|---|")
for name in ("round_robin", "lpt", "padded"):
    samplers = [
        BalancedSampler(lengths, global_batch=BATCH, num_ranks=RANKS, rank=rank, balancer=name)
        for rank in range(RANKS)
    ]
    # A rank that pads computes each of its samples at the cost of the longest.
    times = np.array(
        [
            [len(rows) * costs[rows].max() for rows in (each.plan(step).rows for each in samplers)]
            for step in range(STEPS)
        ]
    )
    longest = times.max(axis=1).mean()
    print(f"| `{name}` | {1 - times.mean() / longest:.0%} | {longest:,.0f} ms |")
