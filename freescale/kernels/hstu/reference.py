"""The plain truth of the HSTU kernels: one formula each, nothing fused, autograd does the backward.

A layer is x + bias + (SiLU(u) * norm(attention(q, k, v))) output^T with u, v, q, k = norm(x) uvqk, SiLU on v, q and k.

Shapes: T tokens in all, B sequences, D the width of states, U distinct item vectors, N negatives a sequence.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.attention import SequenceLayout, hstu_attention
from freescale.kernels.dropout import Masked, dropout
from freescale.kernels.rows import take
from freescale.kernels.runtime import linear, multiplied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freescale.kernels.hstu.summed import Taken
    from freescale.kernels.hstu.weights import LayerWeights, STUWeights, WholeBatch


def plain_norm(x: Tensor) -> Tensor:
    """LayerNorm without parameters."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def unit(x: Tensor) -> Tensor:
    """X divided by its l2 norm, in float32 or better."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def input_states(
    rows_UD: Tensor, index_T: Tensor, position_LD: Tensor, layout: SequenceLayout, *, scale: float
) -> tuple[Tensor, Tensor]:
    """States scale * rows[index] + position[p], [T, D], p a token's position in its sequence; and the rows."""
    return take(rows_UD, index_T) * scale + F.embedding(layout.positions, position_LD), rows_UD


def project_uvqk(
    x_TD: Tensor, weight: Tensor, *, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """u, v, q, k = norm(x) weight, each [T, width] with weight [D, 4 width], SiLU on all but u; and x + bias."""
    u, v, q, k = multiplied(plain_norm(x_TD), weight).chunk(4, dim=-1)
    return u, F.silu(v), F.silu(q), F.silu(k), x_TD + bias.to(x_TD.dtype)


def project_targets(
    x_TD: Tensor, weight: Tensor, rows: Tensor, *, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`project_uvqk` where only some tokens are wanted: u and x + bias of those, q zero for the others."""
    u, v, q, k, past = project_uvqk(x_TD, weight, bias=bias)
    wanted = torch.zeros(len(x_TD), 1, dtype=torch.bool, device=x_TD.device).index_fill(0, rows, True)
    return u[rows], v, torch.where(wanted, q, 0), k, past[rows]


def gate(u_TD: Tensor, attended_TD: Tensor, mask: Masked | None = None) -> Tensor:
    """SiLU(u) * norm(attended), of which a mask may drop some."""
    gated = F.silu(u_TD) * plain_norm(attended_TD)
    return gated if mask is None else dropout(gated, mask)


def add_product(residual_TD: Tensor, y_TD: Tensor, weight: Tensor) -> Tensor:
    """Residual + y weight^T, the states after the layer."""
    return residual_TD + linear(y_TD, weight)


def fused_layer(
    x_TD: Tensor,
    weights: LayerWeights,
    batch: WholeBatch,
    *,
    heads: int,
    scale: float,
    dropped: Masked | None = None,
) -> Tensor:
    """What a layer as one function computes: projections, attention, gate and product, one after the other."""
    u, v, q, k, residual = project_uvqk(x_TD, weights.uvqk, bias=weights.output_bias)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    attended = hstu_attention(
        q,
        k,
        v,
        batch.layout.offsets,
        scale=scale,
        position_bias=weights.position_bias,
        time_bias=weights.time_bias,
        query_time=batch.query_time,
        key_time=batch.key_time,
        mask=batch.mask,
        backend="reference",
    )
    return add_product(residual, gate(u, attended.flatten(1), dropped), weights.output)


def affine_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Norm(x) * weight + bias, in float32 or better."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), 1e-6).to(x.dtype)


def stu_project(x_TD: Tensor, norm: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Norm(x) weight + bias, [T, N]; the norm with a weight and a bias of its own."""
    normed = affine_norm(x_TD, norm, norm_bias)
    return torch.addmm(bias.to(normed.dtype), normed, weight.to(normed.dtype))


def stu_gate(u_TD: Tensor, attended_TD: Tensor, weight: Tensor, bias: Tensor, mask: Masked | None) -> Tensor:
    """[SiLU(u), attended, SiLU(u) * (norm(attended) * weight + bias)] side by side, of which a mask may drop some."""
    wide_u, wide_a = (x if x.dtype == torch.float64 else x.float() for x in (u_TD, attended_TD))
    opened = F.silu(wide_u)
    gated = opened * affine_norm(wide_a, weight, bias)
    out = torch.cat([opened, wide_a, gated], dim=1).to(u_TD.dtype)
    return out if mask is None else dropout(out, mask)


def fused_stu_layer(
    x_TD: Tensor,
    weights: STUWeights,
    batch: WholeBatch,
    *,
    heads: int,
    alpha: float,
    scale: float,
    dropped: Masked | None = None,
) -> Tensor:
    """What DLRMv4's layer as one function computes: projections, attention, gate and product, one after the other."""
    wide = stu_project(x_TD, weights.norm, weights.norm_bias, weights.uvqk, weights.uvqk_bias)
    u, *vqk = wide.chunk(4, dim=1)
    v, q, k = (part.unflatten(1, (heads, -1)) for part in vqk)
    attended = hstu_attention(
        q, k, v, batch.layout.offsets, scale=scale, alpha=alpha, mask=batch.mask, backend="reference"
    )
    gated = stu_gate(u, attended.flatten(1), weights.gate, weights.gate_bias, dropped)
    return x_TD + linear(gated, weights.output)


def fused_stu_targets(
    x_TD: Tensor,
    index_K: Tensor,
    weights: STUWeights,
    batch: WholeBatch,
    *,
    heads: int,
    alpha: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """u, attended values and states of some tokens: those of the whole layer, of which the others are thrown away."""
    wide = stu_project(x_TD, weights.norm, weights.norm_bias, weights.uvqk, weights.uvqk_bias)
    u, *vqk = wide.chunk(4, dim=1)
    v, q, k = (part.unflatten(1, (heads, -1)) for part in vqk)
    attended = hstu_attention(
        q, k, v, batch.layout.offsets, scale=scale, alpha=alpha, mask=batch.mask, backend="reference"
    )
    u, attended, own = (x.index_select(0, index_K) for x in (u, attended.flatten(1), x_TD))
    return u, attended, own


def sum_taken(parts: Sequence[Taken]) -> Tensor:
    """[T, D] sum over the parts of scale * table[picks]; what is picked below 0 is nothing."""
    return torch.stack([part.states() for part in parts]).sum(0)


def sampled_softmax(
    states_TD: Tensor,
    rows_UD: Tensor,
    target_T: Tensor,
    negative_BN: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float,
    normalize: bool,
) -> Tensor:
    """Sum over tokens of -log softmax(next item against negatives), one sequence at a time.

    A negative that is the token's target does not count.
    """
    dtype = torch.promote_types(states_TD.dtype, rows_UD.dtype)
    states, rows = (unit(x.to(dtype)) if normalize else x.to(dtype) for x in (states_TD, rows_UD))
    loss = states.new_zeros(())
    for n, (start, stop) in enumerate(itertools.pairwise(layout.offsets.tolist())):
        own, target, negative = states[start:stop], target_T[start:stop], negative_BN[n]
        positive = (own * rows[target]).sum(-1, keepdim=True)
        against = own @ rows[negative].T
        against = against.masked_fill(target[:, None] == negative, float("-inf"))
        logits = torch.cat([positive, against], dim=1) / temperature
        loss = loss - logits.log_softmax(-1)[:, 0].sum()
    return loss
