"""Jagged attention by the Triton kernels: one autograd function, and the tile sizes it runs them with.

Saved for the backward: q, k, v, and for softmax the output and one number a row. Scores are worked out again, and so
is the bias of all pairs where it would take more room than q, k and v. With a bias, the backward of the keys keeps its
score gradients for the queries and the tables, as many sequences at a time as fit (see `bias_gradients`).
Tile sizes are picked by width and length from a short table, never by trying: the first call compiles what it needs
(seconds, kept in Triton's cache on disk), and no call after it is ever slower than it should be.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention.mask import AttentionMask
from freescale.kernels.attention.plan.schedule import AttentionSchedule, Part, Side
from freescale.kernels.attention.triton.bias_gradients import TableGradients, score_parts, score_room
from freescale.kernels.attention.triton.launch import Launch, Tile, last_dense
from freescale.kernels.attention.triton.pair_bias import BiasTables, pair_bias
from freescale.kernels.runtime import Later, kernels_of, later, of_weights

MAX_WIDTH = 256

Takers = tuple[Later | None, Later | None]
"""Who takes the gradients of the position and of the time table later; None: nobody."""


class Tiles(NamedTuple):
    """Tile sizes of each kernel; `values` is None where keys and values share one kernel."""

    forward: Tile
    keys: Tile
    values: Tile | None
    queries: Tile


# Measured on an H200 (benchmarks/hstu_attention.py): head width up to 64, 128, 256; short, then long sequences.
_BY_256 = Tiles(
    forward=Tile(128, 32, 8, 3, True),
    keys=Tile(32, 128, 8, 3, True),
    values=Tile(64, 128, 8, 2, True),
    queries=Tile(128, 32, 8, 3, True),
)
_HALF = {
    64: (
        Tiles(Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), None, Tile(64, 64, 4, 3)),
        Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, True), None, Tile(64, 64, 4, 3, True)),
    ),
    128: (
        Tiles(Tile(64, 64, 4, 3, True), Tile(64, 64, 4, 2, True), None, Tile(64, 64, 4, 2, True)),
        Tiles(Tile(64, 64, 4, 3, True), Tile(64, 64, 4, 2, True), None, Tile(128, 64, 8, 3, True)),
    ),
    256: (_BY_256, _BY_256),
}
# The bias is one more operand: narrower key tiles leave room for it.
_BIASED = {
    64: Tiles(Tile(64, 32, 4, 3), Tile(32, 64, 4, 3), None, Tile(64, 32, 4, 3)),
    128: Tiles(Tile(64, 32, 4, 3, True), Tile(32, 64, 4, 3, True), None, Tile(64, 32, 4, 3, True)),
    256: Tiles(
        Tile(128, 32, 8, 3, True),
        Tile(32, 128, 8, 2, True),
        Tile(32, 128, 8, 3, True),
        Tile(128, 32, 8, 2, True),
    ),
}
# 64 of the widest keys or queries, 32 of the other side and their bias take 232 KiB of shared memory; 227 are there.
_SINGLE = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), None, Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(32, 64, 8, 2), None, Tile(64, 32, 8, 2)),
    256: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 32, 8, 1)),
}


# Queries from score gradients that were kept: one product, bound by memory.
_KEPT_QUERIES = {
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 64, 8, 3, True),
    256: Tile(128, 64, 8, 3, True),
}
_KEPT_SINGLE = {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 1)}


def tiles_for(width: int, dtype: torch.dtype, *, long: bool, biased: bool) -> Tiles:
    """The tile sizes for heads of this width; those of long sequences are larger."""
    limit = next(limit for limit in _SINGLE if width <= limit)
    if dtype.itemsize > 2:
        return _SINGLE[limit]
    return _BIASED[limit] if biased else _HALF[limit][int(long)]


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: AttentionSchedule,
    *,
    alpha: float,
    scale: float | None,
    bias: BiasTables,
    mask: AttentionMask | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Scale * SiLU(alpha q k^T + bias) v, or softmax(alpha q k^T) v where `scale` is None."""
    if not q.shape[0]:
        # Connected to its inputs, so that their gradients are zeros and not missing.
        inputs = [x for x in (q, k, bias.position, bias.time) if x is not None]
        none = v.new_zeros(0, q.shape[1], v.shape[2])
        return none + 0 * sum((x.sum() for x in (*inputs, v)), start=v.new_zeros(())).to(v.dtype)
    tiles = tiles or tiles_for(max(q.shape[-1], v.shape[-1]), q.dtype, long=work.long, biased=bool(bias))
    takers = later(bias.position), later(bias.time)
    return FusedAttention.apply(  # type: ignore[no-untyped-call]
        *(last_dense(x) for x in (q, k, v)), *bias, work, mask, alpha, scale, tiles, takers
    )


