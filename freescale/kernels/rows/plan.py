"""RowPlan and UpdateRule: which values belong to which row, and what becomes of a row; both as the kernels take them.

    keys       7  3  7  9  3  7         row numbers as a batch asks for them
    order      1  4  0  2  5  3         the same, sorted by row, equal ones as they stand
    rows       3  7  9                  each row once, ascending
    starts     0  2  5  6               where its values begin in `order`
    index      0  0  1  1  1  2         for each of `order`: the number of its row
    count      3                        how many rows there are, on the device

A plan follows from row numbers alone, so it can be made ahead of the compute, and nothing of it needs to be known by
the host: `rows` and `starts` have room for as many rows as there are keys. Keys need not be rows of one table: where
tables lie behind each other, the first key of each is the number of rows before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.runtime import to_device


@dataclass(frozen=True)
class RowPlan:
    """Values sorted by the row they belong to; see above. All on one device, whole numbers of 32 or 64 bits.

    All but `order` may have room at their end that means nothing.
    """

    order: Tensor
    rows: Tensor
    starts: Tensor
    index: Tensor
    count: Tensor
    keys: Tensor | None = None

    @property
    def num_values(self) -> int:
        """How many values there are, which is also the most rows there can be."""
        return len(self.order)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        always = self.order, self.rows, self.starts, self.index, self.count
        return always if self.keys is None else (*always, self.keys)


def plan_of_unique(unique: Tensor, inverse: Tensor, device: torch.device) -> RowPlan:
    """The plan of what the CPU has made unique already, on a device; the copy only queues."""
    from freescale.kernels.rows import loops as row_loops

    order, starts, index = row_loops.order_by_row(inverse.contiguous().view(-1).numpy(), len(unique))
    count = np.array([len(unique)], np.int32)
    rows = unique.contiguous().numpy()
    return RowPlan(*to_device(order, rows, starts, index, count, device=device))


@dataclass(frozen=True)
class UpdateRule:
    """What one update does to a row, for the kernel that sums and updates in one pass.

    Args:
        kind: "sgd", "rowwise_adagrad" or "adam".
        state: names of what is kept for each row.
        eps: added to the denominator.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
    """

    kind: str
    state: tuple[str, ...] = ()
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0

    def numbers(self, *, lr: float, step: int) -> tuple[float, float]:
        """What changes from step to step: the scale of the direction, and the correction of the second moment."""
        if self.kind == "adam":
            return -lr / (1 - self.beta1**step), 1 - self.beta2**step
        return -lr, 1.0
