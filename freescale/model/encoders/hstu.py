"""HSTU: pointwise SiLU attention with relative bias, gated by u (arXiv 2402.17152).

The paper's layers have no feed-forward part; one can be added, dense or made of experts (HSTU-MoE).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.kernels import (
    LayerWeights,
    MaskKind,
    SequenceLayout,
    add_product,
    can_fuse_layer,
    fused_layer,
    gate,
    project_targets,
    project_uvqk,
)
from freescale.model.encoder import EncoderShape
from freescale.model.parts.blocks import InputLayer, RelativeBias
from freescale.model.parts.dropout import Dropout, keys_of_tokens
from freescale.model.parts.ffn import DenseFFN, FeedForward, ffn_takes_pads
from freescale.model.parts.moe import Dispatch, make_ffn
from freescale.model.views.request_view import RequestView
from freescale.model.views.view import View, masked_view
from freescale.registry import register


class HSTULayer(nn.Module):
    """One layer: x + W_o dropout(u * norm(attention(q, k, v))), with u, v, q, k = SiLU(norm(x) W).

    Args:
        dim: width of the states.
        heads: attention heads; each is dim / heads wide.
        max_length: longest sequence; also the constant that scales attention weights.
        dropout: on the gated attention output.
        position_bias: learn a weight for each distance in position.
        time_bias: learn a weight for each bucket of time difference.
        ffn: a feed-forward part after the attention, (tokens, dim) -> (tokens, dim).
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        max_length: int,
        dropout: float,
        position_bias: bool,
        time_bias: bool,
        ffn: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1 / max_length
        self.uvqk = nn.Parameter(torch.empty(dim, 4 * dim).normal_(std=0.02))
        self.output = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.output.weight)
        self.dropout = Dropout(dropout)
        self.bias = RelativeBias(max_length=max_length, position=position_bias, time=time_bias)
        self.feed_forward = None if ffn is None else FeedForward(ffn, dropout=dropout)

    def forward(self, x_TD: Tensor, view: View, number: int) -> Tensor:
        """States after this layer, [T, D]; `number` is the layer's own."""
        x_TD = self._attended(x_TD, view, number)
        return x_TD if self.feed_forward is None else self.feed_forward(x_TD, real=view.real_tokens)

    def _attended(self, x_TD: Tensor, view: View, number: int) -> Tensor:
        """As one function where it can be, else by its parts."""
        bias = self.bias
        position, time = bias.position, bias.time
        dropped = self.dropout.mask(x_TD.shape)
        batch = None
        if can_fuse_layer(x_TD, heads=self.heads):
            batch = view.fusable_batch(time=time is not None)
        if batch is not None:
            output = self.output
            weights = LayerWeights(self.uvqk, output.weight, output.bias, position, time)
            return fused_layer(x_TD, weights, batch, heads=self.heads, scale=self.scale, dropped=dropped)
        proj = project_uvqk(x_TD, self.uvqk, bias=self.output.bias)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (proj.q, proj.k, proj.v))
        attended = view.silu(q, k, v, layer=number, scale=self.scale, position_bias=position, time_bias=time)
        return add_product(proj, gate(proj, attended.flatten(1), mask=dropped), self.output.weight)

    def of_targets(
        self, x_TD: Tensor, view: RequestView, number: int, *, short: bool | None = None
    ) -> Tensor:
        """The same for the candidates alone, [K, D]: as a last layer, where nobody asks for the other tokens.

        Keys and values are those of all tokens; queries, the gate and the products after it those of candidates.
        `short`: compute it so, or all of it as one function; unless given, the way that was measured to be faster.
        """
        experts = self.feed_forward is not None and not isinstance(self.feed_forward.ffn, DenseFFN)
        if short is None:
            short = not (torch.is_grad_enabled() and can_fuse_layer(x_TD, heads=self.heads))
        # Experts are balanced over all tokens. And in training a layer that is one function saves more than short parts
        # do: 32 requests of 1,024 events and 100 candidates took 14.2 ms on an H200 (5 layers), and 18.7 ms by parts.
        if experts or not short:
            return self(x_TD, view, number).index_select(0, view.target_index)
        index, bias = view.target_index, self.bias
        proj = project_targets(x_TD, self.uvqk, index, bias=self.output.bias)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (proj.q, proj.k, proj.v))
        attended = view.only_targets.silu(
            q, k, v, layer=number, scale=self.scale, position_bias=bias.position, time_bias=bias.time
        )
        keys = keys_of_tokens(self.dropout, index)
        dropped = None if keys is None else self.dropout.mask(proj.u.shape, keys)
        gated = gate(proj, attended.flatten(1).index_select(0, index), mask=dropped)
        x_KD = add_product(proj, gated, self.output.weight)
        return x_KD if self.feed_forward is None else self.feed_forward(x_KD, keys)


