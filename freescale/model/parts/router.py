"""Router: which experts a token goes to, with what weights, and how evenly they are used.

Everything here is in float32 or better: a choice among close scores must not hang on half precision. The losses and
the balance are defined on the GLOBAL batch, so that the curve does not depend on who computes which token:

  * a loss is a sum over tokens, divided by the global number of tokens like every other loss (`MoE.global_tokens`);
  * the auxiliary loss weighs each expert's score by the share of tokens it got. That share is of an earlier step (in
    a run, two before), counted over all ranks and micro-batches: within a step nobody knows it, and as a constant
    it keeps the loss a sum over tokens;
  * the selection bias moves once a step by the same global counts (after the idea of arXiv 2408.15664).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from freescale.errors import ConfigError, TrainingError
from freescale.kernels.runtime import on_device

SCORES = ("softmax", "sigmoid")
EXTRAS = ("aux", "z", "spread", "bad")
"""What a tally holds after the tokens of each expert, summed over tokens: both losses, the standard deviation of the
logits over the experts, and how many tokens have logits that are not finite."""


@dataclass(frozen=True)
class ChosenExperts:
    """The choice for T tokens.

    Args:
        weights: [T, K] what each expert's output is multiplied with.
        experts: [T, K] which experts, distinct within a token.
        loss: sum over tokens of the extra losses; None where there are none.
    """

    weights: Tensor
    experts: Tensor
    loss: Tensor | None


class Router(nn.Module):
    """Scores every expert for every token and picks the best few.

    Args:
        dim: width of the tokens.
        num_experts: experts to choose from.
        top_k: experts a token goes to.
        score: "softmax" over the experts, or a "sigmoid" for each.
        renormalize: divide the weights of a token by their sum.
        scale: multiplies the weights.
        bias_rate: how far the selection bias of an expert without tokens moves a step, in units of the spread of the
            logits; 0 turns it off.
        aux_loss: coefficient of the balance loss E * sum_e share_e * mean score_e (1 when perfectly even).
        z_loss: coefficient of the mean of logsumexp(logits)^2, which keeps logits small.
        forced: deal tokens out in turn instead of choosing: the best case, for benchmarks.
    """

    bias: Tensor
    share: Tensor
    tally: Tensor

    def __init__(
        self,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        bias_rate: float = 0.05,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        forced: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                "a token cannot go to more experts than there are",
                got=f"top_k={top_k} of {num_experts} experts",
                allowed=f"1 to {num_experts}",
            )
        if score not in SCORES:
            raise ConfigError("unknown router score", got=score, allowed=", ".join(SCORES))
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.renormalize, self.scale = score, renormalize, scale
        self.bias_rate, self.aux_loss, self.z_loss, self.forced = bias_rate, aux_loss, z_loss, forced
        self.weight = nn.Parameter(torch.empty(num_experts, dim).normal_(std=0.02))
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("share", torch.full((num_experts,), 1 / num_experts))
        tally = torch.zeros(num_experts + len(EXTRAS), dtype=torch.float64)
        self.register_buffer("tally", tally, persistent=False)

    def forward(self, x_TD: Tensor, real: Tensor | None = None) -> ChosenExperts:
        """Choose for every token; those behind the first `real` ones ([1]) are pads, which nobody counts."""
        inside = None if real is None else torch.arange(len(x_TD), device=x_TD.device) < real
        with torch.autocast(x_TD.device.type, enabled=False):
            logits = _WideLinear.apply(x_TD, self.weight)  # type: ignore[no-untyped-call]
            self._refuse_nan(logits)
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            experts = self._choose(logits.detach())
            weights = scores.gather(1, experts)
            if self.renormalize:
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
            balance, size = self._losses(logits, scores, inside)
            if self.training:
                self._count(logits, experts, balance, size, inside)
        loss = self.aux_loss * balance + self.z_loss * size if self.aux_loss or self.z_loss else None
        return ChosenExperts(weights * self.scale, experts, loss)

    @torch.no_grad()
    def rebalance(self, tally: Tensor) -> None:
        """After an optimizer step: its tally over all ranks. Biases move towards even load, equally on every rank.

        A fixed move by the sign of the error is too large where logits are close (all tokens swing from one half of
        the experts to the other and back) and too small where they are not. So moves are measured by the spread of
        the logits, and shrink with the error.
        """
        tally = tally.to(dtype=torch.float64, device="cpu")
        counts, extras = tally[: self.num_experts], dict(zip(EXTRAS, tally[self.num_experts :].tolist()))
        total = counts.sum().item()
        if total == 0:
            return
        move = (1 - counts * (self.num_experts / total)).clamp(-1, 1)
        spread = extras["spread"] * self.top_k / total
        # Only differences between biases matter: without the mean they stay small in long runs.
        moves = self.bias_rate * spread * (move - move.mean())
        # In one copy that nobody waits for.
        share, moves = on_device(torch.stack([counts / total, moves]), self.share.device)
        self.share.copy_(share)
        if self.bias_rate:
            self.bias.add_(moves.to(self.bias))

    def take_tally(self) -> Tensor:
        """What was counted since the last call: tokens of each expert, then EXTRAS."""
        taken = self.tally.clone()
        self.tally.zero_()
        return taken

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Moves and casts: however narrow a model becomes, counts stay whole numbers and biases able to move."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tally = self.tally.double()
        for name in ("bias", "share"):
            buffer = getattr(self, name)
            setattr(self, name, buffer.to(torch.promote_types(buffer.dtype, torch.float32)))
        return self

    def _choose(self, logits: Tensor) -> Tensor:
        if self.forced:
            pairs = torch.arange(logits.shape[0] * self.top_k, device=logits.device)
            return (pairs % self.num_experts).view(-1, self.top_k)
        # Biases stand beside logits, not scores: where a softmax is all but decided, the scores of the others are
        # so close to zero that any bias would send every token the same way.
        return (logits + self.bias.to(logits)).topk(self.top_k, dim=-1).indices

    def _losses(self, logits: Tensor, scores: Tensor, inside: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over tokens: E * sum_e share_e * score_e, and logsumexp^2."""
        with torch.set_grad_enabled(bool(self.aux_loss) and torch.is_grad_enabled()):
            parts = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
            balance = _sum_of_real(parts @ self.share.to(parts), inside) * self.num_experts
        with torch.set_grad_enabled(bool(self.z_loss) and torch.is_grad_enabled()):
            size = _sum_of_real(logits.logsumexp(-1).square(), inside)
        return balance, size

    @torch.no_grad()
    def _count(
        self, logits: Tensor, experts: Tensor, balance: Tensor, size: Tensor, inside: Tensor | None
    ) -> None:
        # The experts of a token are distinct, so no two writes meet: no atomics, and no wait for the device.
        chosen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(1, experts, True)
        if inside is not None:
            chosen &= inside[:, None]
        spread = _sum_of_real((logits - logits.mean(-1, keepdim=True)).square().mean(-1).sqrt(), inside)
        bad = _sum_of_real((~logits.isfinite()).any(-1), inside)
        extras = torch.stack([x.double() for x in (balance, size, spread, bad)])
        self.tally += torch.cat([chosen.sum(0).double(), extras])

    def _refuse_nan(self, logits: Tensor) -> None:
        """On a CPU at once. A GPU is not waited for: the training step asks when the loss is not finite."""
        if logits.device.type == "cpu" and not bool(logits.detach().isfinite().all()):
            raise nan_error(int((~logits.isfinite()).any(-1).sum()), len(logits))


def _sum_of_real(values_T: Tensor, inside: Tensor | None) -> Tensor:
    """Over all tokens but pads."""
    return values_T.sum() if inside is None else torch.where(inside, values_T, 0).sum()


class _WideLinear(torch.autograd.Function):
    """x W^T in float32 or better; keeps x as it came, as the experts do, and widens it again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grad @ weight.to(grad.dtype)).to(x.dtype), (grad.t() @ x.to(grad.dtype)).to(weight.dtype)


def nan_error(num_bad: int, num_tokens: int | None = None, *, where: str = "") -> TrainingError:
    """Tokens that cannot be routed."""
    of = "" if num_tokens is None else f" of {num_tokens:,}"
    return TrainingError(
        f"router logits{where} are NaN or infinite",
        got=f"{num_bad:,}{of} tokens",
        next_step="lower optim.lr, set optim.clip_norm=1 or moe.z_loss=0.001, or look at the input of the layer",
    )
