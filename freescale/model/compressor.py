"""Serving in two steps: `compress` turns histories into token caches, `states` answers requests from them.

Both give what the masked pass of training gives, to rounding: tests/model/test_compressor.py holds them against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.data.segment_rule import Ints, Segments, cut_history
from freescale.data.segments import SegmentedBatch, insert_summaries
from freescale.data.sequence_batch import SequenceBatch
from freescale.errors import DataError
from freescale.model.cached_view import CachedView
from freescale.model.segmented import SegmentedEncoder
from freescale.model.token_cache import CacheStamp, TokenCache

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
    def compress(
        self, vectors_TD: Tensor, batch: SequenceBatch, caches: Caches | None = None
    ) -> list[TokenCache | None]:
        """Caches of users with these events added, in segments of the model's length; the last may be shorter.

        Without caches everything is worked out in one masked pass. With them only the new events are: what a cache
        holds is read and never made again.

        Args:
            vectors_TD: item vectors of the new events.
            batch: the new events, one sequence a user, oldest first; with "time" and "target_time" if the model wants
                them, where "target_time" of the last is the time of the first event that is not compressed.
            caches: what is compressed of each user already; None for nothing.
        """
        caches = list(caches) if caches is not None else [None] * len(batch)
        segments = cut_history(batch.lengths.numpy(), length=self.stamp.length)
        self._check(batch, caches, np.bincount(segments.sequence, minlength=len(batch)))
        if all(cache is None for cache in caches):
            return self._run(vectors_TD, batch, segments, caches)
        # A segment sees the summaries of those before it, so the segments of a user follow each other in rounds.
        rest, done = batch, torch.zeros(len(batch), dtype=torch.int64)
        while rest.num_tokens:
            now = rest.lengths.clamp(max=self.stamp.length)
            users = torch.nonzero(now)[:, 0].tolist()
            part, index = _slice(batch, done, now)
            taken = part.select(users)
            one_each = Segments(np.arange(len(users)), taken.lengths.numpy())
            made = self._run(
                vectors_TD.index_select(0, index.to(vectors_TD.device)),
                taken,
                one_each,
                [caches[user] for user in users],
            )
            for user, cache in zip(users, made):
                caches[user] = cache
            done = done + now
            rest, _ = _slice(batch, done, batch.lengths - done)
        return caches

    @torch.no_grad()
    def states(self, vectors_TD: Tensor, batch: SequenceBatch, caches: Caches) -> Tensor:
        """State of every recent event, [T, D], its user's history seen through the cache."""
        self._check(batch, caches, np.zeros(len(batch), np.int64))
        return self.encoder.inner.encode(vectors_TD, CachedView(batch, caches, device=vectors_TD.device))

    @torch.no_grad()
    def last_states(self, vectors_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """State of the last event of whole histories by the two steps of serving: compress all but the recent, ask."""
        history = torch.from_numpy(self.encoder.rule.history(batch.lengths.numpy()))
        old, index = _slice(batch, torch.zeros_like(history), history)
        caches = self.compress(vectors_TD.index_select(0, index.to(vectors_TD.device)), old)
        recent, index = _slice(batch, history, batch.lengths - history)
        states = self.states(vectors_TD.index_select(0, index.to(vectors_TD.device)), recent, caches)
        return states.index_select(0, (recent.offsets[1:] - 1).to(states.device))

    def _run(
        self, vectors: Tensor, batch: SequenceBatch, segments: Segments, caches: Caches
    ) -> list[TokenCache | None]:
        """The caches with these segments added; one pass."""
        cut = insert_summaries(batch, segments, summaries=self.stamp.summaries, device=vectors.device)
        kept: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            kept[layer] = (
                k.index_select(0, cut.summaries).to(self.dtype),
                v.index_select(0, cut.summaries).to(self.dtype),
            )

        if any(cache is not None for cache in caches):
            view = CachedView(cut.batch, caches, device=vectors.device, keep=keep)
            self.encoder.inner.encode(self.encoder.with_summaries(vectors, cut), view)
        else:
            self.encoder.masked_pass(vectors, cut, keep=keep)
        keys, values = (torch.stack([kept[layer][part] for layer in sorted(kept)]) for part in (0, 1))
        return self._by_user(keys, values, cut, segments, caches)

    def _by_user(
        self, keys: Tensor, values: Tensor, cut: SegmentedBatch, segments: Segments, caches: Caches
    ) -> list[TokenCache | None]:
        counts = np.bincount(segments.sequence, minlength=len(caches))
        tokens = (counts * self.stamp.summaries).tolist()
        times: list[int] = []
        if "time" in cut.batch.tokens:
            last = cut.summaries[:: self.stamp.summaries]
            times = cut.batch.tokens["time"].index_select(0, last).tolist()
        ends = np.cumsum(counts)
        made: list[TokenCache | None] = []
        for user, (k, v) in enumerate(zip(keys.split(tokens, dim=1), values.split(tokens, dim=1))):
            own = slice(ends[user] - counts[user], ends[user])
            more = TokenCache(
                keys=k.contiguous(),
                values=v.contiguous(),
                sizes=tuple(segments.sizes[own].tolist()),
                times=tuple(times[own]),
                stamp=self.stamp,
            )
            old = caches[user]
            made.append(old.extended(more) if old is not None else more if counts[user] else None)
        return made

    def _check(self, batch: SequenceBatch, caches: Caches, segments: Ints) -> None:
        """Refuse caches of another model, and sequences that grow beyond the places the model has learnt."""
        if len(caches) != len(batch):
            raise DataError(
                "every user needs a cache, or None", got=f"{len(batch)} users, {len(caches)} caches"
            )
        for cache in caches:
            if cache is not None:
                self.stamp.refuse_other(cache.stamp)
        ends = np.array([0 if cache is None else cache.end for cache in caches], np.int64)
        needed = ends + batch.lengths.numpy() + segments * self.stamp.summaries
        if len(needed) and needed.max() > self.encoder.max_places:
            raise DataError(
                "a history is longer than the model has learnt",
                got=f"{needed.max()} events and summaries",
                allowed=f"at most {self.encoder.max_places}",
                next_step="compress the user's latest events again, without a cache",
            )


def _slice(batch: SequenceBatch, first: Tensor, count: Tensor) -> tuple[SequenceBatch, Tensor]:
    """Events first .. first + count - 1 of every sequence, and their numbers in the flat batch."""
    offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
    shift = torch.repeat_interleave(batch.offsets[:-1] + first - offsets[:-1], count)
    index = torch.arange(int(offsets[-1])) + shift
    where = index.to(batch.device)
    tokens = {name: values.index_select(0, where) for name, values in batch.tokens.items()}
    return SequenceBatch(offsets=offsets, tokens=tokens, samples=batch.samples), index
