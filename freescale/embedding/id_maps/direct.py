"""direct: a row for every number from 0 to the largest id; ids that are no such numbers are numbered before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from freescale.embedding.id_map import TableRows
from freescale.errors import DataError
from freescale.kernels.rows import scattered_rows
from freescale.registry import register

if TYPE_CHECKING:
    from freescale.comm import Transport
    from freescale.embedding.sharding.sharded import ShardedEmbedding


@dataclass(frozen=True, kw_only=True)
class DirectOptions:
    """Keys of a recipe.

    Args:
        rows: of the table; None: the largest id + 1.
    """

    rows: int | None = None


@register("id_map", "direct", options=DirectOptions)
class Direct:
    """Plans and builds `DirectMap`."""

    learns = False
    dense = True

    @staticmethod
    def plan(*, num_items: int, largest_id: int, options: DirectOptions) -> TableRows:
        """One row for every number up to the largest."""
        return TableRows(DirectMap(options.rows or largest_id + 1).num_rows)

    @staticmethod
    def build(
        *, embedding: ShardedEmbedding, table: str, channel: Transport | None, options: DirectOptions
    ) -> DirectMap:
        """The map of a table that has been made as planned."""
        return DirectMap(embedding.plan_of(table).spec.num_rows)


class DirectMap:
    """One row an id, for ids 0 .. num_rows - 1, scattered so that neighbouring ids live on different ranks.

    Small ids are often the popular ones. Rows are sharded in contiguous blocks; multiplying by a number near the
    golden section of num_rows and prime to it spreads any run of ids evenly over the blocks, and stays one-to-one.

    Args:
        num_rows: largest id + 1.
    """

    learns = False

    def __init__(self, num_rows: int) -> None:
        if not 0 < num_rows < 2**31:
            raise DataError(
                "embedding.id_map=direct needs one row for every id up to the largest",
                got=f"{num_rows:,} rows",
                allowed=f"1 to {2**31 - 1:,}",
                next_step="use embedding.id_map=hash embedding.rows=N for sparse or very large ids",
            )
        self.num_rows = num_rows
        self._factor = next(
            f
            for f in range(max(1, int(num_rows * 0.6180339887)), 2 * num_rows + 2)
            if math.gcd(f, num_rows) == 1
        )

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id; an id outside the table is refused here, where it still has its raw name."""
        rows, bad = scattered_rows(ids, self._factor, self.num_rows)
        if len(bad):
            raise DataError(
                "an id lies outside the table",
                got=f"id {int(bad[0])}",
                allowed=f"0 to {self.num_rows - 1}",
                next_step="set embedding.rows to the largest id + 1, or use embedding.id_map=hash",
            )
        return rows

    def state_dict(self) -> dict[str, Tensor]:
        """The map is a formula: nothing to keep."""
        return {}

    def restored(self) -> None:
        """Nothing to bring in line."""
