"""The steps of an expert MLP in plain PyTorch, one product an expert: any device, any floating type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from freescale.kernels.moe import reference
from freescale.kernels.moe.steps import Activation, Routed, Span


class EagerSteps:
    """One product an expert over its rows; reads the offsets back to the host.

    Args:
        activation: "swiglu", "silu" or "relu2".
    """

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def gather(self, values: Tensor, tokens: Tensor) -> Tensor:
        """values[tokens]."""
        return values.index_select(0, tokens)

    def hidden(self, x: Routed, w_in: Tensor, span: Span) -> Tensor:
        """Before the activation."""
        return _by_expert(x.copied(self), w_in.transpose(1, 2), span)

    def activated(self, x: Routed, w_in: Tensor, span: Span, *, keep: bool) -> tuple[Tensor | None, Tensor]:
        """Before and after the activation."""
        hidden = self.hidden(x, w_in, span)
        return hidden if keep else None, reference.activated(hidden, self.activation)

    def rows(self, activated: Tensor, w_out: Tensor, span: Span) -> Tensor:
        """The experts' outputs."""
        return _by_expert(activated, w_out.transpose(1, 2), span)

    def combine(self, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        """Sum over a token's rows, in the order of its choices."""
        out: Tensor | None = None
        for choice in range(places.shape[1]):
            row = rows.index_select(0, places[:, choice])
            wide = row if row.dtype == torch.float64 else row.float()
            wide = wide if weights is None else wide * weights[:, choice, None]
            out = wide if out is None else out.add_(wide)
        assert out is not None
        return out.to(rows.dtype)

    def d_hidden(
        self, grad: Routed, w_out: Tensor, hidden: Tensor, weights_R: Tensor, span: Span
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Through the activation, with the gradient of every row's weight."""
        d_activated = _by_expert(grad.copied(self), w_out, span)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            activated = reference.activated(leaf, self.activation)
        wide = weights_R.dtype
        d_weights = (d_activated.to(wide) * activated.detach().to(wide)).sum(1)
        weight = weights_R[:, None].to(hidden.dtype)
        (d_hidden,) = torch.autograd.grad(activated, leaf, d_activated.mul_(weight))
        return hidden.copy_(d_hidden), activated.detach().mul_(weight), d_weights

    def d_w_out(self, grad: Routed, scaled: Tensor, span: Span, into: Tensor | None) -> Tensor:
        """Products over an expert's rows."""
        return _over_rows(grad.copied(self), scaled, span, into)

    def d_w_in(self, d_hidden: Tensor, x: Routed, span: Span, into: Tensor | None) -> Tensor:
        """Products over an expert's rows."""
        return _over_rows(d_hidden, x.copied(self), span, into)

    def d_rows(self, d_hidden: Tensor, w_in: Tensor, span: Span) -> Tensor:
        """Gradients of the rows' inputs."""
        return _by_expert(d_hidden, w_in, span)


def _experts(span: Span) -> Iterator[tuple[int, slice]]:
    """Every expert that has rows, and which."""
    edges = itertools.pairwise(span.offsets.tolist())
    return ((expert, slice(a, b)) for expert, (a, b) in enumerate(edges) if a < b)


def _by_expert(rows: Tensor, weight_EKN: Tensor, span: Span) -> Tensor:
    """Every row times its expert's matrix."""
    out = rows.new_empty(len(rows), weight_EKN.shape[2])
    for expert, part in _experts(span):
        torch.mm(rows[part], weight_EKN[expert], out=out[part])
    return out


def _over_rows(left: Tensor, right: Tensor, span: Span, into: Tensor | None) -> Tensor:
    """[E, M, N]: left^T right over each expert's rows."""
    if into is None:
        into = left.new_zeros(len(span.offsets) - 1, left.shape[1], right.shape[1])
    for expert, part in _experts(span):
        into[expert].addmm_(left[part].t(), right[part])
    return into
