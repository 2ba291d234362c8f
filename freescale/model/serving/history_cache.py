"""HistoryCache: keys and values of a history, so that candidates are scored without computing it again.

What is kept is everything but the latest event: its state depends on when the next request comes, all others only on
what followed them. So a cache is good for any later request, and grows with new events. A request computes the latest
event (and those that are not in the cache yet) and its candidates, in chunks of any size: the same numbers as one pass
over everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints, SequenceBatch
from freescale.errors import ConfigError, DataError
from freescale.jagged import number_inside, spans
from freescale.kernels import SequenceLayout
from freescale.kernels.runtime import to_device
from freescale.model.views.cached_view import CachedView
from freescale.model.views.candidate_rows import MOST_EVENTS
from freescale.model.views.view import BatchView, View


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryCache:
    """What is kept of one history.

    Args:
        keys: [layers, n, heads, width] of its first n events.
        values: the same; their width may differ.
        times: [n] when they happened; None where the model does not look at times.
        model: which weights made it.
    """

    keys: Tensor
    values: Tensor
    times: Tensor | None
    model: str = ""

    def __len__(self) -> int:
        return self.keys.shape[1]


class HistoryCaches:
    """Caches of several users side by side; users may have none.

    Args:
        caches: one a user.
        device: where the model computes.
    """

    def __init__(self, caches: Sequence[HistoryCache | None], *, device: torch.device) -> None:
        some = [cache for cache in caches if cache is not None and len(cache)]
        self.counts: Ints = np.array([0 if cache is None else len(cache) for cache in caches], np.int64)
        self.starts: Ints = np.cumsum(self.counts) - self.counts
        self.ends: Ints = self.counts
        self.keys, self.values = torch.zeros(0, 0, 1, 1), torch.zeros(0, 0, 1, 1)
        self.times: Tensor | None = None
        if some:
            self.keys, self.values = (
                (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(device)
                for parts in ([each.keys for each in some], [each.values for each in some])
            )
            stamps = [each.times for each in some if each.times is not None]
            self.times = torch.cat(stamps).to(device) if len(stamps) == len(some) else None
        self.positions: Tensor = to_device(number_inside(self.counts), device=device)[0]


@torch.no_grad()
def extend_caches(
    encoder: Any,
    vectors_TD: Tensor,
    batch: SequenceBatch,
    caches: Sequence[HistoryCache | None] | None = None,
    *,
    model: str = "",
) -> list[HistoryCache]:
    """Caches of users with these events added; only the new events are computed.

    Args:
        encoder: of the model; it sees everything before a token.
        vectors_TD: item vectors of the new events.
        batch: the new events, one sequence a user; with "time" and "target_time" where the model wants them: those of
            the event that follows, of the last one, too. So leave out the latest event: nobody knows what follows it.
        caches: what is there already.
        model: name of the weights, kept with every cache and asked of every cache.
    """
    _check(encoder, caches or [], model)
    old = list(caches) if caches is not None else [None] * len(batch)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(layer: int, k: Tensor, v: Tensor) -> None:
        kept.append((k, v))

    device = vectors_TD.device
    view: View
    if any(cache is not None and len(cache) for cache in old):
        view = CachedView(batch, HistoryCaches(old, device=device), device=device, keep=keep)
    else:
        # Whole histories have the kernels of training, which are made for long ones.
        view = BatchView(batch, SequenceLayout(batch.offsets, device=device), keep=keep)
    encoder.encode(vectors_TD, view)
    keys, values = (torch.stack([each[part] for each in kept]) for part in (0, 1))
    times = batch.tokens.get("time")
    edges, found = batch.offsets.tolist(), []
    for n, before in enumerate(old):
        own = slice(edges[n], edges[n + 1])
        made = HistoryCache(
            keys=keys[:, own].clone(),
            values=values[:, own].clone(),
            times=None if times is None else times[own].clone(),
            model=model,
        )
        found.append(made if before is None else _joined(before, made))
    return found


@torch.no_grad()
def candidate_states(
    encoder: Any,
    vectors_TD: Tensor,
    batch: SequenceBatch,
    caches: Sequence[HistoryCache | None] | None = None,
    *,
    chunk: int | None = None,
    model: str = "",
) -> Tensor:
    """State of every candidate, [K, D], as one pass over the whole history gives it.

    Args:
        encoder: of the model.
        vectors_TD: item vectors of the events that are not in the cache, and of candidates.
        batch: these tokens, one request a sequence; `targets` says how many are candidates.
        caches: what is kept of the histories before; nothing unless given.
        chunk: candidates of a request that are computed at a time; all unless given.
        model: name of the weights.
    """
    _check(encoder, caches or [], model)
    if batch.targets is None:
        raise DataError("candidates are missing", got="a batch without targets")
    if chunk is not None and chunk < 1:
        raise DataError("chunk must be at least 1", got=chunk)
    most = int(batch.targets.max()) if len(batch) else 0
    longest = int((batch.lengths - batch.targets).max()) if len(batch) else 0
    if longest > MOST_EVENTS or (chunk is not None and chunk < most and longest > 1):
        # Computed once, not beside every chunk.
        vectors_TD, batch, caches = _with_events_cached(encoder, vectors_TD, batch, caches, model)
    assert batch.targets is not None
    store = HistoryCaches(caches or [None] * len(batch), device=vectors_TD.device)
    out = vectors_TD.new_zeros(int(batch.targets.sum()), vectors_TD.shape[1])
    before = batch.targets.cumsum(0) - batch.targets
    for first in range(0, most, chunk or max(most, 1)):
        now = (batch.targets - first).clamp(min=0, max=chunk or most)
        index, offsets = _tokens_of(batch, first, now)
        (where,) = to_device(index, device=vectors_TD.device)
        part = SequenceBatch(
            offsets=torch.from_numpy(offsets),
            tokens={
                name: values.index_select(0, where.to(values.device)) for name, values in batch.tokens.items()
            },
            targets=now,
        )
        view = CachedView(part, store, device=vectors_TD.device)
        states = encoder.encode(vectors_TD.index_select(0, where), view)
        last, _ = spans(offsets[1:] - now.numpy(), now.numpy())
        goal, _ = spans((before + first).numpy(), now.numpy())
        to, of = to_device(goal, last, device=vectors_TD.device)
        out.index_copy_(0, to, states.index_select(0, of))
    return out


def _with_events_cached(
    encoder: Any,
    vectors_TD: Tensor,
    batch: SequenceBatch,
    caches: Sequence[HistoryCache | None] | None,
    model: str,
) -> tuple[Tensor, SequenceBatch, Sequence[HistoryCache | None]]:
    """The latest event of every request and its candidates; the events before are in the caches."""
    assert batch.targets is not None
    events = (batch.lengths - batch.targets - 1).clamp(min=0)
    index, old = batch.part(torch.zeros_like(events), events, device=vectors_TD.device)
    kept = extend_caches(encoder, vectors_TD.index_select(0, index), old, caches, model=model)
    index, rest = batch.part(events, batch.lengths - events, device=vectors_TD.device)
    return vectors_TD.index_select(0, index), replace(rest, targets=batch.targets), kept


def _tokens_of(batch: SequenceBatch, first: int, count: Tensor) -> tuple[Ints, Ints]:
    """Tokens of every request: its events, and `count` of its candidates from number `first` on; and their offsets."""
    assert batch.targets is not None
    starts, events = batch.offsets[:-1], batch.lengths - batch.targets
    # Two pieces a request, so every second offset is where one begins.
    begins = torch.stack([starts, starts + events + first], dim=1).ravel()
    index, offsets = spans(begins.numpy(), torch.stack([events, count], dim=1).ravel().numpy())
    return index, offsets[::2].copy()


def _joined(before: HistoryCache, more: HistoryCache) -> HistoryCache:
    times = None
    if before.times is not None and more.times is not None:
        times = torch.cat([before.times, more.times])
    keys, values = (
        torch.cat([one, other], dim=1)
        for one, other in ((before.keys, more.keys), (before.values, more.values))
    )
    return HistoryCache(keys=keys, values=values, times=times, model=more.model)


def _check(encoder: Any, caches: Sequence[HistoryCache | None], model: str) -> None:
    if not hasattr(encoder, "encode") or getattr(encoder, "mask", None) is not None:
        raise ConfigError(
            "this encoder's histories cannot be kept",
            got=f"{type(encoder).__name__} with model.mask"
            if hasattr(encoder, "encode")
            else type(encoder).__name__,
            allowed="encoders with encode(vectors, view) that see everything before a token",
            next_step="score without a cache",
        )
    for cache in caches:
        if cache is not None and cache.model != model:
            raise DataError("a cache was made by other weights", got=cache.model, allowed=model)
