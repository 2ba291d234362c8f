"""What hiding embedding traffic costs the cores of two CPU ranks: the same steps plain and prioritized, in CPU time.

On a GPU the communication thread has cores of its own. Where model and communication share them, its work (ids split,
parts gathered and applied one by one, Python) is taken from the model's, and `freescale simulate` must know how much.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from freescale.embedding import Adam, ShardedEmbedding, TableSpec
from freescale.pipeline import PrioritizedPipeline

_ROWS, _DIM = 20_000, 64
_IDS = (500, 8000)
_WARM, _STEPS, _ROUNDS = 4, 12, 3
# The model's part: it fills the caches, and shares its core with the communication thread.
_STATES, _PASSES = 1 << 20, 12


def measure_hiding(rank: int, group: dist.ProcessGroup) -> dict[str, float]:
    """CPU milliseconds a step and rank that hiding adds, as a line over the ids asked for; every rank must call it."""
    few, many = (_added_ms(rank, group, count) for count in _IDS)
    per_id = max(0.0, (many - few) / (_IDS[1] - _IDS[0]))
    return {"hiding_ms": max(0.0, few - per_id * _IDS[0]), "hiding_us_per_id": 1e3 * per_id}


def _added_ms(rank: int, group: dist.ProcessGroup, num_ids: int) -> float:
    """The least of some rounds on each side: what lies above is other programs' doing."""
    plain, hidden = [], []
    for _ in range(_ROUNDS):
        plain.append(_step_ms(rank, group, num_ids, prioritized=False))
        hidden.append(_step_ms(rank, group, num_ids, prioritized=True))
    return min(hidden) - min(plain)


def _step_ms(rank: int, group: dist.ProcessGroup, num_ids: int, *, prioritized: bool) -> float:
    """CPU time of all threads of this rank, between the first steps and the last."""
    spec = TableSpec(name="item", num_rows=_ROWS, dim=_DIM, optimizer=Adam())
    tables = ShardedEmbedding([spec], group=group, replicate_below_mb=0.0)
    draw = torch.Generator().manual_seed(rank)
    batches = [(_ROWS ** torch.rand(num_ids, generator=draw)).long() - 1 for _ in range(_WARM + _STEPS)]
    states, began = torch.zeros(_STATES), 0.0
    with PrioritizedPipeline(
        batches, embedding=tables, rows_of=lambda ids: {"item": ids}, prioritized=lambda step: prioritized
    ) as pipeline:
        for ready in pipeline:
            if ready.step == _WARM:
                began = time.process_time()
            for _ in range(_PASSES):
                states += 1.0
            ready.vectors["item"].sum().backward()
            pipeline.update(ready, lr=0.01)
        ended = time.process_time()
    return 1000 * (ended - began) / _STEPS
