"""normed_mlp: two products with norms between and behind, x * sigmoid(norm(x)) inside; the MLP of DLRMv4."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.model.parts.blocks import Linear


class SwishNorm(nn.Module):
    """x * sigmoid(norm(x)), the norm with a weight and a bias.

    Args:
        dim: width.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as x; norms are taken in float32 or better."""
        return (wide(x) * torch.sigmoid(wide_norm(x, self.norm))).to(x.dtype)


class WideNorm(nn.LayerNorm):
    """LayerNorm in float32 or better, of any input."""

    def forward(self, input: Tensor) -> Tensor:
        """The type of the input."""
        return wide_norm(input, self).to(input.dtype)


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def wide_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The norm of x in float32 or better."""
    full = wide(x)
    weight, bias = norm.weight.to(full.dtype), norm.bias.to(full.dtype)
    return F.layer_norm(full, norm.normalized_shape, weight, bias, norm.eps)


def normed_mlp(width: int, hidden: int, dim: int, *, norm: bool = True) -> nn.Sequential:
    """From `width` over `hidden` to `dim`; `norm`: with one behind it."""
    parts = [Linear(width, hidden), SwishNorm(hidden), Linear(hidden, dim)]
    for part in (parts[0], parts[2]):
        assert isinstance(part, nn.Linear)
        nn.init.xavier_uniform_(part.weight)
        nn.init.zeros_(part.bias)
    return nn.Sequential(*parts, *([WideNorm(dim)] if norm else []))
