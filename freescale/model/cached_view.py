"""CachedView: new tokens of several users behind the summaries kept of their histories.

New tokens see all summaries of their own user and each other as far as they came before. Few queries meet few keys, so
this is plain batched products over padded users; distances and times come from what each cache says of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.data.segment_rule import Ints
from freescale.data.sequence_batch import SequenceBatch
from freescale.kernels.reference import for_every_head, time_bucket
from freescale.model.token_cache import TokenCache
from freescale.model.views import KeepKeys


class CachedView:
    """Attention of new tokens over the cached and over each other.

    Args:
        batch: the new tokens, one sequence a user; "time" and "target_time" where encoders use time.
        caches: what is kept of each user's history; None where there is none.
        device: where the vectors of the new tokens live.
        keep: given the keys and values of the new tokens, layer by layer.
    """

    def __init__(
        self,
        batch: SequenceBatch,
        caches: Sequence[TokenCache | None],
        *,
        device: torch.device,
        keep: KeepKeys | None = None,
    ) -> None:
        self._batch, self._keep, self._device = batch, keep, device
        lengths = batch.lengths.numpy()
        self._users, self._longest = len(lengths), int(lengths.max(initial=0))
        user = np.repeat(np.arange(len(lengths)), lengths)
        number = np.arange(batch.num_tokens) - np.repeat(batch.offsets.numpy()[:-1], lengths)
        start = np.array([0 if cache is None else cache.end for cache in caches], np.int64)
        self.places = self._on_device(number + start[user])
        # Users with equally many new tokens, the usual case, need no padding.
        even = bool((lengths == self._longest).all())
        self._slots = None if even else self._on_device(user * self._longest + number)
        self._cached = _Padded(caches, self._device)
        self._hidden = self._make_hidden(lengths, [0 if c is None else c.keys.shape[1] for c in caches])
        self._distance: Tensor | None = None
        self._bucket: Tensor | None = None

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
        with torch.autocast(q_THD.device.type, enabled=False):
            q, k, v = self._padded(layer, q_THD, k_THD, v_THV)
            scores = q @ k.transpose(2, 3)
            if position_bias is not None:
                scores = scores + position_bias.to(q.dtype)[self._distances()][:, None]
            if time_bias is not None:
                scores = scores + time_bias.to(q.dtype)[self._buckets()][:, None]
            weights = torch.nn.functional.silu(scores).masked_fill(self._hidden, 0.0) * scale
            return self._jagged(weights @ v).to(v_THV.dtype)

    def softmax(self, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, *, layer: int, scale: float) -> Tensor:
        """Values weighted by the softmax of scale * q k^T."""
        with torch.autocast(q_THD.device.type, enabled=False):
            q, k, v = self._padded(layer, q_THD, k_THD, v_THV)
            scores = (q @ k.transpose(2, 3) * scale).masked_fill(self._hidden, float("-inf"))
            return self._jagged(scores.softmax(-1) @ v).to(v_THV.dtype)

    def _padded(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """[users, heads, tokens, width] of queries, and of cached and new keys and values, in float32 or better."""
        if self._keep is not None:
            self._keep(layer, k, v)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        queries, keys, values = (self._pad(x.to(wide)) for x in (q, k, v))
        if self._cached.num_tokens:
            keys = torch.cat([self._cached.keys[layer].to(wide), keys], dim=1)
            values = torch.cat([self._cached.values[layer].to(wide), values], dim=1)
        return [
            x.transpose(1, 2)
            for x in (queries, *(for_every_head(x, queries.shape[-2]) for x in (keys, values)))
        ]

    def _pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [users, longest, ...]."""
        shape = (self._users, self._longest, *x.shape[1:])
        if self._slots is None:
            return x.reshape(shape)
        room = x.new_zeros(self._users * self._longest, *x.shape[1:])
        return room.index_copy(0, self._slots, x).view(shape)

    def _jagged(self, x: Tensor) -> Tensor:
        """[users, heads, longest, width] -> [T, heads, width]."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self._slots is None else flat.index_select(0, self._slots)

    def _make_hidden(self, lengths: Ints, counts: list[int]) -> Tensor:
        """[users, 1, queries, keys], true for padding and for what comes later."""
        cached = np.arange(self._cached.num_tokens) >= np.array(counts, np.int64)[:, None]
        new = np.arange(self._longest)
        later = (new > new[:, None]) | (new >= lengths[:, None, None])
        before = np.broadcast_to(cached[:, None, :], (len(lengths), self._longest, cached.shape[1]))
        return self._on_device(np.concatenate([before, later], axis=2))[:, None]

    def _distances(self) -> Tensor:
        """[users, queries, keys] how far back a key stands."""
        if self._distance is None:
            places = self._pad(self.places)
            keys = torch.cat([self._cached.places, places], dim=1)
            self._distance = (places[:, :, None] - keys[:, None, :]).clamp(min=0)
        return self._distance

    def _buckets(self) -> Tensor:
        """[users, queries, keys] bucket of the time between them."""
        if self._bucket is None:
            asked, time = (self._pad(self._batch.tokens[name]) for name in ("target_time", "time"))
            keys = torch.cat([self._cached.times, time], dim=1)
            self._bucket = time_bucket(asked[:, :, None] - keys[:, None, :])
        return self._bucket

    def _on_device(self, x: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self._device, non_blocking=True)


class _Padded:
    """Caches of several users side by side: [layers, users, tokens, heads, width]."""

    def __init__(self, caches: Sequence[TokenCache | None], device: torch.device) -> None:
        some = [cache for cache in caches if cache is not None]
        counts = [0 if cache is None else cache.keys.shape[1] for cache in caches]
        self.num_tokens = max(counts, default=0)
        places = np.zeros((len(caches), self.num_tokens), np.int64)
        times = np.zeros_like(places)
        for row, cache in enumerate(caches):
            if cache is not None:
                places[row, : counts[row]] = cache.places()
                if cache.times:
                    times[row, : counts[row]] = np.repeat(cache.times, cache.stamp.summaries)
        self.places, self.times = (torch.from_numpy(x).to(device, non_blocking=True) for x in (places, times))
        if not some or self.num_tokens == 0:
            return
        if len(set(counts)) == 1:
            self.keys, self.values = (
                torch.stack([getattr(cache, name) for cache in some], dim=1).to(device)
                for name in ("keys", "values")
            )
            return
        self.keys, self.values = (self._fill(caches, name, some[0], device) for name in ("keys", "values"))

    def _fill(
        self, caches: Sequence[TokenCache | None], name: str, like: TokenCache, device: torch.device
    ) -> Tensor:
        one: Tensor = getattr(like, name)
        room = torch.zeros(
            one.shape[0], len(caches), self.num_tokens, *one.shape[2:], dtype=one.dtype, device=device
        )
        for row, cache in enumerate(caches):
            if cache is not None:
                kept: Tensor = getattr(cache, name)
                room[:, row, : kept.shape[1]] = kept.to(device)
        return room
