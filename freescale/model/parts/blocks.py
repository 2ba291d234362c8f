"""Parts that several models share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from freescale.kernels import SequenceLayout, input_states
from freescale.kernels.attention import NUM_TIME_BUCKETS
from freescale.kernels.rows import take
from freescale.kernels.runtime import linear
from freescale.model.parts.dropout import Dropout


class Linear(nn.Linear):
    """`nn.Linear`, whose weight and bias may get their gradients after those of the rows have left."""

    def forward(self, input: Tensor) -> Tensor:
        """Input weight^T + bias."""
        return linear(input, self.weight, self.bias)


class InputLayer(nn.Module):
    """Item vector * sqrt(dim) + learned position vector, then dropout.

    Args:
        dim: width.
        max_length: longest sequence, in tokens.
        dropout: share of the input set to zero in training.
    """

    def __init__(self, *, dim: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_length, dim))
        self.dropout = Dropout(dropout)
        nn.init.trunc_normal_(self.position, std=math.sqrt(1 / dim))

    def forward(self, vectors_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Input of the first layer, [T, D]."""
        # Gradients of a position add up in a fixed order, and no host waits for their number.
        vectors = take(self.position, positions_T)
        return self.dropout(vectors_TD * math.sqrt(vectors_TD.shape[-1]) + vectors)

    def gather(self, rows_UD: Tensor, index_T: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """The same from unique item vectors, as `input_states` makes it; and the vectors, for the head."""
        scale = math.sqrt(rows_UD.shape[-1])
        x, rows_UD = input_states(rows_UD, index_T, self.position, layout, scale=scale)
        return self.dropout(x), rows_UD


class RelativeBias(nn.Module):
    """Weights added to attention scores: one for each distance in position, one for each bucket of time.

    Args:
        max_length: longest sequence, in tokens.
        position: learn the position weights.
        time: learn the time weights; they are used where a batch carries time stamps.
    """

    def __init__(self, *, max_length: int, position: bool, time: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_length).normal_(std=0.02)) if position else None
        self.time = nn.Parameter(torch.empty(NUM_TIME_BUCKETS).normal_(std=0.02)) if time else None
