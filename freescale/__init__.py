"""FreeScale: sequence recommendation models on many GPUs with almost no wasted GPU time.

Public names are loaded when they are first used: `import freescale` alone imports neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from freescale.balance.sampler import BalancedSampler
    from freescale.data.sequence_batch import SequenceBatch
    from freescale.embedding.plan import TableSpec
    from freescale.embedding.sharded import ShardedEmbedding
    from freescale.embedding.zero_collision import ZeroCollisionMap
    from freescale.model.token_cache import TokenCache
    from freescale.pipeline.prioritized import PrioritizedPipeline
    from freescale.train.export import load_export

_HOME = {
    "BalancedSampler": "freescale.balance.sampler",
    "PrioritizedPipeline": "freescale.pipeline.prioritized",
    "SequenceBatch": "freescale.data.sequence_batch",
    "ShardedEmbedding": "freescale.embedding.sharded",
    "TableSpec": "freescale.embedding.plan",
    "TokenCache": "freescale.model.token_cache",
    "ZeroCollisionMap": "freescale.embedding.zero_collision",
    "load_export": "freescale.train.export",
}

__all__ = [
    "BalancedSampler",
    "PrioritizedPipeline",
    "SequenceBatch",
    "ShardedEmbedding",
    "TableSpec",
    "TokenCache",
    "ZeroCollisionMap",
    "__version__",
    "load_export",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'freescale' has no attribute {name!r}")
