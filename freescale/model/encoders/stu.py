"""STU: the sequence model of MLPerf's DLRMv4, for requests with candidates.

input     sqrt(dim) * token + vector of its position, counted back from the candidates + vector of the time to the
request, in buckets of sqrt(minutes); tokens in front have positions of their own, and the last bucket
layers    `kernels/hstu/stu.py`; scores are divided by one length for all batches
output    of each candidate: its state and the hour and the weekday it is asked at, through one product and a norm
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import (
    SequenceLayout,
    STUWeights,
    Sum,
    Taken,
    can_fuse_stu,
    fused_stu_layer,
    fused_stu_targets,
    stu_gate,
    stu_project,
    sum_taken,
)
from freescale.kernels.runtime import linear
from freescale.model.encoder import EncoderShape
from freescale.model.parts.blocks import Linear
from freescale.model.parts.dropout import Dropout, keys_of_tokens
from freescale.model.parts.normed_mlp import WideNorm
from freescale.model.views.request_view import RequestView
from freescale.model.views.view import BatchView, View, masked_view
from freescale.registry import option, register

_MINUTE_S = 60.0
_PERIODS = ((3600, 24), (86_400, 7))
"""Hours of a day, days of a week."""
_TURN = 2 * 3.14
"""As the benchmark writes it."""


class STULayer(nn.Module):
    """One layer.

    Args:
        dim: width of the states.
        heads: attention heads; each is dim / heads wide.
        length: what attention weights are divided by.
        dropout: on what goes into the last product.
    """

    def __init__(self, *, dim: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.scale, self.alpha = heads, 1 / length, (dim // heads) ** -0.5
        self.norm, self.norm_bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.uvqk = nn.Parameter(torch.empty(dim, 4 * dim))
        self.uvqk_bias = nn.Parameter(torch.zeros(4 * dim))
        self.gate, self.gate_bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.output = nn.Parameter(torch.empty(dim, 3 * dim))
        nn.init.xavier_uniform_(self.uvqk)
        nn.init.xavier_uniform_(self.output)
        self.dropout = Dropout(dropout)

    def forward(self, x_TD: Tensor, view: View, number: int) -> Tensor:
        """States after this layer, [T, D]; `number` is the layer's own."""
        dropped = self.dropout.mask(x_TD.shape)
        batch = view.fusable_batch(time=False) if can_fuse_stu(x_TD, heads=self.heads) else None
        if batch is not None:
            if isinstance(view, RequestView) and view.one_candidate:
                batch = batch._replace(mask=None)
            return fused_stu_layer(
                x_TD,
                self._weights,
                batch,
                heads=self.heads,
                alpha=self.alpha,
                scale=self.scale,
                dropped=dropped,
            )
        wide = stu_project(x_TD, self.norm, self.norm_bias, self.uvqk, self.uvqk_bias)
        u, v, q, k = wide.chunk(4, dim=1)
        attended = self._attention(q * self.alpha, k, v, view, number)
        gated = stu_gate(u, attended, self.gate, self.gate_bias, dropped)
        return x_TD + linear(gated, self.output)

    def of_targets(self, x_TD: Tensor, view: RequestView, number: int) -> Tensor:
        """The same for the candidates alone, [K, D]: keys and values of all tokens, the rest of candidates."""
        index = view.target_index
        u, attended, own = self._of_targets(x_TD, index, view, number)
        keys = keys_of_tokens(self.dropout, index)
        dropped = None if keys is None else self.dropout.mask(u.shape, keys)
        return own + linear(stu_gate(u, attended, self.gate, self.gate_bias, dropped), self.output)

    def _of_targets(
        self, x_TD: Tensor, index: Tensor, view: RequestView, number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u, attended values and states of the candidates."""
        batch = view.only_targets.fusable_batch(time=False) if can_fuse_stu(x_TD, heads=self.heads) else None
        if batch is not None:
            options = {"heads": self.heads, "alpha": self.alpha, "scale": self.scale}
            return fused_stu_targets(x_TD, index, self._weights, batch, **options)
        (w_u, w_v, w_q, w_k), (b_u, b_v, b_q, b_k) = self.uvqk.chunk(4, dim=1), self.uvqk_bias.chunk(4)
        of_all = torch.cat([w_v, w_k], dim=1), torch.cat([b_v, b_k])
        v, k = stu_project(x_TD, self.norm, self.norm_bias, *of_all).chunk(2, dim=1)
        own = x_TD.index_select(0, index)
        asking = torch.cat([w_u, w_q], dim=1), torch.cat([b_u, b_q])
        u, q = stu_project(own, self.norm, self.norm_bias, *asking, fused=False).to(v.dtype).chunk(2, dim=1)
        q = torch.zeros_like(v).index_copy(0, index, q * self.alpha)
        attended = self._attention(q, k, v, view.only_targets, number).index_select(0, index)
        return u, attended, own

    @property
    def _weights(self) -> STUWeights:
        return STUWeights(
            self.norm,
            self.norm_bias,
            self.uvqk,
            self.uvqk_bias,
            self.gate,
            self.gate_bias,
            self.output,
        )

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, view: View, number: int) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))
        return view.silu(q, k, v, layer=number, scale=self.scale).flatten(1)


class STUInput(nn.Module):
    """The input of the first layer.

    Args:
        dim: width.
        front: tokens in front of the history.
        positions: vectors of positions; what is further back has the last.
        time_buckets: highest bucket of time.
        dropout: share of the input set to zero in training.
    """

    def __init__(self, *, dim: int, front: int, positions: int, time_buckets: int, dropout: float) -> None:
        super().__init__()
        self.front = front
        self.position = nn.Parameter(torch.empty(positions, dim).uniform_(-1, 1) * positions**-0.5)
        self.time = nn.Parameter(torch.empty(time_buckets + 1, dim).uniform_(-1, 1) * time_buckets**-0.5)
        self.dropout = Dropout(dropout)

    def forward(self, vectors: Tensor | Sum, view: BatchView) -> Tensor:
        """Input of the first layer, [T, D]."""
        scale = math.sqrt(self.position.shape[1])
        place, bucket = self.places(view), self.buckets(view)
        if isinstance(vectors, Sum):
            tokens = [part._replace(scale=part.scale * scale) for part in vectors.parts]
            dtype = vectors.dtype
        else:
            every = torch.arange(len(vectors), device=vectors.device)
            tokens, dtype = [Taken(vectors, every, scale)], vectors.dtype
        added = [Taken(self.position.to(dtype), place), Taken(self.time.to(dtype), bucket)]
        return self.dropout(sum_taken([*tokens, *added]))

    def places(self, view: BatchView) -> Tensor:
        """[T] which vector of a position each token has: those in front 0, 1, ..., then counted from the end."""
        positions, ends = view.positions, view.ends
        back = (ends - positions + self.front).clamp(max=len(self.position) - 1)
        return torch.where(positions < self.front, positions, back)

    def buckets(self, view: BatchView) -> Tensor:
        """[T] which vector of a time each token has: the root of the minutes to the request."""
        asked, time = view.request_times, view.times
        # In single precision, as the benchmark takes it: near the edge of a bucket another one decides otherwise.
        minutes = (asked - time).float().clamp(min=1e-6) / _MINUTE_S
        last = len(self.time) - 1
        bucket = minutes.sqrt().int().clamp(min=0, max=last)
        return torch.where(view.positions < self.front, last, bucket)


class STU(nn.Module):
    """Stack of layers over requests.

    Args:
        dim: width of tokens and states.
        layers: how many.
        heads: attention heads.
        length: what attention weights are divided by.
        front: tokens in front of every history.
        dropout: inside layers.
        input_dropout: on the input.
        positions: vectors of positions.
        time_buckets: highest bucket of time.
    """

    calls_layers = True

    takes_sums = True
    periods: Tensor

    def __init__(
        self,
        *,
        dim: int,
        layers: int,
        heads: int,
        length: int,
        front: int = 0,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        positions: int = 8192,
        time_buckets: int = 2048,
        short: bool = True,
    ) -> None:
        super().__init__()
        self.short = short
        self.input = STUInput(
            dim=dim, front=front, positions=positions, time_buckets=time_buckets, dropout=input_dropout
        )
        self.layers = nn.ModuleList(
            STULayer(dim=dim, heads=heads, length=length, dropout=dropout) for _ in range(layers)
        )
        self.output = Linear(dim + 2 * len(_PERIODS), dim)
        nn.init.xavier_normal_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.norm = WideNorm(dim)
        # On the device from the start: numbers that are sent there in a pass make the host wait for it.
        self.register_buffer("periods", torch.tensor(_PERIODS), persistent=False)

    def forward(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token of a batch, [T, D]."""
        return self.encode(vectors_TD, masked_view(batch, layout, None))

    def encode(self, vectors_TD: Tensor | Sum, view: View) -> Tensor:
        """State of every token of a pass, [T, D]."""
        seen = _checked(view)
        x = self._narrow(self.input(vectors_TD, seen))
        for number, layer in enumerate(self.layers):
            x = layer(x, view, number)
        return self._asked(x.to(vectors_TD.dtype), seen.times)

    def encode_targets(
        self, vectors_TD: Tensor | Sum, view: RequestView, *, short: bool | None = None
    ) -> Tensor:
        """State of every candidate of a pass, [K, D]; the last layer works on nothing else where it is `short`."""
        x = self._narrow(self.input(vectors_TD, _checked(view)))
        short = self.short if short is None else short
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, STULayer)
            if number < len(self.layers) - 1:
                x = layer(x, view, number)
            elif short:
                x = layer.of_targets(x, view, number)
            else:
                x = layer(x, view, number).index_select(0, view.target_index)
        times = view.times.index_select(0, view.target_index)
        return self._asked(x.to(vectors_TD.dtype), times)

    def _narrow(self, x_TD: Tensor) -> Tensor:
        """Under autocast states between layers are of half precision."""
        if torch.is_autocast_enabled(x_TD.device.type) and x_TD.dtype != torch.float64:
            return x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        return x_TD

    def _asked(self, x_KD: Tensor, time_K: Tensor) -> Tensor:
        """States with the hour and the weekday they are asked at."""
        seconds = time_K.float()[:, None]
        units, sizes = self.periods.to(seconds.dtype).unbind(1)
        elapsed = torch.remainder(torch.div(seconds, units, rounding_mode="floor"), sizes) / sizes * _TURN
        turned = torch.stack([elapsed.cos(), elapsed.sin()], dim=-1).flatten(1)
        states: Tensor = self.norm(self.output(torch.cat([x_KD, turned.to(x_KD.dtype)], dim=1)))
        return states.to(x_KD.dtype)


