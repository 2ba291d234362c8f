"""What candidates see, laid out for the kernels of `candidate_attention`: tiles, and a row of bias a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints, SequenceBatch
from freescale.kernels.attention import (
    CandidatePlan,
    KeyValueBuffer,
    bias_width,
    candidate_block,
    candidate_splits,
    candidate_tiles,
    time_bucket,
)
from freescale.kernels.runtime import to_device

if TYPE_CHECKING:
    from freescale.model.serving.cached_view import KeptKeys

MOST_EVENTS = 16
"""New events a request that are tiles beside those of candidates; with more of them, tiles of one event are a waste."""


class CandidateRows:
    """Plans of a request's candidates, and the rows they share.

    Args:
        batch: new events and candidates, one sequence a user.
        caches: what is kept of each user's history.
        targets: [users] candidates of each.
        room: bounds of what plans must have room for.
        fill: plans have as many tiles as there is room for.
        device: where vectors live.
    """

    def __init__(
        self,
        batch: SequenceBatch,
        caches: KeptKeys,
        *,
        targets: Ints,
        room: KeyValueBuffer,
        fill: bool,
        device: torch.device,
    ) -> None:
        self._batch, self._caches, self._targets, self._room = batch, caches, targets, room
        self._fill, self._device = fill, device
        self.events = room.new <= MOST_EVENTS
        self._plans: dict[tuple[torch.dtype, int, bool], CandidatePlan] = {}
        self._rows: tuple[Tensor, Tensor | None] | None = None

    def plan(self, dtype: torch.dtype, heads: int, *, softmax: bool) -> CandidatePlan:
        """For queries of this type, of so many heads."""
        key = (dtype, heads, softmax)
        if key not in self._plans:
            room, caches = self._room, self._caches
            block = candidate_block(dtype, room.candidates)
            table = candidate_tiles(
                offsets=self._batch.offsets.numpy(),
                targets=self._targets,
                starts=caches.starts,
                counts=caches.counts,
                block=block,
                room=room,
                fill=self._fill,
                events=self.events,
            )
            splits = candidate_splits(len(table) * heads, room.cached, device=self._device, softmax=softmax)
            tiles = to_device(table, device=self._device)[0]
            self._plans[key] = CandidatePlan(tiles, *self.rows(), block, splits)
        return self._plans[key]

    def fill_from(self, other: CandidateRows) -> None:
        """Take over the tables of another request with the same room, in the memory that recorded kernels read."""
        for (dtype, heads, softmax), plan in self._plans.items():
            theirs = other.plan(dtype, heads, softmax=softmax)
            plan.tiles.copy_(theirs.tiles)
        for mine, other_rows in zip(self.rows(), other.rows()):
            if mine is not None and other_rows is not None:
                mine[: len(other_rows)].copy_(other_rows)

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Distances and, where there are times, buckets of time of every key, see `CandidatePlan`."""
        if self._rows is None:
            self._rows = self._made()
        return self._rows

    def _made(self) -> tuple[Tensor, Tensor | None]:
        room, caches, users = self._room, self._caches, len(self._batch)
        offsets = self._batch.offsets.numpy()
        cached = np.arange(room.cached)
        old = np.where(cached < caches.counts[:, None], caches.starts[:, None] + cached, 0)
        new = np.minimum(offsets[:-1, None] + np.arange(room.new), max(int(offsets[-1]) - 1, 0))
        # Rows of a user: new events one after the other, then the last token, which stands for all candidates.
        last = np.maximum(offsets[1:, None] - 1, 0)
        own = np.concatenate([new, last], axis=1) if self.events else last
        behind = np.diff(offsets) - self._targets
        inside = np.arange(own.shape[1])
        places = np.minimum(inside, behind[:, None]) if self.events else behind[:, None]
        if self.events:
            places[:, -1] = behind
        place = caches.ends[:, None] + places
        new_place = caches.ends[:, None] + np.arange(room.new)
        old_at, new_at, own_at, row_place, key_place = to_device(
            old, new, own, place, new_place, device=self._device
        )
        width = bias_width(room)
        positions = caches.positions
        before = positions[old_at] if len(positions) else old_at
        keys = torch.cat([before, key_place], dim=1)
        far = (row_place[:, :, None] - keys[:, None, :]).clamp_(min=0)
        distances = torch.zeros(users, own.shape[1], width, dtype=torch.int32, device=self._device)
        distances[:, :, : room.cached + room.new] = far
        if "time" not in self._batch.tokens:
            return distances.flatten(0, 1), None
        asked, times = (self._batch.tokens[name].to(self._device) for name in ("target_time", "time"))
        if not len(times):
            return distances.flatten(0, 1), torch.zeros_like(distances, dtype=torch.uint8).flatten(0, 1)
        kept = caches.times
        then = torch.zeros_like(old_at) if kept is None or not len(kept) else kept[old_at]
        happened = torch.cat([then, times[new_at]], dim=1)
        at = asked[own_at]
        gaps = torch.cat([at[:, :, None] - happened[:, None, :], (at - times[own_at])[:, :, None]], dim=2)
        buckets = torch.zeros(distances.shape, dtype=torch.uint8, device=self._device)
        buckets[:, :, : gaps.shape[2]] = time_bucket(gaps).to(torch.uint8)
        return distances.flatten(0, 1), buckets.flatten(0, 1)
