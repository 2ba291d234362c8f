"""The plain truth of the expert kernels: one expert at a time, no tricks, autograd does the backward.

Shapes: L tokens of width D, K experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_mlp(
    x_LD: Tensor,
    weights_LK: Tensor,
    experts_LK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    activation: str = "swiglu",
) -> Tensor:
    """Sum over a token's experts of weight * w_out[e] activated(w_in[e] x): one expert at a time."""
    out = torch.zeros_like(x_LD)
    for expert in range(len(w_in)):
        token, choice = (experts_LK == expert).nonzero(as_tuple=True)
        hidden = activated(x_LD[token] @ w_in[expert].T, activation)
        rows = weights_LK[token, choice, None] * (hidden @ w_out[expert].T)
        out = out.index_add(0, token, rows.to(out.dtype))
    return out


def activated(hidden: Tensor, activation: str) -> Tensor:
    """SiLU(gate) * up of the two halves of `hidden` for "swiglu"; "silu" and "relu2" go number by number."""
    if activation == "swiglu":
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.silu(hidden) if activation == "silu" else hidden.relu().square()
