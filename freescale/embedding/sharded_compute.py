"""ShardedCompute: vectors that must be computed, each by one rank, once for all ranks that need it.

    this rank's items ──distinct──numbers──> who computes them ──distinct──> compute ──┐
           │                                                                          │
    their vectors   <───────────────────────── deliver ───────────────────────────────┘
           └──────────── gradients ── collect ──> added up in rank order, then one backward

It is to a computed vector what `ShardedEmbedding` is to a stored row: items are shared out over the ranks as the rows
of a table would be, and every distinct item of the global batch is computed once. Nothing can travel early: what
computes the vectors changes with every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.comm import AloneTransport, Transport
from freescale.embedding.id_map import DirectMap
from freescale.embedding.optimizer import SGD
from freescale.embedding.plan import TablePlan, TableSpec
from freescale.embedding.request import Request, exchange_ids
from freescale.kernels.rows import sum_by_row
from freescale.kernels.runtime import on_device
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
        self._place = DirectMap(num_items).rows(torch.arange(num_items))
        item_at = torch.empty_like(self._place).scatter_(0, self._place, torch.arange(num_items))
        first, count = self.plan.block(numbers.rank)
        self.own = item_at[first : first + count]
        """[own places] the item at each place of this rank's share."""

    def request(self, items: Tensor) -> Request:
        """Tell who computes them which items this rank needs. `slots` say where each stands in what is delivered."""
        with stage("exchange item numbers"):
            return exchange_ids(self.plan, self._place[items], channel=self._numbers)

    def wanted(self, request: Request) -> Tensor:
        """[O] the distinct items that any rank asked from this one: those to compute."""
        return self.own[request.owned]

    def deliver(self, computed: Tensor, request: Request) -> Tensor:
        """[U, dim] the vectors this rank asked for; `computed` are those of `wanted`, [O, dim]."""
        with compute("gather item vectors"):
            leaving = computed.index_select(0, _on(computed, request.owned_inverse))
        with stage("exchange item vectors"):
            return self._vectors.start(leaving, send=request.receive, receive=request.send).wait()

    def collect(self, grad: Tensor, request: Request) -> Tensor:
        """[O, dim] the gradients of what was computed here, added up in rank order; `grad` is this rank's, [U, dim]."""
        with stage("send item gradients home"):
            home = self._vectors.start(grad, send=request.send, receive=request.receive).wait()
        with compute("sum item gradients"):
            return sum_by_row(_on(home, request.owned_inverse), home, len(request.owned))


def _on(like: Tensor, index: Tensor) -> Tensor:
    return on_device(index, like.device)
