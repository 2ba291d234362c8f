"""Ids that have lost their rows, kept in bounded memory until somebody asks which they were."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freescale.kernels.rows import unique

MOST_TOLD = 1 << 14
"""Ids that are named between two reports, by a rank and by all of them: 128 KiB, and 0.4 MB of a log at most."""


class EvictedIds:
    """The ids that are gone: all of them, or the smallest MOST_TOLD and how many others there were.

    Args:
        is_gone: which of some ids have no row now.

    `left_out` counts those that the last `take` did not tell; one that went twice may be counted twice.
    """

    def __init__(self, is_gone: Callable[[Tensor], Tensor]) -> None:
        self._is_gone = is_gone
        self.forget()

    def forget(self) -> None:
        """None so far."""
        self._parts: list[Tensor] = []
        self._num_kept = self._num_dropped = self.left_out = 0

    def add(self, ids: Tensor) -> None:
        """These have lost their rows."""
        if not len(ids):
            return
        self._parts.append(ids)
        self._num_kept += len(ids)
        if self._num_kept > 2 * MOST_TOLD:
            self._shrink()

    def take(self) -> Tensor:
        """Those that have not come back since the last call, ascending."""
        if self._parts:
            self._shrink()
        found = self._parts[0].cpu() if self._parts else torch.zeros(0, dtype=torch.int64)
        left_out = self._num_dropped
        self.forget()
        self.left_out = left_out
        return found

    def _shrink(self) -> None:
        ids, _ = unique(torch.cat(self._parts))
        gone = ids[self._is_gone(ids)]
        self._num_dropped += max(0, len(gone) - MOST_TOLD)
        self._parts = [gone[:MOST_TOLD].clone()]
        self._num_kept = len(self._parts[0])
