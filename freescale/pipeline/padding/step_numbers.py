"""The numbers of a step that travel with its batch: so that a recorded step finds those of its own step where it reads.

0  unique rows that are real      1  key of the dropout masks      2  learning rate of the dense part
3  .. 6  what the update of rows reads (`EmbeddingTable.step_numbers`)                              7  nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUM_NUMBERS = 8


class StepNumbers(NamedTuple):
    """The numbers where a step reads them.

    Args:
        real_rows: [1] int64 unique rows that are real.
        dropout_key: [1] int64.
        dense_lr: [] float64.
        rows: [4] float64, of the update of rows.
    """

    real_rows: Tensor
    dropout_key: Tensor
    dense_lr: Tensor
    rows: Tensor

    @staticmethod
    def of(numbers: Tensor) -> StepNumbers:
        """Views of what `pack_numbers` made."""
        exact = numbers.view(torch.float64)
        return StepNumbers(numbers[:1], numbers[1:2], exact[2], exact[3:7])


def pack_numbers(*, dropout_key: int, dense_lr: float, rows: Sequence[float]) -> npt.NDArray[Any]:
    """[8] int64 the numbers of a step; the batch itself fills in how many rows it has."""
    packed = np.zeros(NUM_NUMBERS, np.int64)
    packed[1] = dropout_key
    packed.view(np.float64)[2:7] = dense_lr, *rows
    return packed


def no_numbers(step: int) -> npt.NDArray[Any]:
    """Of a step that reads none."""
    return np.zeros(NUM_NUMBERS, np.int64)
