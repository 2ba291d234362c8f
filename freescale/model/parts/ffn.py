"""The feed-forward part of a layer: a dense one, and the place any of them has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from freescale.errors import ConfigError
from freescale.kernels import plain_norm
from freescale.kernels.moe import ACTIVATIONS, activated
from freescale.kernels.runtime import linear
from freescale.model.parts.dropout import Dropout


class DenseFFN(nn.Module):
    """W_out act(W_in x) for every token: what one expert does, for all tokens.

    Args:
        dim: width of the tokens.
        hidden: width between the two products.
        activation: "swiglu" (SiLU(gate) * up, two products in), "silu" or "relu2" (squared ReLU).
    """

    def __init__(self, *, dim: int, hidden: int, activation: str = "swiglu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError("unknown activation", got=activation, allowed=", ".join(ACTIVATIONS))
        self.activation = activation
        wide = 2 * hidden if activation == "swiglu" else hidden
        self.w_in = nn.Parameter(torch.empty(wide, dim).normal_(std=0.02))
        self.w_out = nn.Parameter(torch.empty(dim, hidden).normal_(std=0.02))

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D]."""
        return linear(activated(linear(x_TD, self.w_in), self.activation), self.w_out)


class FeedForward(nn.Module):
    """The sublayer: x + dropout(ffn(norm(x))).

    Args:
        ffn: (tokens, d) -> (tokens, d).
        dropout: on its output.
    """

    def __init__(self, ffn: nn.Module, *, dropout: float) -> None:
        super().__init__()
        self.ffn = ffn
        self.dropout = Dropout(dropout)

    def forward(self, x_TD: Tensor, keys: Tensor | None = None, *, real: Tensor | None = None) -> Tensor:
        """States after the sublayer, [T, D].

        Args:
            x_TD: states before.
            keys: those of dropout, where not all tokens are given.
            real: [1] how many tokens are real, where pads stand behind them.
        """
        return x_TD + self.dropout(run_ffn(self.ffn, plain_norm(x_TD), real), keys).to(x_TD.dtype)


def run_ffn(ffn: nn.Module, x_TD: Tensor, real: Tensor | None) -> Tensor:
    """Any of them; one that counts its tokens is told how many are real, where there are pads."""
    y_TD: Tensor = ffn(x_TD, real) if real is not None and getattr(ffn, "counts_tokens", False) else ffn(x_TD)
    return y_TD


def ffn_takes_pads(ffn: nn.Module) -> bool:
    """Whether pads among its tokens change nothing for the others."""
    return isinstance(ffn, DenseFFN) or bool(getattr(ffn, "takes_pads", False))
