"""DirectLookup: vectors read straight from a table that this GPU holds whole, and their gradients on the way back.

    rows asked for ──gather──> vectors ──> model ──> gradients, one for each row asked for
          └──── plan (one sort, made ahead or on the way) ────> sum and update, one pass

The unique rows are never copied out, their number never reaches the host, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.tables.lookup import refuse_gradient
from freescale.embedding.tables.table import EmbeddingTable
from freescale.kernels.rows import RowPlan
from freescale.kernels.runtime import current_stream


@dataclass(frozen=True)
class PlannedRows:
    """Rows of one call, planned ahead of it; nothing of them has been read yet.

    Args:
        asked: row numbers of any shape.
        plan: which of them are the same.
        table: whose rows they are.
    """

    asked: Tensor
    plan: RowPlan
    table: EmbeddingTable

    def record_stream(self) -> None:
        """The current stream uses what was planned on another one; let it wait for that one yourself."""
        for tensor in (self.asked, *self.plan.tensors()):
            tensor.record_stream(current_stream(tensor.device))


class DirectLookup:
    """The rows of one call, and what their gradients will be.

    Args:
        name: of the table.
        table: held whole by this rank, and fused.
        rows: what is asked for, planned or not.
    """

    def __init__(self, name: str, table: EmbeddingTable, rows: Tensor | PlannedRows) -> None:
        self.table = name
        self._table = table
        self._plan: RowPlan | None
        if isinstance(rows, PlannedRows):
            self._asked, self._plan = rows.asked, rows.plan
        else:
            self._asked, self._plan = rows, None
        self._keys: Tensor | None = None
        self._gradient: Tensor | None = None
        self._closed = False

    def vectors(self) -> Tensor:
        """[..., dim] the vector of each row asked for; gradients are kept here after the backward."""
        if not torch.is_grad_enabled():
            return self.read()
        vectors: Tensor = _Read.apply(_hook(self._table.weight.device), self)  # type: ignore[no-untyped-call]
        return vectors

    def read(self) -> Tensor:
        """The vectors, as numbers."""
        vectors, self._keys = self._table.read(self._asked, plan=self._plan)
        return vectors

    def add_gradient(self, grad: Tensor) -> None:
        """What a backward gives; there may be several."""
        if self._closed:
            refuse_gradient(self.table)
        self._gradient = grad if self._gradient is None else self._gradient + grad

    def close(self) -> None:
        """The update was made: a gradient that still comes would be lost, and is an error."""
        self._closed = True

    @property
    def keys(self) -> Tensor:
        """[N] the keys of the rows asked for."""
        assert self._keys is not None, "vectors come before their gradients"
        return self._keys

    @property
    def plan(self) -> RowPlan | None:
        """Where it was made ahead."""
        return self._plan

    def gradient(self) -> Tensor:
        """[N, dim] of every row asked for; zeros where nothing depended on them."""
        if self._gradient is None:
            return torch.zeros(self._asked.numel(), self._table.dim, device=self._asked.device)
        return self._gradient.reshape(-1, self._table.dim)


@cache
def _hook(device: torch.device) -> Tensor:
    """Something that wants a gradient, so that the backward comes by; it never gets one."""
    return torch.empty(0, device=device, requires_grad=True)


class _Read(torch.autograd.Function):
    """Reads rows, and hands their gradients to the lookup instead of a tensor of the table's size."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, lookup: DirectLookup) -> Tensor:
        ctx.lookup = lookup
        return lookup.read()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.lookup.add_gradient(grads[0].detach())
        return None, None
