"""How many rows of all tables a step moves, and how many bytes they are: expected values, by step and rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.id_traffic import IdModel
from freescale.sim.costs.plans import Loads
from freescale.sim.inputs.workload import Workload

ID_BYTES = 8
_MASK_BYTES = 0.25


@dataclass(frozen=True, eq=False)
class MovedRows:
    """[steps, ranks] over all tables.

    Args:
        asked: ids asked for.
        moved: rows that travel each way.
        shared: those among them that the next batch needs, too.
        moved_bytes: of `moved`, one way.
        shared_bytes: of `shared`.
    """

    asked: FloatArray
    moved: FloatArray
    shared: FloatArray
    moved_bytes: FloatArray
    shared_bytes: FloatArray

    @property
    def alone(self) -> FloatArray:
        """Rows that the next batch does not need."""
        return np.maximum(self.moved - self.shared, 0.0)

    @property
    def alone_bytes(self) -> FloatArray:
        """Of `alone`."""
        return np.maximum(self.moved_bytes - self.shared_bytes, 0.0)

    def bytes_of_a_rank(self, num_ranks: int, *, prioritized: bool) -> tuple[float, float]:
        """Bytes a step that one rank sends and receives while it stands still, and under compute; means."""
        away = 2 * (num_ranks - 1) / num_ranks
        moved, shared = (2 * away * float(each.mean()) for each in (self.moved_bytes, self.shared_bytes))
        ids = away * float(self.moved.mean())
        if not prioritized:
            return moved + ids * ID_BYTES, 0.0
        return shared, moved - shared + ids * (ID_BYTES + _MASK_BYTES)


def moved_rows(workload: Workload, loads: Loads, *, dedup: bool) -> MovedRows:
    """All tables together, since one exchange moves their rows; without `dedup` every occurrence travels."""
    none = np.zeros_like(loads.tokens, dtype=np.float64)
    total = MovedRows(none, none, none, none, none)
    for table in workload.table_loads():
        assert table.zipf is not None
        ids = IdModel(table.rows, table.zipf)
        asked = loads.tokens * table.ids_per_token + loads.samples * table.ids_per_sample
        other = float(asked.sum(axis=1).mean())
        if dedup:
            moved, shared = ids.distinct(asked), ids.shared(asked, other)
        else:
            moved, shared = asked, asked * ids.shared_occurrences(other)
        own = (asked, moved, shared, moved * table.row_bytes, shared * table.row_bytes)
        sums = (getattr(total, item.name) + values for item, values in zip(fields(MovedRows), own))
        total = MovedRows(*sums)
    return total
