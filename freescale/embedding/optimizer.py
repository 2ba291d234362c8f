"""Sparse optimizers: they change the rows a step touched, in place, and leave all others alone.

Every rule is a pure function of (row, its state, its summed gradient, learning rate, step), computed in float32 or
better. So it does not matter where a row lives or when its gradient arrives, only that it arrives once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freescale.errors import ConfigError


class SparseOptimizer(Protocol):
    """One update rule."""

    @property
    def name(self) -> str:
        """Name in recipes."""

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the state tensors, by name."""

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """New rows from current rows, their state (changed in place) and gradients; step counts from 1."""


@dataclass(frozen=True)
class SGD:
    """w -= lr * g."""

    name: str = "sgd"

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """No state."""
        return {}

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """Plain descent."""
        return torch.add(rows, grad, alpha=-lr)


@dataclass(frozen=True)
class RowwiseAdagrad:
    """One accumulator a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps)."""

    eps: float = 1e-8
    name: str = "rowwise_adagrad"

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """One number a row."""
        return {"square_sum": (num_rows, 1)}

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """Descent scaled by the row's gradient history."""
        state["square_sum"] += grad.square().mean(-1, keepdim=True)
        return torch.addcdiv(rows, grad, state["square_sum"].sqrt() + self.eps, value=-lr)


@dataclass(frozen=True)
class Adam:
    """Adam on the rows of the step; moments of absent rows rest, bias correction follows the run's step count."""

    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    name: str = "adam"

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Two moments of the size of the table."""
        return {"moment1": (num_rows, dim), "moment2": (num_rows, dim)}

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """Descent along the bias-corrected moments."""
        state["moment1"].lerp_(grad, 1 - self.beta1)
        state["moment2"].mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        denominator = (state["moment2"] / (1 - self.beta2**step)).sqrt_().add_(self.eps)
        return torch.addcdiv(rows, state["moment1"], denominator, value=-lr / (1 - self.beta1**step))


def make_optimizer(
    name: str, *, beta1: float = 0.9, beta2: float = 0.98, eps: float = 1e-8
) -> SparseOptimizer:
    """The sparse optimizer of that name."""
    if name == "sgd":
        return SGD()
    if name == "rowwise_adagrad":
        return RowwiseAdagrad(eps=eps)
    if name == "adam":
        return Adam(beta1=beta1, beta2=beta2, eps=eps)
    raise ConfigError("unknown sparse optimizer", got=name, allowed="sgd, rowwise_adagrad, adam")
