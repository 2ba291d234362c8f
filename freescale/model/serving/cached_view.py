"""CachedView: new tokens of several users behind the summaries kept of their histories.

New tokens see all summaries of their own user and each other as far as they came before; candidates of a request, which
stand at one position behind the new events, see no other candidate. On a GPU one kernel a layer
reads the summaries where they lie. Elsewhere few queries meet few keys in plain batched products over padded users.
Distances and times come from what each cache says of its tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints, SequenceBatch
from freescale.kernels.attention import (
    CachedPlan,
    KeyValueBuffer,
    block_for,
    cached_attention,
    can_fuse_cached,
    candidate_attention,
    for_every_head,
    group_index,
    tile_table,
    time_bucket,
)
from freescale.kernels.runtime import to_device
from freescale.model.serving.candidate_rows import CandidateRows
from freescale.model.views import KeepKeys


class KeptKeys(Protocol):
    """Keys and values kept of several users, side by side in one store; `PackedCaches` and `HistoryCaches` are such."""

    @property
    def keys(self) -> Tensor:
        """[layers, N, heads, width]; empty where nobody has any."""

    @property
    def values(self) -> Tensor:
        """The same; their width may differ."""

    @property
    def positions(self) -> Tensor:
        """[N] position of each."""

    @property
    def times(self) -> Tensor | None:
        """[N] time stamp of each."""

    @property
    def starts(self) -> Ints:
        """[users] where those of each begin."""

    @property
    def counts(self) -> Ints:
        """[users] how many each has."""

    @property
    def ends(self) -> Ints:
        """[users] position of the token that follows."""


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
            q, k, v = self._padded(layer, q_THD, k_THD, v_THV)
            scores = q @ k.transpose(2, 3)
            if position_bias is not None:
                scores = scores + position_bias.to(q.dtype)[self._distances][:, None]
            if time_bias is not None:
                scores = scores + time_bias.to(q.dtype)[self._buckets][:, None]
            weights = torch.nn.functional.silu(scores).masked_fill(self._hidden, 0.0) * scale
            return self._jagged(weights @ v).to(v_THV.dtype)

    def softmax(self, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, *, layer: int, scale: float) -> Tensor:
        """Values weighted by the softmax of scale * q k^T."""
        if self._by_kernel(layer, q_THD, k_THD, v_THV):
            return self._attend(layer, q_THD, k_THD, v_THV, alpha=scale, scale=None)
        with torch.autocast(q_THD.device.type, enabled=False):
            q, k, v = self._padded(layer, q_THD, k_THD, v_THV)
            scores = (q @ k.transpose(2, 3) * scale).masked_fill(self._hidden, float("-inf"))
            return self._jagged(scores.softmax(-1) @ v).to(v_THV.dtype)

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

    def _padded(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """[users, heads, tokens, width] of queries, and of cached and new keys and values, in float32 or better."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        queries, keys, values = (self._new.pad(x.to(wide)) for x in (q, k, v))
        if self._old.longest:
            old = (self._old.pad(x).to(wide) for x in self._kept(layer, k, v))
            keys, values = (torch.cat(both, dim=1) for both in zip(old, (keys, values)))
        return [
            x.transpose(1, 2)
            for x in (queries, *(for_every_head(x, queries.shape[-2]) for x in (keys, values)))
        ]

    def _jagged(self, x: Tensor) -> Tensor:
        """[users, heads, longest, width] -> [T, heads, width]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self._new.slots)

    @cached_property
    def _new(self) -> _Padding:
        lengths = self._batch.lengths.numpy()
        longest = self._room.new + self._room.candidates if self._fill else int(lengths.max(initial=0))
        return _Padding.of(self._batch.offsets.numpy()[:-1], lengths, longest, self._device)

    @cached_property
    def _events(self) -> _Padding:
        events = self._batch.lengths.numpy() - self._targets
        return _Padding.of(self._batch.offsets.numpy()[:-1], events, self._room.new, self._device)

    @cached_property
    def _old(self) -> _Padding:
        return _Padding.of(self._caches.starts, self._caches.counts, self._room.cached, self._device)

    @cached_property
    def _hidden(self) -> Tensor:
        """[users, 1, queries, keys], true for padding and for what comes later."""
        order = torch.arange(self._new.longest, device=self._device)
        later = order > order[:, None]
        if self._targets.any():
            (events,) = to_device(self._batch.lengths.numpy() - self._targets, device=self._device)
            # Of the targets a token sees itself alone.
            later = later | ((order >= events[:, None, None]) & (order != order[:, None]))
        later = later | self._new.empty[:, None, :]
        before = self._old.empty[:, None, :].expand(-1, self._new.longest, -1)
        return torch.cat([before, later], dim=2)[:, None]

    @cached_property
    def _distances(self) -> Tensor:
        """[users, queries, keys] how far back a key stands."""
        positions = self._new.pad(self.positions)
        keys = torch.cat([self._old.pad(self._caches.positions), positions], dim=1)
        return (positions[:, :, None] - keys[:, None, :]).clamp(min=0)

    @cached_property
    def _buckets(self) -> Tensor:
        """[users, queries, keys] bucket of the time between them."""
        asked, time = (self._new.pad(self._batch.tokens[name]) for name in ("target_time", "time"))
        return time_bucket(asked[:, :, None] - self._key_times(time)[:, None, :])

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


class _Padding(NamedTuple):
    """Tokens of several users as equally long rows.

    Args:
        source: [users * longest] the token of each slot; any where there is none.
        slots: [tokens of all users] the slot of each token.
        empty: [users, longest] slots without a token.
        longest: slots of a user.
    """

    source: Tensor
    slots: Tensor
    empty: Tensor
    longest: int

    @staticmethod
    def of(starts: Ints, lengths: Ints, longest: int, device: torch.device) -> _Padding:
        """For users whose tokens begin at `starts`."""
        empty = np.arange(longest) >= lengths[:, None]
        source = np.where(empty, 0, starts[:, None] + np.arange(longest)).ravel()
        tables = to_device(source, np.flatnonzero(~empty.ravel()), empty, device=device)
        return _Padding(tables[0], tables[1], tables[2], longest)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [users, longest, ...]."""
        return x.index_select(0, self.source).view(*self.empty.shape, *x.shape[1:])
