"""NumberedMap: ids of any kind before a map that wants numbers from 0 on; those that occur are numbered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.embedding.id_map import IdMap
from freescale.errors import DataError
from freescale.kernels.rows import find_sorted

# A table up to this many rows is no waste worth a change of what it holds.
_SMALL_TABLE = 1 << 24
_MOST_ROWS_PER_ID = 8


def needs_numbers(ids: npt.NDArray[np.int64], *, rows: int | None) -> bool:
    """Whether a row for every number up to the largest id would be impossible, or a waste.

    Args:
        ids: those that occur, ascending.
        rows: of the table, where the user has said how many there are to be.
    """
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= 2**31 - 1:
        return True
    return rows is None and last >= max(_SMALL_TABLE, _MOST_ROWS_PER_ID * len(ids))


class NumberedMap:
    """The id's number among those that occur, then the row another map has for that number.

    Its numbers are part of what was learnt: they are kept in checkpoints, so that a run that goes on with other data
    refuses ids that had no row then, instead of giving them somebody else's.

    Args:
        ids: those that occur, ascending.
        inner: has a row for each number from 0 to len(ids) - 1.
    """

    learns = False

    def __init__(self, ids: npt.NDArray[np.int64], inner: IdMap) -> None:
        self._ids = torch.from_numpy(np.array(ids, dtype=np.int64))
        self._inner = inner
        self._elsewhere: dict[torch.device, Tensor] = {}
        self.num_rows = inner.num_rows

    @property
    def ids(self) -> Tensor:
        """Those that have a number, ascending."""
        return self._ids

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id; one that has no number is refused."""
        known = self._on(ids.device)
        numbers, found = find_sorted(known, ids.long())
        if not bool(found.all()):
            raise DataError(
                "an id has no row: embedding.id_map=direct numbers the ids that occur in the data it is trained on",
                got=f"id {int(ids[~found][0])}",
                allowed=f"the {len(known):,} ids of that data",
                next_step="use embedding.id_map=zero_collision where new ids come later",
            )
        return self._inner.rows(numbers, step=step)

    def state_dict(self) -> dict[str, Tensor]:
        """The ids, by number, and what the other map keeps."""
        return {"numbered_ids": self._ids, **self._inner.state_dict()}

    def restored(self) -> None:
        """The ids are those of a checkpoint now."""
        self._elsewhere = {}
        self._inner.restored()

    def _on(self, device: torch.device) -> Tensor:
        if device == self._ids.device:
            return self._ids
        if device not in self._elsewhere:
            self._elsewhere[device] = self._ids.to(device)
        return self._elsewhere[device]
