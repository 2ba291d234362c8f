"""From raw ids to table rows: what an id map can do, and how a kind of one is planned and built.

A formula (`id_maps/direct.py`, `id_maps/hash.py`) has a row for every id from the start. A map that learns
(`id_maps/zero_collision.py`) gives rows to ids as training meets them, so it has a state to save and a story to tell.

A kind of your own is one file: a class with `learns`, `plan` and `build`, registered in the family "id_map".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from freescale.comm import Transport
    from freescale.embedding.sharding.sharded import ShardedEmbedding


class IdMap(Protocol):
    """Turns raw 64-bit ids into rows of a table. The rows of an id must not depend on the number of ranks.

    Args:
        num_rows: rows of the table.
        learns: whether `rows` with a step changes the map: it is a `LearningIdMap` then.
    """

    num_rows: int
    learns: bool

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id, same shape. With the number of a training step, new ids may get rows; without, none does.

        Where a map learns, every rank makes the same calls, in step order.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must keep, in place."""

    def restored(self) -> None:
        """The tensors of `state_dict` were filled from a checkpoint."""


class LearningIdMap(IdMap, Protocol):
    """A map that gives rows to ids it meets in training.

    Args:
        num_slots: rows that can be some id's own, over all ranks.
    """

    num_slots: int

    @property
    def guard(self) -> int:
        """Rows of this many batches before the current one are given to no other id: so many may be under way."""

    def residents(self) -> tuple[Tensor, Tensor]:
        """Ids that have a row of their own and are held by this rank, ascending, and their rows in the whole table."""

    def take_counts(self, step: int) -> Tensor:
        """What a step did to ids on this rank (id_stats.COUNTS), and the slots taken here after it; asked for once."""

    def take_evicted(self) -> Tensor:
        """Ids held by this rank that lost their rows since the last call and have not come back, ascending.

        Not more than fit into memory for sure: a map that leaves some out counts them in `stats`.
        """

    def stats(self) -> Mapping[str, Any]:
        """Of this rank: "occupied" slots; where it keeps them, histograms "probe_histogram" and "age_histogram".

        "evicted_left_out": ids the last `take_evicted` did not tell, if it leaves any out.
        """


def learns_ids(id_map: IdMap) -> TypeGuard[LearningIdMap]:
    """Whether a map gives rows to ids in training."""
    return id_map.learns


@dataclass(frozen=True)
class TableRows:
    """What a map asks of its table.

    Args:
        num_rows: rows over all ranks.
        row_group: rows that always stay together on one rank; num_rows is a multiple of it.
    """

    num_rows: int
    row_group: int = 1


class IdMapKind(Protocol):
    """What is registered in the family "id_map".

        kind = registry.find("id_map", name)
        rows = kind.make.plan(num_items=..., largest_id=..., options=options)      # then the table is made
        id_map = kind.make.build(embedding=..., table="item", channel=None, options=options)

    Args:
        learns: as that of the maps it builds.

    A kind may have `dense = True`: it wants numbers from 0 on, and ids that are none are numbered for it
    (`embedding/ids/numbered.py`).
    """

    learns: bool

    def plan(self, *, num_items: int, largest_id: int, options: Any) -> TableRows:
        """The rows a table needs for this many items, the largest of which is known."""

    def build(
        self, *, embedding: ShardedEmbedding, table: str, channel: Transport | None, options: Any
    ) -> IdMap:
        """The map of a table.

        Args:
            embedding: holds the table, made as planned.
            table: its name.
            channel: a connection for tensors on the CPU that nothing else uses, where ids are resolved beside
                training; ids travel as the embedding's rows do where it is None.
            options: those of the kind.
        """
