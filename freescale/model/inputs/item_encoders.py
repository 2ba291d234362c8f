"""Item vectors from content instead of rows of a table: projected content vectors, or a small encoder of texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.kernels.rows import take
from freescale.model.encoders.llama import Decoder, RMSNorm
from freescale.model.parts.dropout import dropout_batch

_ROW_STD = 0.02
"""Item vectors start as large as rows of a table do, so that both can be added."""


class ContentProjection(nn.Module):
    """A trained linear map of frozen content vectors, each brought to mean 0 and variance 1 first.

    Args:
        width: of the content vectors.
        dim: of the item vectors.
    """

    def __init__(self, *, width: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.project = nn.Linear(width, dim)
        _start_small(self.project)

    def forward(self, content_NW: Tensor) -> Tensor:
        """[N, dim]."""
        return self.project(self.norm(content_NW.to(self.project.weight.dtype)))


class TextEncoder(nn.Module):
    """A small decoder over the pieces of a text; the mean of their states is the item's vector.

    The state of the last piece alone would do for a trained decoder. A fresh one has seen little of the others there:
    all items would start with one vector (cosine 0.999 between them, against 0.2 of the means on MovieLens titles).

    Args:
        vocabulary_size: numbers a piece can have.
        dim: of the item vectors.
        width: of the states inside.
        layers: of the decoder.
        heads: attention heads; width / heads is even.
        dropout: inside layers and on the input.
    """

    def __init__(
        self, *, vocabulary_size: int, dim: int, width: int, layers: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.pieces = nn.Parameter(torch.empty(vocabulary_size, width).normal_(std=_ROW_STD))
        self.decoder = Decoder(dim=width, layers=layers, heads=heads, dropout=dropout)
        self.norm = RMSNorm(width)
        self.project = nn.Linear(width, dim)
        _start_small(self.project)

    def forward(self, texts: SequenceBatch) -> Tensor:
        """[N, dim] one vector a text; texts carry "token", their items as "row", and none is empty."""
        if not len(texts):
            # Connected to every parameter, so that a rank without items has gradients of zero.
            return sum((param.sum() for param in self.parameters()), start=self.pieces.new_zeros(())) * 0 + (
                self.pieces.new_zeros(0, self.project.out_features)
            )
        layout = SequenceLayout(texts.offsets, device=self.pieces.device)
        with dropout_batch(texts, layout):
            states = self.decoder(take(self.pieces, texts.tokens["token"]), texts, layout)
        lengths = texts.lengths.to(states.device, non_blocking=True)
        # `unsafe` leaves checks out that would wait for the GPU; lengths are those of the batch.
        means = torch.segment_reduce(states, "mean", lengths=lengths, axis=0, unsafe=True)
        return self.project(self.norm(means))


def _start_small(linear: nn.Linear) -> None:
    """Inputs have mean square 1, outputs the size of table rows."""
    nn.init.normal_(linear.weight, std=_ROW_STD * linear.in_features**-0.5)
    nn.init.zeros_(linear.bias)
