"""HistoryStore: caches of many users at fixed addresses, which recorded requests read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints
from freescale.errors import DataError
from freescale.kernels.runtime import to_device
from freescale.model.serving.history_cache import HistoryCache


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredHistories:
    """Some users of a store; see `KeptKeys`."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    times: Tensor | None
    starts: Ints
    counts: Ints

    @property
    def ends(self) -> Ints:
        """[users] position of the event that follows."""
        return self.counts


class HistoryStore:
    """Room for the caches of so many users, each of at most so many events.

    Args:
        like: any cache of the model: its layers, heads, widths and types are those of all.
        users: places for users.
        events: most events kept of one.
        device: where the model computes.
    """

    def __init__(self, like: HistoryCache, *, users: int, events: int, device: torch.device) -> None:
        self.users, self.events, self.model = users, events, like.model
        layers, _, heads, width = like.keys.shape
        shape = (layers, users * events, heads)
        self._keys = torch.zeros(*shape, width, dtype=like.keys.dtype, device=device)
        self._values = torch.zeros(*shape, like.values.shape[3], dtype=like.values.dtype, device=device)
        self._positions = to_device(np.tile(np.arange(events), users), device=device)[0]
        self._times = None
        if like.times is not None:
            self._times = torch.zeros(users * events, dtype=torch.int64, device=device)
        self._counts = np.zeros(users, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self._keys.nbytes + self._values.nbytes

    def put(self, user: int, cache: HistoryCache | None) -> None:
        """Write a user's cache into its place, which is empty where there is none."""
        count = 0 if cache is None else len(cache)
        if not 0 <= user < self.users or count > self.events:
            raise DataError(
                "this store has no room for that cache",
                got=f"user {user}, {count} events",
                allowed=f"users 0 to {self.users - 1}, at most {self.events} events",
            )
        if cache is not None and cache.model != self.model:
            raise DataError("a cache was made by other weights", got=cache.model, allowed=self.model)
        self._counts[user] = count
        if cache is None:
            return
        own = slice(user * self.events, user * self.events + count)
        self._keys[:, own].copy_(cache.keys)
        self._values[:, own].copy_(cache.values)
        if self._times is not None:
            if cache.times is None:
                raise DataError("a cache without times", allowed="caches of a model with a time bias")
            self._times[own].copy_(cache.times)

    def select(self, users: Sequence[int]) -> StoredHistories:
        """The caches of these users, in this order; keys and values stay where they are."""
        index = np.asarray(users, np.int64).reshape(-1)
        return self._histories(index * self.events, self._counts[index])

    def without_histories(self, users: int) -> StoredHistories:
        """The same store, read by users of whom it holds nothing."""
        none = np.zeros(users, np.int64)
        return self._histories(none, none)

    def _histories(self, starts: Ints, counts: Ints) -> StoredHistories:
        return StoredHistories(
            keys=self._keys,
            values=self._values,
            positions=self._positions,
            times=self._times,
            starts=starts,
            counts=counts,
        )
