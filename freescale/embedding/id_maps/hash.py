"""hash: any id to a row by a formula; different ids may share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from freescale.embedding.hashing import start_of
from freescale.embedding.id_map import TableRows
from freescale.errors import ConfigError
from freescale.kernels.rows import hashed_rows
from freescale.registry import register

if TYPE_CHECKING:
    from freescale.comm import Transport
    from freescale.embedding.sharding.sharded import ShardedEmbedding


@dataclass(frozen=True, kw_only=True)
class HashOptions:
    """Keys of a recipe.

    Args:
        rows: of the table; nothing else says how many there should be.
    """

    rows: int | None = None


@register("id_map", "hash", options=HashOptions)
class Hash:
    """Plans and builds `HashMap`."""

    learns = False

    @staticmethod
    def plan(*, num_items: int, largest_id: int, options: HashOptions) -> TableRows:
        """As many as were asked for."""
        if options.rows is None:
            raise ConfigError(
                "embedding.rows: required when embedding.id_map=hash", next_step="set embedding.rows=N"
            )
        return TableRows(options.rows)

    @staticmethod
    def build(
        *, embedding: ShardedEmbedding, table: str, channel: Transport | None, options: HashOptions
    ) -> HashMap:
        """The map of a table that has been made as planned."""
        return HashMap(embedding.plan_of(table).spec.num_rows)


class HashMap:
    """Any id to one of num_rows rows by a 64-bit hash; different ids may share a row.

    Args:
        num_rows: size of the table.
        seed: picks another hash.
    """

    learns = False

    def __init__(self, num_rows: int, *, seed: int = 0) -> None:
        self.num_rows = num_rows
        self._start = start_of(seed)

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id."""
        return hashed_rows(ids, self._start, self.num_rows)

    def state_dict(self) -> dict[str, Tensor]:
        """The map is a formula: nothing to keep."""
        return {}

    def restored(self) -> None:
        """Nothing to bring in line."""
