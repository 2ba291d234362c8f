"""A whole HSTU layer as one function of autograd: projections, attention, gate and product.

Apart they are four functions with six views between them, and autograd keeps a node for each and hands tensors from
one to the next: about a fifth of a layer's host time, which is what a small batch waits for. The parts are those of
`parts` and `fused_attention`, and each keeps for its gradients what it keeps alone.

Attention could write the gradients before the SiLU itself, which saves writing and reading those after it: 0.15 ms a
layer of width 512. Tried on an H200, its kernels lost 0.5 ms by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention import (
    MAX_WIDTH,
    FusedAttention,
    check_bias,
    check_tokens,
    kernels_know,
    tiles_for,
)
from freescale.kernels.dropout import Masked
from freescale.kernels.hstu.kept_parts import KeptPart, given_back
from freescale.kernels.hstu.parts import AddProduct, GateFunction, GradBuffer, Project, compute_dtype
from freescale.kernels.hstu.weights import LayerWeights, WholeBatch
from freescale.kernels.runtime import Later, can_fuse, later


def can_fuse_layer(x_TD: Tensor, *, heads: int) -> bool:
    """Whether a layer over these states can be one function: where its parts are fused, and states of one type."""
    width = x_TD.shape[1]
    return width // heads <= MAX_WIDTH and can_fuse(x_TD) and compute_dtype(x_TD) == x_TD.dtype


def fused_layer(
    x_TD: Tensor,
    weights: LayerWeights,
    batch: WholeBatch,
    *,
    heads: int,
    scale: float,
    dropped: Masked | None = None,
) -> Tensor:
    """States after the layer: x + bias + (SiLU(u) * norm(attention(q, k, v))) output^T, as its parts compute it.

    `dropped` is the mask of what is in brackets.
    """
    layout = batch.layout
    if not kernels_know(batch.mask):
        raise TypeError("a fused layer knows no mask but AttentionMask; compute the layer by its parts")
    check_tokens(len(x_TD), layout.num_tokens)
    layout.check(batch.mask)
    check_bias(weights.position_bias, weights.time_bias, batch.query_time, batch.key_time, layout, batch.mask)
    buckets = None
    if weights.time_bias is not None and batch.query_time is not None and batch.key_time is not None:
        buckets = layout.buckets(batch.query_time, batch.key_time, backend="triton", mask=batch.mask)
    takers = tuple(map(later, (weights.uvqk, weights.output, weights.position_bias, weights.time_bias)))
    return _Layer.apply(x_TD, *weights, buckets, batch, heads, scale, dropped, takers)  # type: ignore[no-untyped-call]


class _Layer(torch.autograd.Function):
    """The parts one after the other, and their gradients in reverse."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        uvqk: Tensor,
        output: Tensor,
        output_bias: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        buckets: Tensor | None,
        batch: WholeBatch,
        heads: int,
        scale: float,
        dropped: Masked | None,
        takers: tuple[Later | None, Later | None, Later | None, Later | None],
    ) -> Tensor:
        project, attention, gate, product = parts = [KeptPart() for _ in range(4)]
        room = GradBuffer()
        u, v, q, k, residual = Project.forward(project, x, uvqk, output_bias, room, takers[0])
        num_tokens, width = u.shape
        by_head = (num_tokens, heads, width // heads)
        work, biased = batch.layout.work, position_bias is not None or time_bias is not None
        attended = FusedAttention.forward(
            attention,
            q.view(by_head),
            k.view(by_head),
            v.view(by_head),
            position_bias,
            time_bias,
            buckets,
            work,
            batch.mask,
            1.0,
            scale,
            tiles_for(width // heads, q.dtype, long=work.long, biased=biased),
            takers[2:],
        )
        y = GateFunction.forward(gate, u, attended.view(num_tokens, width), room, dropped)
        out = AddProduct.forward(product, residual, y, output, takers[1])
        # Handed over to autograd, which lets go of them when the gradients are done.
        ctx.save_for_backward(*[tensor for part in parts for tensor in part.saved_tensors])
        ctx.counts = [len(part.saved_tensors) for part in parts]
        for part in parts:
            part.saved_tensors = ()
        ctx.parts = parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        project, attention, gate, product = given_back(ctx)
        residual, dy, d_output, _ = AddProduct.gradients(product, grad)
        du, da, *_ = GateFunction.gradients(gate, dy)
        attended = da.view(attention.saved_tensors[0].shape)
        dq, dk, dv, *d_tables = FusedAttention.gradients(attention, attended)[:5]
        flat = [x.view(du.shape) for x in (dv, dq, dk) if x is not None]
        dx, d_uvqk, d_bias, *_ = Project.gradients(project, du, *flat, residual)
        return dx, d_uvqk, d_output, d_bias, *d_tables, *(None,) * 6
