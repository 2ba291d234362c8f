"""The numbers of a step that travel with its batch: so that a recorded step finds those of its own step where it reads.

0  unique rows that are real      1  key of the dropout masks      2  learning rate of the dense part
3  .. 6  what the update of rows reads (`EmbeddingTable.step_numbers`)                              7  nothing

Of every further table there are eight more, of which 0 and 3 to 6 are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUM_NUMBERS = 8


class TableNumbers(NamedTuple):
    """The numbers of a table.

    Args:
        real_rows: [1] int64 unique rows that are real.
        rows: [4] float64, of the update of rows.
    """

    real_rows: Tensor
    rows: Tensor


class StepNumbers(NamedTuple):
    """The numbers where a step reads them.

    Args:
        dropout_key: [1] int64.
        dense_lr: [] float64.
        tables: of every table.
    """

    dropout_key: Tensor
    dense_lr: Tensor
    tables: tuple[TableNumbers, ...]

    @staticmethod
    def of(numbers: Tensor) -> StepNumbers:
        """Views of what `pack_numbers` made."""
        exact = numbers.view(torch.float64)
        tables = tuple(
            TableNumbers(numbers[first : first + 1], exact[first + 3 : first + 7])
            for first in range(0, len(numbers), NUM_NUMBERS)
        )
        return StepNumbers(numbers[1:2], exact[2], tables)


def pack_numbers(*, dropout_key: int, dense_lr: float, rows: Sequence[Sequence[float]]) -> npt.NDArray[Any]:
    """[8 tables] int64 the numbers of a step; the batch itself fills in how many rows it has."""
    packed = np.zeros(NUM_NUMBERS * len(rows), np.int64)
    packed[1] = dropout_key
    exact = packed.view(np.float64)
    exact[2] = dense_lr
    exact.reshape(-1, NUM_NUMBERS)[:, 3:7] = rows
    return packed
