"""zero_collision: ids get rows of their own as training meets them, by `ShardedIdMap` over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freescale.comm import Transport
from freescale.embedding.id_map import TableRows
from freescale.embedding.ids.eviction import make_eviction
from freescale.embedding.ids.sharded_id_map import ShardedIdMap
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.kernels.id_table import make_layout
from freescale.registry import register

_LEAST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class ZeroCollisionOptions:
    """Keys of a recipe.

    Args:
        rows: of the table; None: 1.5 times the items.
        max_probe: rows an id may live in.
        buckets: parts that ranks hold as a whole; None: by the number of rows.
        eviction: which id gives way when all rows it may live in are taken.
        ttl: eviction="ttl": steps an id stays after it was last seen.
        admit_after: steps an id must be seen in to get a row.
        admission: how ids without a row are counted.
        guard: rows of this many last steps are not taken over; bounds batches under way.
    """

    rows: int | None = None
    max_probe: int = 128
    buckets: int | None = None
    eviction: Literal["none", "ttl", "lru", "lfu"] = "none"
    ttl: int | None = None
    admit_after: int = 1
    admission: Literal["count_min", "exact"] = "count_min"
    guard: int = 3


@register("id_map", "zero_collision", options=ZeroCollisionOptions)
class ZeroCollision:
    """Plans and builds `ShardedIdMap`."""

    learns = True

    @staticmethod
    def plan(*, num_items: int, largest_id: int, options: ZeroCollisionOptions) -> TableRows:
        """Whole buckets, with room for half as many ids again."""
        rows = options.rows or max(_LEAST_ROWS, num_items * 3 // 2)
        layout = make_layout(rows, num_buckets=options.buckets, max_probe=options.max_probe)
        return TableRows(layout.num_rows, row_group=layout.bucket_rows)

    @staticmethod
    def build(
        *, embedding: ShardedEmbedding, table: str, channel: Transport | None, options: ZeroCollisionOptions
    ) -> ShardedIdMap:
        """The map of a table that has been made as planned."""
        return ShardedIdMap(
            embedding,
            table,
            channel=channel,
            max_probe=options.max_probe,
            eviction=make_eviction(options.eviction, ttl=options.ttl),
            admit_after=options.admit_after,
            admission=options.admission,
            guard=options.guard,
        )
