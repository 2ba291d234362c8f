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
    from freescale.model.views.kept_keys import KeptKeys

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
        """Worked out on the device from a few numbers a user: what is sent there does not grow with histories."""
        room, caches, users = self._room, self._caches, len(self._batch)
        offsets, total = self._batch.offsets.numpy(), max(self._batch.num_tokens - 1, 0)
        behind = np.diff(offsets) - self._targets
        facts = np.stack([offsets[:-1], offsets[1:], behind, caches.starts, caches.counts, caches.ends])
        first, end, events, start, count, base = (
            to_device(facts, device=self._device)[0].unsqueeze(-1).unbind(0)
        )
        number, cached = (torch.arange(n, device=self._device) for n in (room.new, room.cached))
        old_at = torch.where(cached < count, start + cached, 0)
        new_at = (first + number).clamp(max=total)
        # Rows of a user: new events one after the other, then the last token, which stands for all candidates.
        own_at, place = (end - 1).clamp(min=0), base + events
        if self.events:
            own_at, place = torch.cat([new_at, own_at], dim=1), torch.cat([base + number, place], dim=1)
        before = caches.positions[old_at] if len(caches.positions) else old_at
        keys = torch.cat([before, base + number], dim=1)
        distances = torch.zeros(
            users, own_at.shape[1], bias_width(room), dtype=torch.int32, device=self._device
        )
        distances[:, :, : keys.shape[1]] = (place[:, :, None] - keys[:, None, :]).clamp_(min=0)
        if "time" not in self._batch.tokens:
            return distances.flatten(0, 1), None
        buckets = torch.zeros(distances.shape, dtype=torch.uint8, device=self._device)
        asked, times = (self._batch.tokens[name].to(self._device) for name in ("target_time", "time"))
        if len(times):
            kept = caches.times
            then = torch.zeros_like(old_at) if kept is None or not len(kept) else kept[old_at]
            at, own = asked[own_at], times[own_at]
            happened = torch.cat([then, times[new_at]], dim=1)
            gaps = torch.cat([at[:, :, None] - happened[:, None, :], (at - own)[:, :, None]], dim=2)
            buckets[:, :, : gaps.shape[2]] = time_bucket(gaps).to(torch.uint8)
        return distances.flatten(0, 1), buckets.flatten(0, 1)
