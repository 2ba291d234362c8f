"""CachedView: new tokens of several users behind the summaries kept of their histories.

New tokens see all summaries of their own user and each other as far as they came before; candidates of a request, which
stand at one position behind the new events, see no other candidate. On a GPU one kernel a layer
reads the summaries where they lie. Elsewhere few queries meet few keys in plain batched products over padded users.
Distances and times come from what each cache says of its tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.jagged import group_index
from freescale.kernels.attention import (
    CachedPlan,
    KeyValueBuffer,
    block_for,
    cached_attention,
    can_fuse_cached,
    candidate_attention,
    for_every_head,
    tile_table,
    time_bucket,
)
from freescale.kernels.runtime import to_device
from freescale.model.views.candidate_rows import CandidateRows
from freescale.model.views.kept_keys import KeptKeys
from freescale.model.views.padded_heads import PaddedHeads, Padding
from freescale.model.views.view import KeepKeys


class CachedView:
    """Attention of new tokens over the cached and over each other.

    Args:
        batch: the new tokens, one sequence a user; "time" and "target_time" where encoders use time.
        caches: what is kept of each user's history.
        device: where the vectors of the new tokens live.
        keep: given the keys and values of the new tokens, layer by layer.
        fused: take the kernel; by default where it can run.
        room: lay the kernel's tables out for more users and tokens than there are.

    Candidates of a request share one time, as they share one position: by the kernels that of the last counts for all.
    """

    real_tokens: Tensor | None = None
    """Nobody counts tokens in serving."""

    def __init__(
        self,
        batch: SequenceBatch,
        caches: KeptKeys,
        *,
        device: torch.device,
        keep: KeepKeys | None = None,
        fused: bool | None = None,
        room: KeyValueBuffer | None = None,
    ) -> None:
        self._batch, self._caches, self._keep, self._device, self._fused = batch, caches, keep, device, fused
        lengths = batch.lengths.numpy()
        self._fill = room is not None
        self._targets = np.zeros_like(lengths) if batch.targets is None else batch.targets.numpy()
        self._room = room or KeyValueBuffer(
            len(lengths),
            int((lengths - self._targets).max(initial=0)),
            int(caches.counts.max(initial=0)),
            int(self._targets.max(initial=0)),
        )
        user, number = group_index(lengths)
        most = batch.num_tokens if room is None else room.users * (room.new + room.candidates)
        positions = np.zeros(most, np.int64)
        number = np.minimum(number, (lengths - self._targets)[user])
        positions[: batch.num_tokens] = number + caches.ends[user]
        self.positions = to_device(positions, device=device)[0]
        self._plans: dict[torch.dtype, CachedPlan] = {}
        self._candidates = None
        if self._room.candidates:
            self._candidates = CandidateRows(
                batch, caches, targets=self._targets, room=self._room, fill=self._fill, device=device
            )

    def plan(self, dtype: torch.dtype) -> CachedPlan:
        """Where the kernel finds everything of new events, for queries of this type."""
        if dtype not in self._plans:
            block = block_for(dtype, self._room.new)
            table = tile_table(
                offsets=self._batch.offsets.numpy(),
                starts=self._caches.starts,
                counts=self._caches.counts,
                ends=self._caches.ends,
                block=block,
                room=self._room,
                fill=self._fill,
                targets=self._targets,
            )
            tiles = to_device(table, device=self._device)[0]
            self._plans[dtype] = CachedPlan(tiles, self._caches.positions, block)
        return self._plans[dtype]

    def fill_from(self, other: CachedView) -> None:
        """Take over the tables of another request with the same room, in the memory that recorded kernels read."""
        self.positions.copy_(other.positions)
        for dtype, plan in self._plans.items():
            plan.tiles.copy_(other.plan(dtype).tiles)
        if "byte_buckets" in self.__dict__:
            self.byte_buckets[: len(other.byte_buckets)].copy_(other.byte_buckets)
        if self._candidates is not None and other._candidates is not None:
            self._candidates.fill_from(other._candidates)

    def fusable_batch(self, *, time: bool) -> None:
        """None: keys and values come from caches."""

    def silu(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THV: Tensor,
        *,
        layer: int,
        scale: float,
        position_bias: Tensor | None = None,
        time_bias: Tensor | None = None,
    ) -> Tensor:
        """Scale * SiLU(q k^T + bias) v."""
        if self._by_kernel(layer, q_THD, k_THD, v_THV):
            tables = {"position_bias": position_bias, "time_bias": time_bias}
            return self._attend(layer, q_THD, k_THD, v_THV, alpha=1.0, scale=scale, **tables)
        with torch.autocast(q_THD.device.type, enabled=False):
            padded = self._padded(layer, q_THD, k_THD, v_THV)
            scores, q = padded.scores(), padded.queries
            if position_bias is not None:
                scores = scores + position_bias.to(q.dtype)[self._distances][:, None]
            if time_bias is not None:
                scores = scores + time_bias.to(q.dtype)[self._buckets][:, None]
            weights = torch.nn.functional.silu(scores).masked_fill(self._hidden, 0.0) * scale
            return self._jagged(padded.weighted(weights)).to(v_THV.dtype)

    def softmax(self, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, *, layer: int, scale: float) -> Tensor:
        """Values weighted by the softmax of scale * q k^T."""
        if self._by_kernel(layer, q_THD, k_THD, v_THV):
            return self._attend(layer, q_THD, k_THD, v_THV, alpha=scale, scale=None)
        with torch.autocast(q_THD.device.type, enabled=False):
            padded = self._padded(layer, q_THD, k_THD, v_THV)
            scores = (padded.scores() * scale).masked_fill(self._hidden, float("-inf"))
            return self._jagged(padded.weighted(scores.softmax(-1))).to(v_THV.dtype)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **options: Any
    ) -> Tensor:
        """By the kernels: candidates and a few new events by theirs, else new events by those of events."""
        out = v.new_empty(*q.shape[:2], v.shape[2])
        kept, rows = self._kept(layer, k, v), self._candidates
        if rows is None or not rows.events:
            timed = options.get("time_bias") is not None
            buckets = self.byte_buckets if timed else None
            cached_attention(q, k, v, *kept, self.plan(q.dtype), out, scale=scale, buckets=buckets, **options)
        if rows is not None:
            plan = rows.plan(q.dtype, q.shape[1], softmax=scale is None)
            candidate_attention(q, k, v, *kept, plan, out, scale=scale, **options)
        return out

    def _by_kernel(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> bool:
        if self._keep is not None:
            self._keep(layer, k, v)
        return can_fuse_cached(q, v) if self._fused is None else self._fused

    def _kept(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Cached keys and values of a layer; where nobody has any, something of the right kind that is not read."""
        caches = self._caches
        return (caches.keys[layer], caches.values[layer]) if len(caches.keys) else (k, v)

    def _padded(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> PaddedHeads:
        """Queries, keys and values with users as equally long rows, in float32 or better."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        queries, own_keys, own_values = (self._new.pad(x.to(wide)) for x in (q, k, v))
        keys, values = (self._events.pad(x.to(wide)) for x in (k, v))
        if self._old.longest:
            old = (self._old.pad(x).to(wide) for x in self._kept(layer, k, v))
            keys, values = (torch.cat(both, dim=1) for both in zip(old, (keys, values)))
        shared = (for_every_head(x, queries.shape[-2]) for x in (keys, values, own_keys, own_values))
        return PaddedHeads(*(x.transpose(1, 2) for x in (queries, *shared)))

    def _jagged(self, x: Tensor) -> Tensor:
        """[users, heads, longest, width] -> [T, heads, width]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self._new.slots)

    @cached_property
    def _new(self) -> Padding:
        lengths = self._batch.lengths.numpy()
        longest = self._room.new + self._room.candidates if self._fill else int(lengths.max(initial=0))
        return Padding.of(self._batch.offsets.numpy()[:-1], lengths, longest, self._device)

    @cached_property
    def _events(self) -> Padding:
        events = self._batch.lengths.numpy() - self._targets
        return Padding.of(self._batch.offsets.numpy()[:-1], events, self._room.new, self._device)

    @cached_property
    def _old(self) -> Padding:
        return Padding.of(self._caches.starts, self._caches.counts, self._room.cached, self._device)

    @cached_property
    def _hidden(self) -> Tensor:
        """[users, 1, queries, keys], true for padding and for events that do not come before; never for itself."""
        order = torch.arange(max(self._new.longest, self._events.longest), device=self._device)
        later = order[: self._events.longest] >= order[: self._new.longest, None]
        later = later | self._events.empty[:, None, :]
        before = self._old.empty[:, None, :].expand(-1, self._new.longest, -1)
        return torch.nn.functional.pad(torch.cat([before, later], dim=2), (0, 1), value=False)[:, None]

    @cached_property
    def _distances(self) -> Tensor:
        """[users, queries, keys] how far back a key stands; the last is the query's own."""
        positions, events = self._new.pad(self.positions), self._events.pad(self.positions)
        keys = torch.cat([self._old.pad(self._caches.positions), events], dim=1)
        far = (positions[:, :, None] - keys[:, None, :]).clamp(min=0)
        return torch.nn.functional.pad(far, (0, 1))

    @cached_property
    def _buckets(self) -> Tensor:
        """[users, queries, keys] bucket of the time between them; the last is that of its own time."""
        asked, time = (self._new.pad(self._batch.tokens[name]) for name in ("target_time", "time"))
        keys = self._key_times(self._events.pad(self._batch.tokens["time"]))
        gaps = torch.cat([asked[:, :, None] - keys[:, None, :], (asked - time)[:, :, None]], dim=2)
        return time_bucket(gaps)

    @cached_property
    def byte_buckets(self) -> Tensor:
        """[users, new events, cached tokens and new events] the same as the kernel of events reads them."""
        tokens = self._batch.tokens
        asked, time = (self._events.pad(tokens[name]) for name in ("target_time", "time"))
        return time_bucket(asked[:, :, None] - self._key_times(time)[:, None, :]).to(torch.uint8)

    def _key_times(self, time: Tensor) -> Tensor:
        """[users, keys] when each happened; `time` of the new ones."""
        positions, times = self._caches.positions, self._caches.times
        old = torch.zeros_like(positions) if times is None else times
        return torch.cat([self._old.pad(old), time], dim=1)