def _checked(view: View) -> BatchView:
    """A pass over a whole batch with times: positions and times are counted back from its end."""
    if not isinstance(view, BatchView) or not view.has_times:
        raise ConfigError(
            "model.kind=stu counts positions and times back from the request: it needs whole histories with times",
            got="a cache of a history" if not isinstance(view, BatchView) else "data without times",
            next_step="use model.kind=hstu, or data with a column time",
        )
    return view


@dataclass(frozen=True, kw_only=True)
class STUOptions:
    """Keys of a recipe's model."""

    positions: int = option(8192, help="vectors of positions, counted back from the candidates")
    time_buckets: int = option(2048, help="highest bucket of sqrt(minutes) to the request")
    input_dropout: float | None = option(None, help="dropout on the input; null: as model.dropout")
    scale_length: int | None = option(
        None, help="what attention weights are divided by; null: the longest sequence"
    )
    short_last: bool = option(True, help="compute the last layer for candidates alone")

    def __post_init__(self) -> None:
        if self.positions < 2 or self.time_buckets < 1 or (self.scale_length or 1) < 1:
            raise ConfigError(
                "model.positions, model.time_buckets, model.scale_length: positions from 2 on, the others from 1 on",
                got=f"{self.positions}, {self.time_buckets}, {self.scale_length}",
            )


@register("encoder", "stu", options=STUOptions)
def make_stu(shape: EncoderShape, options: STUOptions) -> STU:
    """An STU as a recipe describes it."""
    if not shape.time_bias:
        raise ConfigError(
            "model.kind=stu reads the time of every event",
            got="data without times, data.use_time=false or model.time_bias=false",
            next_step="leave these keys out, or use model.kind=hstu for data without a column time",
        )
    return STU(
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        length=options.scale_length or shape.max_length,
        front=shape.front,
        dropout=shape.dropout,
        input_dropout=shape.dropout if options.input_dropout is None else options.input_dropout,
        positions=options.positions,
        time_buckets=options.time_buckets,
        short=options.short_last,
    )


make_stu.uses_time = True  # type: ignore[attr-defined]
