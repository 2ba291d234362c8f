"""MoE: a feed-forward part made of many experts, of which every token uses a few (tokens, d) -> (tokens, d).

    x ──router──> weights, experts ──dispatch──> expert_mlp over the experts held here ──> y (+ shared experts)

The layer takes jagged tokens as they are and returns a plain tensor. Losses of the router join the backward without
being part of the result. Where experts live is the business of the dispatch object that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from freescale.errors import ConfigError, FreeScaleError
from freescale.kernels.moe import ACTIVATIONS, Activation, Backend, Save, expert_mlp
from freescale.model.parts.ffn import DenseFFN
from freescale.model.parts.router import Router

RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [N, D], weights [N, K], experts [N, K], numbered from the first one held here) -> [N, D]"""


class Dispatch(Protocol):
    """Brings tokens to their experts and the results back."""

    @property
    def is_split(self) -> bool:
        """Whether this process holds a part of the experts only."""

    def block(self, num_experts: int) -> tuple[int, int]:
        """The first expert held here, and how many."""

    def __call__(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, num_experts: int, run: RunExperts
    ) -> Tensor:
        """Sum over k of weight * expert(x), differentiable in x and weights; `run` does it for experts held here."""


class AllHere:
    """Every expert is held here: nothing to bring anywhere."""

    is_split = False

    def block(self, num_experts: int) -> tuple[int, int]:
        """All of them."""
        return 0, num_experts

    def __call__(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, num_experts: int, run: RunExperts
    ) -> Tensor:
        """The experts' answer."""
        return run(x_TD, weights_TK, experts_TK)


class MoE(nn.Module):
    """Routed experts, and shared ones that every token uses.

    Args:
        dim: width of the tokens.
        hidden: width of one expert.
        num_experts: routed experts.
        top_k: experts a token goes to.
        activation: "swiglu", "silu" or "relu2".
        shared: experts every token uses, as one dense part `shared` times as wide as an expert.
        save: what is kept for the backward: input and "preact"ivation, "input" alone, or "all".
        backend: of `expert_mlp`.
        dispatch: where experts live; all of them here unless given.
        router: options of `Router`.

    Examples:
        >>> moe = MoE(dim=64, hidden=128, num_experts=8, top_k=2)
        >>> y = moe(torch.randn(1000, 64))          # a plain tensor, [1000, 64]
        >>> moe.router.rebalance(moe.router.take_tally())   # once an optimizer step
    """

    counts_tokens = True
    """It is told how many of its tokens are no pads."""

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        activation: Activation = "swiglu",
        shared: int = 0,
        save: Save = "preact",
        backend: Backend = "auto",
        dispatch: Dispatch | None = None,
        **router: Any,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError("unknown activation", got=activation, allowed=", ".join(ACTIVATIONS))
        self.dim, self.num_experts, self.activation = dim, num_experts, activation
        self.save, self.backend = save, backend
        self.global_tokens: Tensor | int | None = None
        """What sums over tokens are divided by: the tokens of the step over all ranks; None: those of the call. As a
        tensor [] a recorded step reads it from the device."""
        self.router = Router(dim=dim, num_experts=num_experts, top_k=top_k, **router)
        self.dispatch: Dispatch = dispatch or AllHere()
        first, count = self.dispatch.block(num_experts)
        # A seed an expert: its initial weights are the same whoever holds it, and nobody has to draw all of them.
        seeds = int(torch.randint(2**31, ())) + torch.arange(num_experts)[first : first + count]
        wide = 2 * hidden if activation == "swiglu" else hidden
        self.w_in = nn.Parameter(_drawn(seeds.tolist(), wide, dim))
        self.w_out = nn.Parameter(_drawn([seed + 2**32 for seed in seeds.tolist()], dim, hidden))
        self.shared = DenseFFN(dim=dim, hidden=shared * hidden, activation=activation) if shared else None

    @property
    def takes_pads(self) -> bool:
        """Whether pads among the tokens change nothing: no host has to know how many tokens an expert gets."""
        return not self.dispatch.is_split

    def forward(self, x_TD: Tensor, real: Tensor | None = None) -> Tensor:
        """The weighted sum of the chosen experts' outputs for every token, [T, D].

        Args:
            x_TD: tokens.
            real: [1] so many of them are; the others are pads behind them, which experts compute and nobody counts.
        """
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise FreeScaleError(
                "an MoE layer takes (tokens, dim)", got=tuple(x_TD.shape), allowed=f"(tokens, {self.dim})"
            )
        kind = x_TD.device.type
        if torch.is_autocast_enabled(kind) and x_TD.dtype == torch.float32:
            x_TD = x_TD.to(torch.get_autocast_dtype(kind))  # once, for all that keep it or send it away
        routing = self.router(x_TD, real)
        y = self.dispatch(
            x_TD, routing.weights, routing.experts, num_experts=self.num_experts, run=self._run_experts
        )
        if self.shared is not None:
            y = y + self.shared(x_TD)
        if routing.loss is not None and self.training and torch.is_grad_enabled():
            tokens = self.global_tokens
            if not isinstance(tokens, Tensor):
                tokens = x_TD.new_full((), float(max(1, tokens or len(x_TD))), dtype=torch.float64)
            y = _AlsoLearn.apply(y, routing.loss, tokens)  # type: ignore[no-untyped-call]
        return y

    def _run_experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if not len(self.w_in):
            # More ranks than experts: no token comes here, and the gradients are there, if empty.
            return x + 0 * (weights.sum() + self.w_in.sum() + self.w_out.sum())
        return expert_mlp(
            x,
            weights,
            experts,
            self.w_in,
            self.w_out,
            activation=self.activation,
            save=self.save,
            backend=self.backend,
        )


class _AlsoLearn(torch.autograd.Function):
    """Passes y on as it is; in the backward a loss gets its gradient, as if divided and added to the total."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, divisor: Tensor) -> Tensor:
        ctx.divisor, ctx.like = divisor, loss.new_empty(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], (1 / ctx.divisor).to(ctx.like), None


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """The MoE layers of a model and their names, in order."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield name, module


def make_ffn(
    options: Mapping[str, Any] | None, *, dim: int, dispatch: Dispatch | None = None
) -> nn.Module | None:
    """The feed-forward part that a recipe's keys name, (tokens, d) -> (tokens, d); None for kind "none".

    Args:
        options: "kind" and the arguments of `DenseFFN` or `MoE`, besides those below.
        dim: width of the tokens.
        dispatch: where experts live.
    """
    arguments = dict(options or {})
    kind = arguments.pop("kind", "none")
    if kind == "none":
        return None
    if kind == "dense":
        return DenseFFN(dim=dim, **arguments)
    if kind == "moe":
        return MoE(dim=dim, dispatch=dispatch, **arguments)
    raise ConfigError("unknown feed-forward part", got=kind, allowed="none, dense, moe")


def _drawn(seeds: list[int], rows: int, columns: int) -> Tensor:
    """Weights [experts, rows, columns], small, so that a new layer starts close to doing nothing."""
    weights = torch.empty(len(seeds), rows, columns)
    for expert, seed in zip(weights, seeds):
        expert.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
    return weights
