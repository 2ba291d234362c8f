"""Jagged attention by the Triton kernels: one autograd function, and the tile sizes it runs them with.

Saved for the backward: q, k, v (and for softmax the output and one number a row). Scores and bias are worked out again.
Tile sizes are picked by width and length from a short table, never by trying: the first call compiles what it needs
(seconds, kept in Triton's cache on disk), and no call after it is ever slower than it should be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention_launch import Launch, Tile, last_dense
from freescale.kernels.attention_mask import AttentionMask
from freescale.kernels.attention_work import AttentionWork
from freescale.kernels.pair_bias import BiasTables, bias_gradients, pair_bias

MAX_WIDTH = 256
# From this mean length on, as a token sees it, larger tiles pay.
LONG = 3000


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
_SINGLE = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), None, Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(32, 64, 8, 2), None, Tile(64, 32, 8, 2)),
    256: Tiles(Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
}


def tiles_for(width: int, dtype: torch.dtype, mean_length: float) -> Tiles:
    """The tile sizes for heads of this width and sequences of this length."""
    if dtype.itemsize == 2:
        return next(of for limit, of in _HALF.items() if width <= limit)[int(mean_length >= LONG)]
    return next(of for limit, of in _SINGLE.items() if width <= limit)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: AttentionWork,
    *,
    alpha: float,
    scale: float | None,
    bias: BiasTables,
    mask: AttentionMask | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Scale * SiLU(alpha q k^T + bias) v, or softmax(alpha q k^T) v where `scale` is None."""
    if not len(q):
        # Connected to its inputs, so that their gradients are zeros and not missing.
        inputs = [x for x in (q, k, bias.position, bias.time) if x is not None]
        return v + 0 * sum((x.sum() for x in inputs), start=v.new_zeros(())).to(v.dtype)
    tiles = tiles or tiles_for(max(q.shape[-1], v.shape[-1]), q.dtype, work.mean_length)
    return _FusedAttention.apply(  # type: ignore[no-untyped-call]
        *(last_dense(x) for x in (q, k, v)), *bias, work, mask, alpha, scale, tiles
    )


class _FusedAttention(torch.autograd.Function):
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
        work: AttentionWork,
        mask: AttentionMask | None,
        alpha: float,
        scale: float | None,
        tiles: Tiles,
    ) -> Tensor:
        from freescale.kernels.triton_attention import forward_kernel

        launch = Launch(q, k, v, work, mask, alpha=alpha, softmax=scale is None)
        bias = BiasTables(position_bias, time_bias, buckets)
        out, log_sum = v.new_empty(v.shape), launch.row_sums()
        launch.tiles(
            forward_kernel,
            "queries",
            tiles.forward,
            read={"Q": q, "K": k, "V": v},
            write={"Out": out},
            LogSum=log_sum,
            scale=scale or 0.0,
            **_bias_arguments(bias, pair_bias(launch, bias)),
        )
        rest = (out, log_sum) if scale is None else ()
        ctx.save_for_backward(q, k, v, position_bias, time_bias, buckets, *rest)
        ctx.plan = (work, mask, alpha, scale, tiles)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Keys and values, queries, then the tables of the bias; the bias of all pairs is made again for them."""
        q, k, v, *tables = ctx.saved_tensors[:6]
        work, mask, alpha, scale, tiles = ctx.plan
        grad = last_dense(grad)
        launch = Launch(q, k, v, work, mask, alpha=alpha, softmax=scale is None)
        bias = BiasTables(*tables)
        pairs = pair_bias(launch, bias)
        sums = _row_sums(launch, grad, ctx.saved_tensors[6:])
        shared = {"read": {"Q": q, "K": k, "V": v, "DO": grad}, **sums, **_bias_arguments(bias, pairs)}
        inner = alpha if scale is None else alpha * scale / 2
        dk, dv = _keys_and_values(launch, tiles, shared, dk_scale=inner, dv_scale=1.0 if scale is None else scale)
        dq = _queries(launch, tiles, shared, dq_scale=inner)
        d_tables = bias_gradients(launch, bias, pairs, grad, factor=(scale or 0.0) / 2)
        return dq, dk, dv, *d_tables, *(None,) * 6


def _keys_and_values(
    launch: Launch, tiles: Tiles, shared: dict[str, Any], *, dk_scale: float, dv_scale: float
) -> tuple[Tensor, Tensor]:
    from freescale.kernels.triton_attention import keys_backward_kernel

    dk, dv = launch.k.new_empty(launch.k.shape), launch.v.new_empty(launch.v.shape)
    together = [(tiles.keys, True, True)]
    apart = [(tiles.keys, True, False), (tiles.values, False, True)]
    for tile, want_k, want_v in together if tiles.values is None else apart:
        launch.tiles(
            keys_backward_kernel,
            "keys",
            tile,
            write={"DK": dk, "DV": dv},
            dk_scale=dk_scale,
            dv_scale=dv_scale,
            WANT_K=want_k,
            WANT_V=want_v,
            **shared,
        )
    return dk, dv


def _queries(launch: Launch, tiles: Tiles, shared: dict[str, Any], *, dq_scale: float) -> Tensor:
    from freescale.kernels.triton_attention import queries_backward_kernel

    dq = launch.q.new_empty(launch.q.shape)
    launch.tiles(
        queries_backward_kernel, "queries", tiles.queries, write={"DQ": dq}, dq_scale=dq_scale, **shared
    )
    return dq


def _row_sums(launch: Launch, grad: Tensor, saved: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What a softmax row needs in the backward: the log of its sum, and its output times its gradient."""
    if not saved:
        return {"LogSum": launch.nothing, "Delta": launch.nothing}
    out, log_sum = saved
    return {"LogSum": log_sum, "Delta": (out.to(log_sum.dtype) * grad).sum(-1).contiguous()}


def _bias_arguments(bias: BiasTables, pairs: Tensor) -> dict[str, Any]:
    # A product with the unit matrix is exact where the bias is not rounded again: half precision.
    how = "none" if not bias else "product" if pairs.dtype == torch.float16 else "sum"
    return {"Bias": pairs, "BIAS": how}
