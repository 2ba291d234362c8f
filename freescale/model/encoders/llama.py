"""A decoder in the style of LLaMA over jagged sequences: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    x ──norm──> q, k, v ──rotate q, k──> softmax attention ──merge──> + x ──norm──> feed-forward ──> + ──> next layer

There is no position table: each query and key is turned by an angle that grows with its position, so that their product
depends on how far apart they are. The feed-forward part is one module [tokens, dim] -> [tokens, dim]; another one
(a mixture of experts) can take its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.kernels import MaskKind, SequenceLayout
from freescale.model.encoder import EncoderShape
from freescale.model.parts.blocks import Linear
from freescale.model.parts.dropout import Dropout
from freescale.model.parts.ffn import DenseFFN, ffn_takes_pads, run_ffn
from freescale.model.parts.moe import Dispatch, make_ffn, moe_layers
from freescale.model.views.view import View, masked_view
from freescale.registry import register

_INIT_STD = 0.02


class RMSNorm(nn.Module):
    """X divided by the root of its mean square, times a learned weight; in float32 or better.

    Args:
        dim: width.
        eps: keeps vectors of zeros finite.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type as x."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class Rotation:
    """Turns pairs of numbers of a head by an angle: position * base^(-pair / number of pairs).

    Args:
        positions_T: position of each token in its sequence.
        width: of a head; its first half pairs up with its second half.
        base: the slowest pair turns once in about 6 * base positions.
        dtype: of the result's sines.
    """

    def __init__(self, positions_T: Tensor, *, width: int, base: float, dtype: torch.dtype) -> None:
        pairs = torch.arange(width // 2, dtype=torch.float64, device=positions_T.device)
        # float64: in float32 the angle of position 4096 would be off by 1e-4.
        angles = positions_T.double()[:, None] * base ** (-pairs / (width // 2))
        self._cos, self._sin = (wave.to(dtype)[:, None, :] for wave in (angles.cos(), angles.sin()))

    def __call__(self, x_THD: Tensor) -> Tensor:
        """Queries or keys, turned."""
        first, second = (half.to(self._cos.dtype) for half in x_THD.chunk(2, dim=-1))
        turned = (first * self._cos - second * self._sin, second * self._cos + first * self._sin)
        return torch.cat(turned, dim=-1).to(x_THD.dtype)


class DecoderLayer(nn.Module):
    """y = x + attention(norm(x)); y + feed-forward(norm(y)).

    Args:
        dim: width of the states.
        heads: query heads; each is dim / heads wide, an even number.
        kv_heads: heads of keys and values, a divisor of `heads`.
        ffn: [T, dim] -> [T, dim].
        dropout: on what attention and the feed-forward part add.
    """

    def __init__(self, *, dim: int, heads: int, kv_heads: int, ffn: nn.Module, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.width = dim // heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.qkv = Linear(dim, (heads + 2 * kv_heads) * self.width, bias=False)
        self.merge = Linear(dim, dim, bias=False)
        self.ffn = ffn
        self.attention_dropout, self.ffn_dropout = Dropout(dropout), Dropout(dropout)

    def forward(self, x_TD: Tensor, view: View, number: int, rotate: Rotation) -> Tensor:
        """States after this layer, [T, dim]; `number` is the layer's own."""
        parts = self.qkv(self.attention_norm(x_TD)).unflatten(-1, (-1, self.width))
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        attended = view.softmax(rotate(q), rotate(k), v, layer=number, scale=self.width**-0.5)
        y = x_TD + self.attention_dropout(self.merge(attended.flatten(1))).to(x_TD.dtype)
        return y + self.ffn_dropout(run_ffn(self.ffn, self.ffn_norm(y), view.real_tokens)).to(x_TD.dtype)


class Decoder(nn.Module):
    """Stack of decoder layers over jagged sequences.

    Args:
        dim: width of item vectors and states.
        layers: number of layers.
        heads: query heads.
        kv_heads: heads of keys and values; as many as `heads` unless given.
        ffn_dim: width inside the feed-forward part; 8/3 of dim, rounded up to a multiple of 8, unless given.
        rope_base: how slowly the slowest pair of a head turns.
        max_length: longest sequence, in tokens; rotary positions know no limit, so it only documents the training.
        dropout: on the input and inside layers.
        ffn: another feed-forward part than SwiGLU, see `make_ffn`.
        dispatch: where its experts live.
        mask: what tokens see of what came before; all of it unless given.
    """

    calls_layers = True

    def __init__(
        self,
        *,
        dim: int,
        layers: int,
        heads: int = 1,
        kv_heads: int | None = None,
        ffn_dim: int | None = None,
        rope_base: float = 10_000.0,
        max_length: int = 200,
        dropout: float = 0.0,
        ffn: Mapping[str, Any] | None = None,
        dispatch: Dispatch | None = None,
        mask: MaskKind | None = None,
    ) -> None:
        super().__init__()
        self.mask = mask
        hidden = ffn_dim or 8 * math.ceil(dim / 3)
        self.width, self.rope_base = dim // heads, rope_base
        self.max_length = max_length
        self.layers = nn.ModuleList(
            DecoderLayer(
                dim=dim,
                heads=heads,
                kv_heads=kv_heads or heads,
                ffn=make_ffn(ffn, dim=dim, dispatch=dispatch) or DenseFFN(dim=dim, hidden=hidden),
                dropout=dropout,
            )
            for _ in range(layers)
        )
        self.final_norm = RMSNorm(dim)
        self.dropout = Dropout(dropout)
        self._initialise()

    @property
    def takes_pads(self) -> bool:
        """Whether pads behind the last sequence change nothing: masks and experts elsewhere would have to know them."""
        return self.mask is None and all(
            ffn_takes_pads(layer.ffn) for layer in self.layers if isinstance(layer, DecoderLayer)
        )

    def forward(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token of a batch, [T, D]."""
        return self.encode(vectors_TD, masked_view(batch, layout, self.mask))

    def encode(self, vectors_TD: Tensor, view: View) -> Tensor:
        """State of every token of a pass, [T, D]; between layers in half precision under autocast, like HSTU's."""
        # Item vectors start small (0.02); at the size of what layers add, the first norms see both.
        x = self.dropout(vectors_TD * math.sqrt(vectors_TD.shape[-1]))
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        rotate = Rotation(view.positions, width=self.width, base=self.rope_base, dtype=exact)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for number, layer in enumerate(self.layers):
            x = layer(x, view, number, rotate)
        return self.final_norm(x.to(vectors_TD.dtype))

    def _initialise(self) -> None:
        """Normal, std 0.02; what is added to the states is scaled down with depth, so that their size stays.

        Experts have drawn their own, so that they start alike on any rank.
        """
        added_std = _INIT_STD / math.sqrt(2 * len(self.layers))
        experts = {id(param) for _, layer in moe_layers(self) for param in layer.parameters()}
        for name, param in self.named_parameters():
            if param.ndim > 1 and id(param) not in experts:
                adds = name.endswith(("merge.weight", "w_out"))
                nn.init.normal_(param, std=added_std if adds else _INIT_STD)


@register("encoder", "llama")
def make_llama(shape: EncoderShape, options: None) -> Decoder:
    """A decoder as a recipe describes it."""
    return Decoder(
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn_dim=shape.ffn_dim,
        rope_base=shape.rope_base,
        max_length=shape.max_length,
        dropout=shape.dropout,
        ffn=shape.ffn,
        dispatch=shape.dispatch,
        mask=shape.mask,
    )
