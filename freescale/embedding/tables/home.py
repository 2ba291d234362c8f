"""Gradients of rows that have come home to their owner, and how those of several calls become one update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.embedding.tables.table import EmbeddingTable
from freescale.kernels.rows import RowPlan, sum_by_row, unique


@dataclass(frozen=True)
class Home:
    """Gradients that have come home.

    Args:
        rows: [W] the local row of each.
        values: [W, dim] one each.
        plan: which of them belong together, where that is known.
        summed: whether each row stands there once.
    """

    rows: Tensor
    values: Tensor
    plan: RowPlan | None = None
    summed: bool = True

    def apply(self, table: EmbeddingTable, *, lr: float, step: int) -> None:
        """Update the rows."""
        if self.plan is not None:
            table.apply_sums(self.plan, self.values, lr=lr, step=step)
        elif self.summed:
            table.apply(self.rows, self.values, lr=lr, step=step)
        else:
            table.apply_keys(self.rows, self.values, lr=lr, step=step)


def merged(parts: list[Home], table: EmbeddingTable) -> Home:
    """Gradients of several calls, to be summed in the order given."""
    if len(parts) == 1:
        return parts[0]
    rows, values = torch.cat([part.rows for part in parts]), torch.cat([part.values for part in parts])
    if table.not_fused is None:
        return Home(rows, values, summed=False)
    rows, inverse = unique(rows)
    return Home(rows, sum_by_row(inverse, values, len(rows)))