class HSTU(nn.Module):
    """Stack of HSTU layers over jagged sequences.

    Args:
        dim: width of item vectors and states.
        layers: number of layers.
        heads: attention heads.
        max_length: longest sequence, in tokens.
        dropout: on the input and inside layers.
        position_bias: relative position bias in every layer.
        time_bias: relative time bias in every layer; batches must then carry "time" and "target_time".
        ffn: the feed-forward part of every layer, as `make_ffn` takes it; none unless given.
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
        max_length: int = 200,
        dropout: float = 0.0,
        position_bias: bool = True,
        time_bias: bool = False,
        ffn: Mapping[str, Any] | None = None,
        dispatch: Dispatch | None = None,
        mask: MaskKind | None = None,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.input = InputLayer(dim=dim, max_length=max_length, dropout=dropout)
        self.layers = nn.ModuleList(
            HSTULayer(
                dim=dim,
                heads=heads,
                max_length=max_length,
                dropout=dropout,
                position_bias=position_bias,
                time_bias=time_bias,
                ffn=make_ffn(ffn, dim=dim, dispatch=dispatch),
            )
            for _ in range(layers)
        )

    @property
    def takes_pads(self) -> bool:
        """Whether pads behind the last sequence change nothing: masks and experts elsewhere would have to know them."""
        return self.mask is None and all(
            ffn_takes_pads(each.ffn) for each in self.modules() if isinstance(each, FeedForward)
        )

    def forward(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token of a batch, [T, D]."""
        return self.encode(vectors_TD, masked_view(batch, layout, self.mask))

    def from_rows(
        self, rows_UD: Tensor, item_index_T: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """States from unique item vectors and the index of each token's among them; and the vectors, for the head.

        Here states stay as narrow as the layers leave them.
        """
        x, rows_UD = self.input.gather(rows_UD, item_index_T, layout)
        return self._through(x, masked_view(batch, layout, self.mask)), rows_UD

    def encode(self, vectors_TD: Tensor, view: View) -> Tensor:
        """State of every token of a pass, [T, D]."""
        x = self.input(vectors_TD, view.positions)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self._through(x, view).to(vectors_TD.dtype)

    def encode_targets(self, vectors_TD: Tensor, view: RequestView, *, short: bool | None = None) -> Tensor:
        """State of every candidate of a pass, [K, D]; the last layer works on nothing else, see `of_targets`."""
        x = self.input(vectors_TD, view.positions)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, HSTULayer)
            last = number == len(self.layers) - 1
            x = layer.of_targets(x, view, number, short=short) if last else layer(x, view, number)
        return x.to(vectors_TD.dtype)

    def _through(self, x_TD: Tensor, view: View) -> Tensor:
        """All layers.

        Under autocast the states between layers are kept in half precision too: everything beside the products is
        bound by memory, and this halves it.
        """
        for number, layer in enumerate(self.layers):
            x_TD = layer(x_TD, view, number)
        return x_TD


@register("encoder", "hstu")
def make_hstu(shape: EncoderShape, options: None) -> HSTU:
    """An HSTU as a recipe describes it."""
    return HSTU(
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        max_length=shape.max_length,
        dropout=shape.dropout,
        position_bias=shape.position_bias,
        time_bias=shape.time_bias,
        ffn=shape.ffn,
        dispatch=shape.dispatch,
        mask=shape.mask,
    )


make_hstu.uses_time = True  # type: ignore[attr-defined]
