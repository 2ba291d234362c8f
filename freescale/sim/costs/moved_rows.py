"""How many rows of all tables a step moves, and how many bytes they are: expected values, by step and rank.

Seen from both sides: what a rank asks for, and what it serves as an owner.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.hot_owners import owner_loads
from freescale.sim.costs.id_traffic import IdModel
from freescale.sim.costs.plans import Loads
from freescale.sim.inputs.workload import Workload

ID_BYTES = 8
MASK_BYTES = 0.25


@dataclass(frozen=True, eq=False)
class MovedRows:
    """[steps, ranks] over all tables.

    Args:
        asked: ids asked for.
        moved: rows that travel each way.
        shared: those among them that the next batch needs, too.
        moved_bytes: of `moved`, one way, as gradients are sent.
        shared_bytes: of `shared`.
        served: rows that a rank sends as their owner.
        served_shared: those among them that the next batch needs, too.
        served_bytes: of `served`.
        served_shared_bytes: of `served_shared`.
    """

    asked: FloatArray
    moved: FloatArray
    shared: FloatArray
    moved_bytes: FloatArray
    shared_bytes: FloatArray
    served: FloatArray
    served_shared: FloatArray
    served_bytes: FloatArray
    served_shared_bytes: FloatArray

    @property
    def alone(self) -> FloatArray:
        """Rows that the next batch does not need."""
        return np.maximum(self.moved - self.shared, 0.0)

    @property
    def alone_bytes(self) -> FloatArray:
        """Of `alone`."""
        return np.maximum(self.moved_bytes - self.shared_bytes, 0.0)

    @property
    def served_alone(self) -> FloatArray:
        """Of `served`, those that the next batch does not need."""
        return np.maximum(self.served - self.served_shared, 0.0)

    @property
    def served_alone_bytes(self) -> FloatArray:
        """Of `served_alone`."""
        return np.maximum(self.served_bytes - self.served_shared_bytes, 0.0)

    @property
    def busiest_owner(self) -> float:
        """Bytes that the busiest owner sends, over the mean of all."""
        mean = float(self.served_bytes.mean())
        return float(self.served_bytes.max(axis=1).mean()) / mean if mean > 0 else 1.0

    def bytes_of_a_rank(
        self, num_ranks: int, *, prioritized: bool, splits: bool = False, stored_share: float = 1.0
    ) -> tuple[float, float]:
        """Bytes a step that one rank sends and receives while it stands still, and under compute; means."""
        away = 2 * (num_ranks - 1) / num_ranks
        both = (1 + stored_share) * away
        moved, shared = (both * float(each.mean()) for each in (self.moved_bytes, self.shared_bytes))
        ids = away * float(self.moved.mean())
        if not prioritized:
            return moved + ids * ID_BYTES, 0.0
        hidden = moved - shared + ids * (ID_BYTES + MASK_BYTES)
        return (0.0, hidden + shared) if splits else (shared, hidden)


def moved_rows(
    workload: Workload,
    loads: Loads,
    *,
    dedup: bool,
    even: bool = False,
    num_ranks: int = 1,
    seed: int = 0,
    local: int = 1,
) -> MovedRows:
    """All tables together, since one exchange moves their rows.

    With `local` ranks a node: what relays ask for, each for all ranks of its node, of 1 / local of the rows.

    Without `dedup` every occurrence travels, but owners are taken to be no more unequal than with it: in truth the one
    that has the most popular row would serve many times the mean. That flatters runs without deduplication.
    """
    none = np.zeros_like(loads.tokens, dtype=np.float64)
    total = MovedRows(*(none for _ in fields(MovedRows)))
    for table in workload.table_loads():
        assert table.zipf is not None
        asked = loads.tokens * table.ids_per_token + loads.samples * table.ids_per_sample
        negatives = 0.0 if workload.tables else loads.samples * workload.negatives
        asked = asked + negatives
        drawn = float(asked.sum())
        ids = IdModel(table.rows, table.zipf, float(np.sum(negatives)) / drawn if drawn > 0 else 0.0)
        other = float(asked.sum(axis=1).mean())
        if local > 1:
            together = asked.reshape(len(asked), -1, local).sum(axis=2)
            moved, shared = (
                np.repeat(rows / local, local, axis=1)
                for rows in (ids.distinct(together), ids.shared(together, other))
            )
        elif dedup:
            moved, shared = ids.distinct(asked), ids.shared(asked, other)
        else:
            moved, shared = asked, asked * ids.shared_occurrences(other)
        of_table = {
            "ids": ids,
            "draws": local * float(asked.mean()),
            "other": other,
            "num_ranks": num_ranks,
            "even": even,
            "seed": seed,
        }
        served = moved.mean(axis=1, keepdims=True) * np.array(owner_loads(which="all", **of_table))
        served_shared = shared.mean(axis=1, keepdims=True) * np.array(owner_loads(which="shared", **of_table))
        served_shared = np.minimum(served_shared, served)
        rows = (moved, shared)
        at_owners = (served, served_shared)
        own = (
            asked,
            *rows,
            *(each * table.row_bytes for each in rows),
            *at_owners,
            *(each * table.row_bytes for each in at_owners),
        )
        sums = (getattr(total, item.name) + values for item, values in zip(fields(MovedRows), own))
        total = MovedRows(*sums)
    return total
