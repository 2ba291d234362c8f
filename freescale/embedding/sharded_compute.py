"""ShardedCompute: vectors that must be computed, each by one rank, once for all ranks that need it.

    this rank's items ──unique──numbers──> who computes them ──unique──> compute ──┐
           │                                                                      │
    their vectors   <───────────────────── deliver ───────────────────────────────┘
           └──────────── gradients ── collect ──> added up in rank order, then one backward

It is to a computed vector what `ShardedEmbedding` is to a stored row: items are shared out over the ranks as the rows
of a table would be, and every unique item of the global batch is computed once. Nothing can travel early: what
computes the vectors changes with every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.comm import AloneTransport, Transport
from freescale.embedding.id_maps.direct import DirectMap
from freescale.embedding.optimizers.sgd import SGD
from freescale.embedding.sharding.plan import TablePlan, TableSpec
from freescale.embedding.sharding.request import Request, exchange_ids
from freescale.trace import compute, stage

_ALONE = AloneTransport()


class ShardedCompute:
    """Who computes which items, and how their vectors and gradients travel.

    Every rank must make the same calls.

    Args:
        num_items: items are numbered from 0.
        numbers: how numbers travel; they live on the CPU.
        vectors: how vectors and gradients travel, on the model's device.
    """

    def __init__(self, num_items: int, *, numbers: Transport = _ALONE, vectors: Transport = _ALONE) -> None:
        # The plan of a table whose rows are computed: width and optimizer are never asked for.
        spec = TableSpec(name="items", num_rows=num_items, dim=1, optimizer=SGD())
        self.plan = TablePlan(spec=spec, num_ranks=numbers.num_ranks, replicated=False)
        self._numbers, self._vectors = numbers, vectors
        # Neighbours are often alike in popularity and length of text, so they go to different ranks.
        self._position = DirectMap(num_items).rows(torch.arange(num_items))
        item_at = torch.empty_like(self._position).scatter_(0, self._position, torch.arange(num_items))
        first, count = self.plan.block(numbers.rank)
        self.own = item_at[first : first + count]
        """[own positions] the item at each position of this rank's share."""

    def resized(self, num_items: int) -> ShardedCompute:
        """The same for another number of items."""
        return ShardedCompute(num_items, numbers=self._numbers, vectors=self._vectors)

    def request(self, items: Tensor) -> Request:
        """Tell who computes them which items this rank needs. `inverse` says where each stands in what is delivered."""
        with stage("exchange item numbers"):
            return exchange_ids(self.plan, self._position[items], channel=self._numbers)

    def wanted(self, request: Request) -> Tensor:
        """[O] the unique items that any rank asked from this one: those to compute."""
        return self.own[request.owned.unique]

    def deliver(self, computed: Tensor, request: Request) -> Tensor:
        """[U, dim] the vectors this rank asked for; `computed` are those of `wanted`, [O, dim]."""
        with compute("gather item vectors"):
            leaving = request.owned.spread(computed)
        with stage("exchange item vectors"):
            return request.route.to_askers(leaving, channel=self._vectors).wait()

    def collect(self, grad: Tensor, request: Request) -> Tensor:
        """[O, dim] the gradients of what was computed here, added up in rank order; `grad` is this rank's, [U, dim]."""
        with stage("send item gradients home"):
            home = request.route.to_owners(grad, channel=self._vectors).wait()
        with compute("sum item gradients"):
            return request.owned.sum(home)