class FusedAttention(torch.autograd.Function):
    """Attention over [T, heads, width]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        buckets: Tensor | None,
        work: AttentionSchedule,
        mask: AttentionMask | None,
        alpha: float,
        scale: float | None,
        tiles: Tiles,
        takers: Takers = (None, None),
    ) -> Tensor:
        """[T, heads, width of v]; `takers` get the gradients of the two tables later."""
        forward_kernel = kernels_of("attention.triton.attention_kernels").forward_kernel

        launch = Launch(q, k, v, work, mask, alpha=alpha, softmax=scale is None)
        bias = BiasTables(position_bias, time_bias, buckets)
        pairs = pair_bias(launch, bias)
        out, log_sum = launch.room_for(v, *q.shape[:2], v.shape[2]), launch.row_sums()
        launch.tiles(
            forward_kernel,
            "queries",
            tiles.forward,
            read={"Q": q, "K": k, "V": v},
            write={"Out": out},
            more={"LogSum": log_sum, "Bias": pairs},
            numbers={"scale": scale or 0.0},
            options={"BIAS": _how(pairs, launch)},
        )
        rest = (out, log_sum) if scale is None else (pairs,) if _small(pairs, q, k, v) else ()
        ctx.save_for_backward(q, k, v, position_bias, time_bias, buckets, *rest)
        ctx.plan = (work, mask, alpha, scale, tiles)
        ctx.takers = takers
        return out

    @staticmethod
    def gradients(
        ctx: Any, grad: Tensor, rooms: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor | None, ...]:
        """Keys and values, queries, then the tables of the bias; the bias of all pairs is made again if it is large.

        Args:
            ctx: what the forward kept.
            grad: of its output.
            rooms: where the gradients of queries, keys and values go, as many heads each; pads in it must be 0.
        """
        q, k, v, *tables = ctx.saved_tensors[:6]
        rest = ctx.saved_tensors[6:]
        work, mask, alpha, scale, tiles = ctx.plan
        grad = last_dense(grad)
        launch = Launch(q, k, v, work, mask, alpha=alpha, softmax=scale is None)
        bias = BiasTables(*tables)
        pairs = rest[0] if rest and scale is not None else pair_bias(launch, bias)
        inner = alpha if scale is None else alpha * scale / 2
        factors = {"dk_scale": inner, "dv_scale": 1.0 if scale is None else scale, "dq_scale": inner}
        call = _Backward(
            launch, tiles, grad, _row_sums(launch, grad, rest), factors, *(rooms or _outputs(launch))
        )
        d_tables = call.run(bias, pairs, factor=(scale or 0.0) / 2, takers=ctx.takers)
        dk, dv = (_over_group(x, like, launch.group) for x, like in ((call.dk, k), (call.dv, v)))
        return call.dq, dk, dv, *d_tables, *(None,) * 7

    backward = staticmethod(once_differentiable(gradients))  # type: ignore[assignment]


class _Backward(NamedTuple):
    """What the backward kernels read, and what they fill."""

    launch: Launch
    tiles: Tiles
    grad: Tensor
    row_sums: dict[str, Tensor]
    factors: dict[str, float]
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def run(
        self, bias: BiasTables, pairs: Tensor, *, factor: float, takers: Takers
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill the gradients of queries, keys and values; those of the bias tables are returned, or come later."""
        parts = score_parts(self.launch, bias)
        tables = TableGradients(self.launch, bias, parts) if bias else None
        scores = score_room(self.launch, parts)
        for number, part in enumerate(parts):
            self._keys_and_values(part.of_store(pairs) if bias else pairs, scores, part)
            self._kept_queries(scores, part)
            if tables is not None and len(parts) > 1:  # the next part writes over its score gradients
                tables.add_kept(number, scores)
        if not parts:
            self._keys_and_values(pairs, scores, None)
            self._queries(pairs)
        if tables is None:
            return None, None
        found = partial(self._table_gradients, tables, parts, scores, pairs, factor)
        kept = (scores, *(() if parts else (pairs, self.grad)), self.launch.q, self.launch.k, self.launch.v)
        d_position, d_time = of_weights(found, (bias.position, bias.time), takers, *kept)
        return d_position, d_time

    def _table_gradients(
        self, tables: TableGradients, parts: list[Part], scores: Tensor, pairs: Tensor, factor: float
    ) -> tuple[Tensor | None, Tensor | None]:
        if len(parts) == 1:
            tables.add_kept(0, scores)
        if not parts:
            tables.add_again(pairs, self.grad)
        return tables.result(factor=factor)

    def _keys_and_values(self, pairs: Tensor, scores: Tensor, part: Part | None) -> None:
        """Gradients of keys and values, by one kernel or by one each; score gradients are kept for a part."""
        keys_backward_kernel = kernels_of("attention.triton.attention_kernels").keys_backward_kernel

        together = [(self.tiles.keys, True, True)]
        apart = [(self.tiles.keys, True, False), (self.tiles.values, False, True)]
        for tile, want_k, want_v in together if self.tiles.values is None else apart:
            wanted = {"WANT_K": want_k, "WANT_V": want_v, "KEEP": part is not None and want_k}
            more = {"Bias": pairs, "Scores": scores, **self.row_sums}
            self._start(
                keys_backward_kernel, "keys", tile, {"DK": self.dk, "DV": self.dv}, more, wanted, part
            )

    def _queries(self, pairs: Tensor) -> None:
        queries_backward_kernel = kernels_of("attention.triton.attention_kernels").queries_backward_kernel

        more = {"Bias": pairs, **self.row_sums}
        self._start(queries_backward_kernel, "queries", self.tiles.queries, {"DQ": self.dq}, more, {}, None)

    def _kept_queries(self, scores: Tensor, part: Part) -> None:
        """Gradient of the queries of a part, from score gradients that were kept."""
        kept_queries_kernel = kernels_of("attention.triton.kept_scores").kept_queries_kernel

        launch = self.launch
        launch.tiles(
            kept_queries_kernel,
            "queries",
            _kept_tile(launch.q),
            part=part,
            read={"K": launch.k},
            write={"DQ": self.dq},
            more={"Scores": scores},
            numbers={"dq_scale": self.factors["dq_scale"]},
            options={},
        )

    def _start(
        self, kernel: Any, side: Side, tile: Any, write: Any, more: Any, options: Any, part: Part | None
    ) -> None:
        launch = self.launch
        launch.tiles(
            kernel,
            side,
            tile,
            part=part,
            read={"Q": launch.q, "K": launch.k, "V": launch.v, "DO": self.grad},
            write=write,
            more=more,
            numbers=self.factors,
            options={**options, "BIAS": _how(more["Bias"], launch)},
        )


