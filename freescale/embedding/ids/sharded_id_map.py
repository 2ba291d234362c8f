"""ShardedIdMap: a zero-collision map cut into buckets over the ranks; only the owner of a bucket knows the ids in it.

    ids asked for ──unique──> by bucket ──> their owners: find or give rows ──row numbers──> back

This is a step of its own before rows are fetched, so everything behind it (deduplication, exchange, schedules) works
with row numbers and knows nothing of ids.

One curve: an owner merges what all ranks ask for and hands it to its map in ascending order. So what happens in a
bucket is a function of the global batches alone, and a row's first value is one of (seed, id): the same rows hold the
same vectors on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Transport
from freescale.comm.traffic import ask_owners
from freescale.comm.world import gather
from freescale.embedding.ids.evicted_ids import EvictedIds
from freescale.embedding.ids.id_stats import COUNTS
from freescale.embedding.ids.zero_collision import ZeroCollisionMap
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import PlanError
from freescale.kernels.rows import unique

# Counts of steps nobody has asked for.
_STEPS_KEPT = 64


class ShardedIdMap:
    """Ids to rows of one table of a ShardedEmbedding; rows that change owner start afresh. A `LearningIdMap`.

    Every rank must make the same calls. `rows` with a step changes the map and the table at once: rows of the last
    `guard` batches are never taken over, so their gradients may still be on their way.

    Args:
        embedding: holds the table; its TableSpec has num_rows and row_group of the map's layout.
        table: name of the table.
        channel: a connection for tensors on the CPU that nothing else uses; needed where ids are resolved in a
            thread of their own. Ids travel as the embedding's rows do unless given.
        options: of ZeroCollisionMap (max_probe, eviction, num_buckets, admit_after, admission, guard).
    """

    learns = True

    def __init__(
        self, embedding: ShardedEmbedding, table: str, *, channel: Transport | None = None, **options: Any
    ) -> None:
        plan = embedding.plan_of(table)
        group = plan.spec.row_group
        first, held = plan.block(embedding.rank)
        options = {"num_buckets": plan.spec.num_rows // group, **options}
        self.map = ZeroCollisionMap(
            plan.spec.num_rows, device=embedding.device, held=(first // group, held // group), **options
        )
        if (self.map.num_rows, self.map.layout.bucket_rows) != (plan.spec.num_rows, group):
            raise PlanError(
                f"table {table!r} does not fit its id map",
                got=f"{plan.spec.num_rows} rows in groups of {group}",
                allowed=f"{self.map.num_rows} rows in groups of {self.map.layout.bucket_rows}",
                next_step="take both numbers of the TableSpec from make_layout",
            )
        self.num_rows = plan.spec.num_rows
        self.num_slots = self.map.layout.num_buckets * self.map.layout.bucket_slots
        self._embedding = embedding
        self._channel, self._travels_on = (
            channel or embedding.transport,
            "cpu" if channel else embedding.device,
        )
        self._name = table
        self._first_row = first
        self._buckets_per_rank = max(1, plan.block_rows // group)
        self.clock: Callable[[int], int] | None = None
        """(step) -> the time of a step for what ages; None: its number."""
        self._evicted = EvictedIds(lambda ids: self.map.lookup(ids) < 0)
        self._counts: dict[int, Tensor] = {}

    @property
    def guard(self) -> int:
        """Rows of this many batches before the current one are never given to another id."""
        return self.map.guard

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id; with a step, ids met for the first time get rows. Others share overflow rows."""
        asked, inverse = unique(ids.reshape(-1).to(self._travels_on).long())
        found = ask_owners(
            asked, owner=self._owner, answer=lambda own: self._answer(own, step), channel=self._channel
        )
        return found[inverse].view(ids.shape)

    def take_counts(self, step: int) -> Tensor:
        """Counts of a step on this rank (COUNTS), and the slots taken after it. Later steps may be resolved already."""
        return self._counts.pop(step, torch.zeros(len(COUNTS) + 1, dtype=torch.int64))

    def take_evicted(self) -> Tensor:
        """Ids of this rank's buckets that lost their rows since the last call and have not come back, ascending.

        At most MOST_TOLD, the smallest: `stats` says how many were left out.
        """
        return self._evicted.take()

    def residents(self) -> tuple[Tensor, Tensor]:
        """Ids of this rank's buckets, ascending, and their rows in the whole table."""
        ids, rows = self.map.residents()
        return ids, rows + self._first_row

    def stats(self) -> Mapping[str, Any]:
        """Occupancy, counts and histograms of this rank's buckets; evicted ids that were not told last time."""
        return {**self.map.stats(), "evicted_left_out": self._evicted.left_out}

    def state_dict(self) -> dict[str, Tensor]:
        """The map's tensors; all but the clock as parts of global tensors, bucket by bucket."""
        return {
            name: values if name == "clock" else self._embedding.global_view(self._name, values, grouped=True)
            for name, values in self.map.state_dict().items()
        }

    def restored(self) -> None:
        """The tensors of `state_dict` were filled from a checkpoint."""
        self.map.restored()
        self._evicted.forget()
        self._counts = {}

    def _owner(self, ids: Tensor) -> Tensor:
        """The rank that holds the bucket of each id."""
        return self.map.layout.bucket(ids) // self._buckets_per_rank

    def _answer(self, ids: Tensor, step: int | None) -> Tensor:
        """Row numbers of unique ids of this rank's buckets, ascending."""
        if step is None:
            return self.map.lookup_or_shared(ids) + self._first_row
        assigned = self.map.assign(ids, step if self.clock is None else self.clock(step))
        if len(assigned.new_rows):
            self._embedding.tables[self._name].reset(assigned.new_rows, assigned.new_ids)
        self._evicted.add(assigned.evicted_ids)
        self._counts[step] = torch.cat([assigned.counts, torch.tensor([self.map.occupied])])
        if len(self._counts) > _STEPS_KEPT:
            del self._counts[next(iter(self._counts))]
        return assigned.rows + self._first_row


def gather_ids(ids: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The ids of all ranks together, ascending, on every rank."""
    if group is None:
        return ids
    return torch.cat(gather(ids, group=group, what="gather ids")).sort().values


__all__ = ["COUNTS", "ShardedIdMap", "gather_ids"]
