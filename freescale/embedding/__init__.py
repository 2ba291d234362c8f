"""Tables over ranks: id maps, optimizers, the plan, ShardedEmbedding."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.embedding.id_map import IdMap, IdMapKind, LearningIdMap, TableRows, learns_ids
    from freescale.embedding.id_maps.direct import DirectMap
    from freescale.embedding.id_maps.hash import HashMap
    from freescale.embedding.ids.evicted_ids import MOST_TOLD
    from freescale.embedding.ids.eviction import LFU, LRU, TTL, ByScore, make_eviction
    from freescale.embedding.ids.id_stats import COUNTS, advice, merged
    from freescale.embedding.ids.numbered import NumberedMap, needs_numbers
    from freescale.embedding.ids.sharded_id_map import ShardedIdMap, gather_ids
    from freescale.embedding.ids.sizing import size_table
    from freescale.embedding.ids.spread_hot import SpreadMap
    from freescale.embedding.ids.zero_collision import Assignment, ZeroCollisionMap
    from freescale.embedding.optimizer import SparseOptimizer, make_optimizer
    from freescale.embedding.optimizers.adam import Adam
    from freescale.embedding.optimizers.rowwise_adagrad import RowwiseAdagrad
    from freescale.embedding.optimizers.sgd import SGD
    from freescale.embedding.sharded_compute import ShardedCompute
    from freescale.embedding.sharding.plan import TableSpec, fits_below, plan_rows, plan_tables
    from freescale.embedding.sharding.request import (
        Request,
        RowSubset,
        check_range,
        exchange_all_ids,
        find_overlaps,
    )
    from freescale.embedding.sharding.sharded import ShardedEmbedding
    from freescale.embedding.tables.direct import PlannedRows
    from freescale.embedding.tables.lookup import Lookup, UniqueRows, as_leaf
    from freescale.embedding.tables.table import EmbeddingTable, as_compute
else:
    __getattr__, __dir__ = open_door(__name__)
