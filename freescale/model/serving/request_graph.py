"""RequestGraph: cached requests as one recorded CUDA graph, so that the CPU starts one thing and not a hundred.

A request computes little: 256 users with 50 new events each keep an H200 busy for less time than Python needs to start
the kernels of eight layers. Recorded once for a number of users and events, they are started together, for any users
of the store and any requests that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.errors import DataError
from freescale.kernels.attention import KeyValueBuffer
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.packed_caches import PackedCaches
from freescale.model.views.cached_view import CachedView

Pass = Callable[[], Tensor]


class RequestGraph:
    """Answers requests from one store, up to so many users with up to so many events each.

    Make it inside the autocast that requests are to run under. Weights are read at every request; keys and values
    where they lie: `store` may be written to, not replaced.

    Args:
        compressor: the model.
        store: the caches of all users, on the GPU.
        users: most users of a request.
        recent: most new events of a user.
        dim: width of item vectors.
        record: turns a pass into one that can be repeated; a CUDA graph unless given.
    """

    def __init__(
        self,
        compressor: Compressor,
        store: PackedCaches,
        *,
        users: int,
        recent: int,
        dim: int,
        record: Callable[[Pass], Pass] | None = None,
    ) -> None:
        self._compressor, self._store = compressor, store
        self._room = KeyValueBuffer(users, recent, int(store.counts.max(initial=0)))
        device = store.keys.device
        self._vectors = torch.zeros(users * recent, dim, device=device)
        never = torch.zeros(users * recent, dtype=torch.int64, device=device)
        batch = SequenceBatch(
            offsets=torch.arange(users + 1) * recent, tokens={"time": never, "target_time": never}
        )
        self._view = self._view_of(batch, store.without_histories(users))
        self._run = (record or record_cuda)(self._encode)

    @torch.no_grad()
    def states(self, vectors_TD: Tensor, batch: SequenceBatch, users: Sequence[int]) -> Tensor:
        """State of every recent event, [T, D], as `Compressor.states` gives it.

        Args:
            vectors_TD: item vectors of the new events.
            batch: the new events, one sequence a user.
            users: the user of each sequence, as a number in the store.
        """
        if len(batch) > self._room.users or int(batch.lengths.max()) > self._room.new:
            raise DataError(
                "this request does not fit into the recorded graph",
                got=f"{len(batch)} users with up to {int(batch.lengths.max())} events",
                allowed=f"{self._room.users} users with up to {self._room.new} events",
                next_step="record one with room for it, or ask Compressor.states",
            )
        caches = self._store.select(users)
        self._compressor.check(batch, caches)
        self._view.fill_from(self._view_of(batch, caches))
        self._vectors[: len(vectors_TD)].copy_(vectors_TD)
        return self._run()[: len(vectors_TD)].clone()

    def _view_of(self, batch: SequenceBatch, caches: PackedCaches) -> CachedView:
        return CachedView(batch, caches, device=self._vectors.device, fused=True, room=self._room)

    @torch.no_grad()
    def _encode(self) -> Tensor:
        return self._compressor.encoder.inner.encode(self._vectors, self._view)


def record_cuda(run: Pass) -> Pass:
    """The pass as a CUDA graph, warmed up first: what compiles or allocates for good does so before it is recorded."""
    kind = "cuda"
    # Rounded weights of an autocast that ends would be read by the graph after their memory is gone.
    fresh = torch.autocast(
        kind,
        torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with fresh, torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with fresh, torch.cuda.graph(graph):
        out = run()

    def again() -> Tensor:
        graph.replay()
        return out

    return again