def _outputs(launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of queries, keys and values."""
    dq = launch.room_for(launch.q, *launch.q.shape)
    return dq, _by_query_head(launch.k, launch), _by_query_head(launch.v, launch)


def _kept_tile(q: Tensor) -> Tile:
    limit = next(limit for limit in _KEPT_QUERIES if q.shape[-1] <= limit)
    return (_KEPT_QUERIES if q.dtype.itemsize == 2 else _KEPT_SINGLE)[limit]


def _by_query_head(x: Tensor, launch: Launch) -> Tensor:
    """Room for the gradient that each query head gives to keys or values; where some share a head, parts to add up."""
    if launch.group == 1:
        return launch.room_for(x, *x.shape)
    return launch.room_for(x, x.shape[0], launch.num_heads, x.shape[2], dtype=launch.sums_dtype)


def _over_group(parts: Tensor, x: Tensor, group: int) -> Tensor:
    """Parts added up, in the type and shape of `x`. No program adds to what another writes, so the bits are fixed."""
    return parts if group == 1 else parts.unflatten(1, (-1, group)).sum(2).to(x.dtype)


def _row_sums(launch: Launch, grad: Tensor, saved: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What a softmax row needs in the backward: the log of its sum, and its output times its gradient."""
    if not launch.softmax:
        return {"LogSum": launch.nothing, "Delta": launch.nothing}
    out, log_sum = saved
    return {"LogSum": log_sum, "Delta": (out.to(log_sum.dtype) * grad).sum(-1).contiguous()}


def _small(pairs: Tensor, *inputs: Tensor) -> bool:
    """Whether the bias of all pairs takes less room than the inputs, which are kept anyway."""
    return pairs.nbytes < sum(x.nbytes for x in inputs)


def _how(pairs: Tensor, launch: Launch) -> str:
    """A product with the unit matrix is exact where the bias is not rounded again: half precision."""
    if pairs.data_ptr() == launch.nothing.data_ptr():
        return "none"
    return "product" if pairs.dtype == torch.float16 else "sum"
