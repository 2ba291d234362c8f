"""From raw ids to table rows."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from freescale.embedding.hashing import keyed
from freescale.errors import DataError

_WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def check_whole(numbers: Tensor, *, what: str) -> None:
    """Refuse ids or rows that are no whole numbers: cut off, different ones would share a row."""
    if isinstance(numbers, Tensor) and (numbers.dtype in _WHOLE or not numbers.numel()):
        return
    raise DataError(
        f"{what} must be whole numbers in a tensor",
        got=numbers.dtype if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}",
        allowed="int64, or a smaller integer type",
        next_step=f"torch.tensor({what}, dtype=torch.int64)",
    )


class IdMap(Protocol):
    """Turns raw 64-bit ids into rows of a table."""

    num_rows: int

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id, same shape. With the number of a training step, new ids may get rows; without, none does."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must keep, in place."""

    def restored(self) -> None:
        """The tensors of `state_dict` were filled from a checkpoint."""


class DirectMap:
    """One row an id, for ids 0 .. num_rows - 1, scattered so that neighbouring ids live on different ranks.

    Small ids are often the popular ones. Rows are sharded in contiguous blocks; multiplying by a number near the
    golden section of num_rows and prime to it spreads any run of ids evenly over the blocks, and stays one-to-one.

    Args:
        num_rows: largest id + 1.
    """

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
        inside = (ids >= 0) & (ids < self.num_rows)
        if not bool(inside.all()):
            bad = int(ids[~inside].flatten()[0])
            raise DataError(
                "an id lies outside the table",
                got=f"id {bad}",
                allowed=f"0 to {self.num_rows - 1}",
                next_step="set embedding.rows to the largest id + 1, or use embedding.id_map=hash",
            )
        return (ids.long() * self._factor) % self.num_rows

    def state_dict(self) -> dict[str, Tensor]:
        """The map is a formula: nothing to keep."""
        return {}

    def restored(self) -> None:
        """Nothing to bring in line."""


class HashMap:
    """Any id to one of num_rows rows by a 64-bit hash; different ids may share a row.

    Args:
        num_rows: size of the table.
        seed: picks another hash.
    """

    def __init__(self, num_rows: int, *, seed: int = 0) -> None:
        self.num_rows = num_rows
        self._seed = seed

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id."""
        return keyed(self._seed, ids).remainder(self.num_rows)

    def state_dict(self) -> dict[str, Tensor]:
        """The map is a formula: nothing to keep."""
        return {}

    def restored(self) -> None:
        """Nothing to bring in line."""
