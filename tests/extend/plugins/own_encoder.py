"""GRU4Rec (arXiv 1511.06939): an encoder from outside the package."""

from dataclasses import dataclass

import torch
from torch import nn

from freescale import Dropout, register


@dataclass(frozen=True, kw_only=True)
class GruOptions:
    """Keys of a recipe, beside those of every encoder."""

    gru_layers: int = 1


@register("encoder", "gru4rec", options=GruOptions)
class GRU4Rec(nn.Module):
    """One state a token, from a recurrent layer over each history."""

    def __init__(self, shape, options):
        super().__init__()
        self.gru = nn.GRU(shape.dim, shape.dim, num_layers=options.gru_layers, batch_first=True)
        self.drop = Dropout(shape.dropout, rows="padded")
        self.out = nn.Linear(shape.dim, shape.dim)

    def forward(self, vectors, batch, layout):
        if not len(batch) or not len(vectors):
            return self.out(vectors)
        lengths = batch.lengths
        padded = nn.utils.rnn.pad_sequence(vectors.split(lengths.tolist()), batch_first=True)
        states, _ = self.gru(self.drop(padded))
        inside = torch.arange(padded.shape[1]) < lengths[:, None]
        return self.out(states[inside.to(vectors.device)])
