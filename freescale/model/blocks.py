"""Parts that several models share."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from freescale.data.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.kernels.reference import NUM_TIME_BUCKETS


class Encoder(Protocol):
    """Turns the item vectors of a jagged batch into one state a token."""

    def __call__(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State [T, D] of every token; the state of token i has seen tokens 0 to i of its own sequence only."""


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
        self.dropout = nn.Dropout(dropout)
        nn.init.trunc_normal_(self.position, std=math.sqrt(1 / dim))

    def forward(self, vectors_TD: Tensor, layout: SequenceLayout) -> Tensor:
        """Input of the first layer, [T, D]."""
        positions = nn.functional.embedding(layout.places, self.position)
        return self.dropout(vectors_TD * math.sqrt(vectors_TD.shape[-1]) + positions)


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

    def arguments(self, batch: SequenceBatch) -> dict[str, Any]:
        """Keyword arguments for `kernels.hstu_attention`."""
        if self.time is None:
            return {"position_bias": self.position}
        return {
            "position_bias": self.position,
            "time_bias": self.time,
            # The request comes when the next event happens, so that is the query's time.
            "query_time": batch.tokens["target_time"],
            "key_time": batch.tokens["time"],
        }
