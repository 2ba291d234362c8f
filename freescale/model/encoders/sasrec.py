"""SASRec, the baseline: causal softmax attention and a small feed-forward part (arXiv 1808.09781)."""

from __future__ import annotations

from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.kernels import MaskKind, SequenceLayout
from freescale.model.encoder import EncoderShape
from freescale.model.parts.blocks import InputLayer, Linear
from freescale.model.parts.dropout import Dropout
from freescale.model.views.view import View, masked_view
from freescale.registry import register


class SASRecLayer(nn.Module):
    """y = norm(x) + attention(norm(x), x, x); z = norm(y); z + FFN(z).

    Args:
        dim: width of the states and of the hidden layer.
        heads: attention heads.
        dropout: on attention output and inside the feed-forward part.
    """

    def __init__(self, *, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.attention_norm = nn.LayerNorm(dim, eps=1e-8)
        self.query, self.key, self.value, self.merge = (Linear(dim, dim) for _ in range(4))
        self.ffn_norm = nn.LayerNorm(dim, eps=1e-8)
        self.ffn = nn.Sequential(
            Linear(dim, dim), nn.ReLU(), Dropout(dropout), Linear(dim, dim), Dropout(dropout)
        )
        self.dropout = Dropout(dropout)
        for linear in (self.query, self.key, self.value, self.merge):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x_TD: Tensor, view: View, number: int) -> Tensor:
        """States after this layer, [T, D]; `number` is the layer's own."""
        normed = self.attention_norm(x_TD)
        q, k, v = (
            project(source).unflatten(-1, (self.heads, -1))
            for project, source in ((self.query, normed), (self.key, x_TD), (self.value, x_TD))
        )
        attended = view.softmax(q, k, v, layer=number, scale=self.scale)
        y = self.ffn_norm(normed + self.dropout(self.merge(attended.flatten(1))))
        return y + self.ffn(y)


class SASRec(nn.Module):
    """Stack of SASRec layers over jagged sequences.

    Args:
        dim: width of item vectors and states.
        layers: number of layers.
        heads: attention heads.
        max_length: longest sequence, in tokens.
        dropout: on the input and inside layers.
        mask: what tokens see of what came before; all of it unless given.
    """

    calls_layers = True

    def __init__(
        self,
        *,
        dim: int,
        layers: int,
        heads: int = 1,
        max_length: int = 200,
        dropout: float = 0.0,
        mask: MaskKind | None = None,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.input = InputLayer(dim=dim, max_length=max_length, dropout=dropout)
        self.layers = nn.ModuleList(SASRecLayer(dim=dim, heads=heads, dropout=dropout) for _ in range(layers))
        self.final_norm = nn.LayerNorm(dim, eps=1e-8)

    @property
    def takes_pads(self) -> bool:
        """Whether pads behind the last sequence change nothing: masks would have to know them."""
        return self.mask is None

    def forward(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token of a batch, [T, D]."""
        return self.encode(vectors_TD, masked_view(batch, layout, self.mask))

    def encode(self, vectors_TD: Tensor, view: View) -> Tensor:
        """State of every token of a pass, [T, D]."""
        x = self.input(vectors_TD, view.positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, view, number)
        return self.final_norm(x)


@register("encoder", "sasrec")
def make_sasrec(shape: EncoderShape, options: None) -> SASRec:
    """A SASRec as a recipe describes it."""
    return SASRec(
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        max_length=shape.max_length,
        dropout=shape.dropout,
        mask=shape.mask,
    )
