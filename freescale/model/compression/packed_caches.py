"""PackedCaches: the token caches of many users in one store, which a request reads in place.

A cache by itself is a few small tensors. Put together for every request, those of 256 users are hundreds of copies;
kept side by side, a request only says where each user's tokens begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints
from freescale.jagged import offsets_of, spans
from freescale.kernels.runtime import to_device
from freescale.model.compression.token_cache import CacheStamp, TokenCache


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCaches(Sequence[TokenCache | None]):
    """Caches of several users; also a sequence of `TokenCache`, None for users without one.

    Args:
        keys: [layers, N, heads, width] summaries of all users; empty where nobody has any.
        values: the same; their width may differ.
        positions: [N] position of each summary in its history.
        times: [N] time stamp of each; None where there are none.
        starts: [users] where the summaries of each begin.
        sizes: events of each segment, user by user.
        segments: [users + 1] where the segments of each begin in `sizes`.
        segment_times: like `sizes`, time stamp of each segment's last event; empty where there are none.
        stamp: which model made them.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    times: Tensor | None
    starts: Ints
    sizes: Ints
    segments: Ints
    segment_times: Ints
    stamp: CacheStamp

    @staticmethod
    def pack(
        caches: Sequence[TokenCache | None], *, device: torch.device | str, stamp: CacheStamp
    ) -> PackedCaches:
        """The caches side by side, on a device; all of them have this stamp."""
        some = [cache for cache in caches if cache is not None]
        numbers = [0 if cache is None else len(cache.sizes) for cache in caches]
        timed = any(cache.times for cache in some)
        sizes, times = (
            np.fromiter(itertools.chain.from_iterable(lists), np.int64)
            for lists in (
                (cache.sizes for cache in some),
                (cache.times or (0,) * len(cache.sizes) for cache in some if timed),
            )
        )
        empty = torch.zeros(0, 0, 1, 1)
        keys, values = (
            (torch.cat([getattr(cache, name) for cache in some], dim=1) if some else empty).to(device)
            for name in ("keys", "values")
        )
        segments = offsets_of(numbers)
        return PackedCaches.build(
            keys, values, sizes=sizes, segments=segments, segment_times=times, stamp=stamp
        )

    @staticmethod
    def build(
        keys: Tensor, values: Tensor, *, sizes: Ints, segments: Ints, segment_times: Ints, stamp: CacheStamp
    ) -> PackedCaches:
        """Caches of summaries that stand user by user, segment by segment."""
        each = stamp.summaries
        ends = np.cumsum(sizes + each)
        # Positions begin again with each user.
        before = np.repeat(np.concatenate([[0], ends])[segments[:-1]], np.diff(segments))
        first = ends - before - each
        positions = (first[:, None] + np.arange(each)).ravel()
        tables = (positions, np.repeat(segment_times, each)) if len(segment_times) else (positions,)
        on_device = to_device(*tables, device=keys.device)
        return PackedCaches(
            keys=keys,
            values=values,
            positions=on_device[0],
            times=on_device[1] if len(segment_times) else None,
            starts=segments[:-1] * each,
            sizes=sizes,
            segments=segments,
            segment_times=segment_times,
            stamp=stamp,
        )

    @cached_property
    def counts(self) -> Ints:
        """[users] summaries of each."""
        found: Ints = np.diff(self.segments) * self.stamp.summaries
        return found

    @cached_property
    def ends(self) -> Ints:
        """[users] position of the event that follows."""
        total = offsets_of(self.sizes)
        found: Ints = np.diff(total[self.segments]) + self.counts
        return found

    def select(self, users: Sequence[int] | Ints) -> PackedCaches:
        """The caches of these users, in this order; keys and values stay where they are."""
        index = np.asarray(users, np.int64)
        own, segments = spans(self.segments[:-1][index], np.diff(self.segments)[index])
        times = self.segment_times
        return replace(
            self,
            starts=self.starts[index],
            sizes=self.sizes[own],
            segments=segments,
            segment_times=times[own] if len(times) else times,
        )

    def without_histories(self, users: int) -> PackedCaches:
        """The same store, read by users of whom it holds nothing."""
        none = np.zeros(0, np.int64)
        begin = np.zeros(users + 1, np.int64)
        return replace(self, starts=begin[1:], sizes=none, segments=begin, segment_times=none)

    def to(self, device: torch.device | str) -> PackedCaches:
        """The store on another device."""
        if self.keys.device == torch.device(device):
            return self
        tensors = {name: getattr(self, name).to(device) for name in ("keys", "values", "positions")}
        return replace(self, **tensors, times=None if self.times is None else self.times.to(device))

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> TokenCache | None: ...

    @overload
    def __getitem__(self, index: slice) -> PackedCaches: ...

    def __getitem__(self, index: int | slice) -> TokenCache | PackedCaches | None:
        """The cache of one user, copied out of the store; the caches of several, still in it."""
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        user = range(len(self))[index]
        own = slice(int(self.segments[user]), int(self.segments[user + 1]))
        if own.start == own.stop:
            return None
        begin = int(self.starts[user])
        tokens = slice(begin, begin + int(self.counts[user]))
        return TokenCache(
            keys=self.keys[:, tokens].clone(memory_format=torch.contiguous_format),
            values=self.values[:, tokens].clone(memory_format=torch.contiguous_format),
            sizes=tuple(self.sizes[own].tolist()),
            times=tuple(self.segment_times[own].tolist()),
            stamp=self.stamp,
        )
