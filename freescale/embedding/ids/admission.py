"""Who may have a row: ids seen in enough batches. Until then they share the overflow rows.

Both filters keep their counts by bucket, so they move between ranks with the buckets they belong to. Counts are
batches, not occurrences: how often an id comes within one global batch depends on nothing but the data, but how many
ranks ask for it does not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from freescale.embedding.hashing import keyed
from freescale.errors import ConfigError
from freescale.kernels import id_table
from freescale.kernels.id_table import EMPTY, SlotLayout

_HASHES = 4
LONG_AGO = -(2**31)


class Admission(Protocol):
    """Counts ids that have no row."""

    min_batches: int

    def admitted(self, ids: Tensor, *, batch: int) -> Tensor:
        """Count unique ids, ascending, once more; True where one has been seen often enough."""

    def state(self) -> dict[str, Tensor]:
        """Tensors whose first dimension is the buckets held here."""

    def restored(self) -> None:
        """The tensors of `state` were filled from a checkpoint."""


class CountMin:
    """Estimated counts in little memory: never too low, now and then too high.

    Args:
        layout: buckets held here.
        min_batches: batches an id must be seen in.
        device: where the counts live.
    """

    def __init__(self, layout: SlotLayout, *, min_batches: int, device: torch.device | str = "cpu") -> None:
        self.min_batches = _checked(min_batches)
        self._layout = layout
        self._width = max(64, layout.bucket_slots)
        shape = (layout.held_buckets, _HASHES * self._width)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)

    def admitted(self, ids: Tensor, *, batch: int) -> Tensor:
        """Count unique ids once more; True where the smallest of an id's counters says often enough."""
        bucket = self._layout.bucket(ids) - self._layout.first_bucket
        cells = torch.stack(
            [keyed(n, ids).remainder(self._width) + n * self._width for n in range(_HASHES)], 1
        )
        flat = (bucket[:, None] * self._counts.shape[1] + cells).flatten()
        counts = self._counts.view(-1)
        counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return counts[flat].view(-1, _HASHES).amin(1) >= self.min_batches

    def state(self) -> dict[str, Tensor]:
        """The counters."""
        return {"admission_counts": self._counts}

    def restored(self) -> None:
        """Nothing is derived from the counters."""


class ExactCounts:
    """Exact counts in a waiting room as large as the table (28 bytes a row); who was not seen for longest leaves first.

    Args:
        layout: buckets held here.
        min_batches: batches an id must be seen in.
        device: where the counts live.
    """

    def __init__(self, layout: SlotLayout, *, min_batches: int, device: torch.device | str = "cpu") -> None:
        self.min_batches = _checked(min_batches)
        self._layout = layout
        rows = layout.held_rows
        self._identity = torch.full((rows,), EMPTY, dtype=torch.int64, device=device)
        self._count = torch.zeros(rows, dtype=torch.int64, device=device)
        self._used = torch.full((rows,), LONG_AGO, dtype=torch.int32, device=device)
        self._seen = torch.full((rows,), LONG_AGO, dtype=torch.int64, device=device)
        self._occupied_bits = id_table.occupied_bits(self._identity)

    def admitted(self, ids: Tensor, *, batch: int) -> Tensor:
        """Count unique ids, ascending, once more; True where one was seen often enough."""
        rows, new, _ = id_table.claim(ids, self._identity, self._occupied_bits, self._layout)
        self._count[new] = 0
        self._see(rows[rows >= 0], batch)
        outside = (rows < 0).nonzero().flatten()
        taken, _ = id_table.evict(
            ids[outside],
            self._identity,
            self._used,
            self._seen,
            self._layout,
            now=batch,
            safe_from=batch,
            threshold=batch,
            blank=batch,
        )
        rows[outside] = taken
        taken = taken[taken >= 0]
        self._count[taken] = 0
        self._see(taken, batch)
        return (self._count[rows.clamp(min=0)] >= self.min_batches) & (rows >= 0)

    def state(self) -> dict[str, Tensor]:
        """Who waits, since when, and how often each was seen."""
        shape = (self._layout.held_buckets, self._layout.bucket_rows)
        return {
            "waiting_identity": self._identity.view(shape),
            "waiting_count": self._count.view(shape),
            "waiting_used": self._used.view(shape),
            "waiting_seen": self._seen.view(shape),
        }

    def restored(self) -> None:
        """The bits follow from the ids."""
        self._occupied_bits = id_table.occupied_bits(self._identity)

    def _see(self, rows: Tensor, batch: int) -> None:
        self._count[rows] += 1
        self._used[rows] = batch
        self._seen[rows] = batch


def make_admission(
    kind: str, layout: SlotLayout, *, min_batches: int, device: torch.device | str = "cpu"
) -> Admission | None:
    """The filter of that name; none is needed when the first batch is enough."""
    if min_batches == 1:
        return None
    if kind == "count_min":
        return CountMin(layout, min_batches=min_batches, device=device)
    if kind == "exact":
        return ExactCounts(layout, min_batches=min_batches, device=device)
    raise ConfigError("unknown admission filter", got=kind, allowed="count_min, exact")


def _checked(min_batches: int) -> int:
    if min_batches < 1:
        raise ConfigError("ids are admitted after some batches", got=min_batches, allowed="1 or more")
    return min_batches
