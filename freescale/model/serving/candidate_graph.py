"""CandidateGraph: requests with candidates as one recorded CUDA graph over a store of histories.

Five layers are some forty kernels of a few microseconds each: started one by one by Python they take several times as
long as they run. Recorded once for a number of users, new events and candidates, they are started together, for any
users of the store and any requests that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.errors import DataError
from freescale.kernels.attention import KeyValueBuffer
from freescale.model.serving.history_store import HistoryStore
from freescale.model.serving.request_graph import Pass, record_cuda
from freescale.model.views.cached_view import CachedView
from freescale.model.views.candidate_rows import MOST_EVENTS
from freescale.model.views.kept_keys import KeptKeys


class CandidateGraph:
    """Scores candidates of up to so many users at a time from one store.

    Make it inside the autocast that requests are to run under. Weights are read at every request; keys and values
    where they lie.

    Args:
        encoder: of the model; it has `encode(vectors, view)`.
        store: the caches of all users, on the GPU.
        users: most users of a request.
        candidates: most candidates of a user.
        dim: width of item vectors.
        events: most events of a user that are not in the store; at least the latest one.
        timed: whether batches have times.
        record: turns a pass into one that can be repeated; a CUDA graph unless given.
    """

    def __init__(
        self,
        encoder: Any,
        store: HistoryStore,
        *,
        users: int,
        candidates: int,
        dim: int,
        events: int = 1,
        timed: bool = True,
        record: Callable[[Pass], Pass] | None = None,
    ) -> None:
        if not 1 <= events <= MOST_EVENTS:
            raise DataError("new events of a recorded request", got=events, allowed=f"1 to {MOST_EVENTS}")
        self._encoder, self._store = encoder, store
        self.room = KeyValueBuffer(users, events, store.events, candidates)
        each, device = events + candidates, store.without_histories(1).keys.device
        self._vectors = torch.zeros(users * each, dim, device=device)
        never = torch.zeros(users * each, dtype=torch.int64, device=device)
        batch = SequenceBatch(
            offsets=torch.arange(users + 1) * each,
            tokens={"time": never, "target_time": never} if timed else {},
            targets=torch.full((users,), candidates, dtype=torch.int64),
        )
        self._view = self._view_of(batch, store.without_histories(users))
        self._run = (record or record_cuda)(self._encode)

    def fits(self, batch: SequenceBatch) -> bool:
        """Whether these requests have room in the recorded graph."""
        if batch.targets is None or len(batch) > self.room.users or not len(batch):
            return False
        events = batch.lengths - batch.targets
        return int(events.max()) <= self.room.new and int(batch.targets.max()) <= self.room.candidates

    @torch.no_grad()
    def states(self, vectors_TD: Tensor, batch: SequenceBatch, users: Sequence[int]) -> Tensor:
        """State of every candidate, [K, D], as `candidate_states` gives it.

        Args:
            vectors_TD: item vectors of new events and candidates.
            batch: these tokens, one request a sequence; `targets` says how many are candidates.
            users: whose each of them is, as a place in the store.
        """
        if not self.fits(batch):
            raise DataError(
                "this request does not fit into the recorded graph",
                got=f"{len(batch)} users",
                allowed=f"{self.room.users} users with up to {self.room.new} new events and "
                f"{self.room.candidates} candidates",
                next_step="record one with room for it, or ask candidate_states",
            )
        self._view.fill_from(self._view_of(batch, self._store.select(users)))
        self._vectors[: len(vectors_TD)].copy_(vectors_TD)
        states = self._run()
        return states.index_select(0, batch.candidate_index(states.device))

    def _view_of(self, batch: SequenceBatch, histories: KeptKeys) -> CachedView:
        return CachedView(batch, histories, device=self._vectors.device, fused=True, room=self.room)

    @torch.no_grad()
    def _encode(self) -> Tensor:
        states: Tensor = self._encoder.encode(self._vectors, self._view)
        return states
