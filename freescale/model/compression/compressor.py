"""Serving in two steps: `compress` turns histories into token caches, `states` answers requests from them.

Both give what the masked pass of training gives, to rounding (tests/model/compression/test_compressor.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints, Segments, SequenceBatch, cut_history, insert_summaries
from freescale.errors import DataError
from freescale.jagged import offsets_of
from freescale.model.compression.packed_caches import PackedCaches
from freescale.model.compression.segmented import SegmentedEncoder
from freescale.model.compression.token_cache import CacheStamp, TokenCache
from freescale.model.views.cached_view import CachedView

Caches = Sequence[TokenCache | None]


class Compressor:
    """Makes and reads the token caches of one model.

    Args:
        encoder: the trained encoder, in evaluation mode.
        model: fingerprint of the weights, written into every cache and asked of every cache.
        dtype: what keys and values are kept in; float32 is exact, bfloat16 half as large.
    """

    def __init__(self, encoder: SegmentedEncoder, *, model: str, dtype: torch.dtype = torch.float32) -> None:
        self.encoder = encoder
        self.dtype = dtype
        rule = encoder.rule
        self.stamp = CacheStamp(
            model=model,
            length=rule.length,
            summaries=rule.summaries,
            dtype=str(dtype).removeprefix("torch."),
        )

    @torch.no_grad()
    def compress(self, vectors_TD: Tensor, batch: SequenceBatch, caches: Caches | None = None) -> Caches:
        """Caches of users with these events added, in segments of the model's length; the last may be shorter.

        Without caches everything is worked out in one masked pass. With them only the new events are: what a cache
        holds is read and never made again.

        Args:
            vectors_TD: item vectors of the new events.
            batch: the new events, one sequence a user, oldest first; with "time" and "target_time" if the model wants
                them, where "target_time" of the last is the time of the first event that is not compressed.
            caches: what is compressed of each user already; None for nothing.
        """
        segments = cut_history(batch.lengths.numpy(), length=self.stamp.length)
        packed = self.packed([None] * len(batch) if caches is None else caches, device=vectors_TD.device)
        self.check(batch, packed, np.bincount(segments.sequence, minlength=len(batch)))
        if not packed.counts.any():
            return self._run(vectors_TD, batch, segments, None)
        grown = list(packed)
        # A segment sees the summaries of those before it, so the segments of a user follow each other in rounds.
        rest, done = batch, torch.zeros(len(batch), dtype=torch.int64)
        while rest.num_tokens:
            now = rest.lengths.clamp(max=self.stamp.length)
            users = torch.nonzero(now)[:, 0].tolist()
            index, part = batch.part(done, now, device=vectors_TD.device)
            taken = part.select(users)
            one_each = Segments(np.arange(len(users)), taken.lengths.numpy())
            now_kept = self.packed([grown[user] for user in users], device=vectors_TD.device)
            made = self._run(vectors_TD.index_select(0, index), taken, one_each, now_kept)
            for user, more in zip(users, made):
                old = grown[user]
                grown[user] = more if old is None or more is None else old.extended(more)
            done = done + now
            _, rest = batch.part(done, batch.lengths - done)
        return grown

    @torch.no_grad()
    def states(self, vectors_TD: Tensor, batch: SequenceBatch, caches: Caches) -> Tensor:
        """State of every recent event, [T, D], its user's history seen through the cache.

        Caches that are asked for again and again are best kept as `packed` ones: then nothing is copied.
        """
        packed = self.packed(caches, device=vectors_TD.device)
        self.check(batch, packed)
        return self.encoder.inner.encode(vectors_TD, CachedView(batch, packed, device=vectors_TD.device))

    def packed(self, caches: Caches, *, device: torch.device | str) -> PackedCaches:
        """The caches of several users as one store on a device; those of another model are refused."""
        if isinstance(caches, PackedCaches):
            self.stamp.refuse_other(caches.stamp)
            return caches.to(device)
        for cache in caches:
            if cache is not None and cache.stamp != self.stamp:
                self.stamp.refuse_other(cache.stamp)
        return PackedCaches.pack(caches, device=device, stamp=self.stamp)

    @torch.no_grad()
    def last_states(self, vectors_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """State of the last event of whole histories by the two steps of serving: compress all but the recent, ask."""
        history = torch.from_numpy(self.encoder.rule.history(batch.lengths.numpy()))
        index, old = batch.part(torch.zeros_like(history), history, device=vectors_TD.device)
        caches = self.compress(vectors_TD.index_select(0, index), old)
        index, recent = batch.part(history, batch.lengths - history, device=vectors_TD.device)
        states = self.states(vectors_TD.index_select(0, index), recent, caches)
        return states.index_select(0, (recent.offsets[1:] - 1).to(states.device))

    def _run(
        self, vectors: Tensor, batch: SequenceBatch, segments: Segments, caches: PackedCaches | None
    ) -> PackedCaches:
        """Caches of these segments alone; one pass, which sees what is cached already."""
        cut = insert_summaries(batch, segments, summaries=self.stamp.summaries, device=vectors.device)
        kept: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            kept[layer] = (k.index_select(0, cut.summaries), v.index_select(0, cut.summaries))

        if caches is not None:
            view = CachedView(cut.batch, caches, device=vectors.device, keep=keep)
            self.encoder.inner.encode(self.encoder.with_summaries(vectors, cut), view)
        else:
            self.encoder.masked_pass(vectors, cut, keep=keep)
        keys, values = (
            torch.stack([kept[layer][part] for layer in sorted(kept)]).to(self.dtype) for part in (0, 1)
        )
        times = np.zeros(0, np.int64)
        if "time" in cut.batch.tokens:
            last = cut.summaries[:: self.stamp.summaries]
            times = cut.batch.tokens["time"].index_select(0, last).cpu().numpy().astype(np.int64)
        counts = np.bincount(segments.sequence, minlength=len(batch))
        return PackedCaches.build(
            keys,
            values,
            sizes=segments.sizes,
            segments=offsets_of(counts),
            segment_times=times,
            stamp=self.stamp,
        )

    def check(self, batch: SequenceBatch, caches: PackedCaches, segments: Ints | int = 0) -> None:
        """Refuse sequences that grow beyond the positions the model has learnt, `segments` being cut of each."""
        if len(caches) != len(batch):
            raise DataError(
                "every user needs a cache, or None", got=f"{len(batch)} users, {len(caches)} caches"
            )
        needed = caches.ends + batch.lengths.numpy() + segments * self.stamp.summaries
        if len(needed) and needed.max() > self.encoder.max_positions:
            raise DataError(
                "a history is longer than the model has learnt",
                got=f"{needed.max()} events and summaries",
                allowed=f"at most {self.encoder.max_positions}",
                next_step="compress the user's latest events again, without a cache",
            )
