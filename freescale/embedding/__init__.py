"""Tables over ranks: id maps, optimizers, the plan, ShardedEmbedding."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.embedding.eviction import make_eviction
    from freescale.embedding.id_map import DirectMap, HashMap, IdMap
    from freescale.embedding.id_stats import COUNTS, advice, merged
    from freescale.embedding.optimizer import Adam, make_optimizer
    from freescale.embedding.plan import TableSpec, plan_rows
    from freescale.embedding.request import Part, Request, exchange_ids, find_overlap
    from freescale.embedding.sharded import Lookup, ShardedEmbedding, UniqueRows, as_leaf
    from freescale.embedding.sharded_compute import ShardedCompute
    from freescale.embedding.sharded_id_map import ShardedIdMap, gather_ids
    from freescale.embedding.sizing import size_table
    from freescale.embedding.table import as_compute
    from freescale.embedding.zero_collision import ZeroCollisionMap
else:
    __getattr__, __dir__ = open_door(__name__)
