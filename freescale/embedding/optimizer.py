"""Sparse optimizers: they change the rows a step touched, in place, and leave all others alone.

Every rule is a pure function of (row, its state, its summed gradient, learning rate, step), computed in float32 or
better. So it does not matter where a row lives, which rows are updated with it, or when its gradient arrives, only
that it arrives once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freescale.errors import ConfigError
from freescale.kernels.rows import adam_direction, add_scaled, mean_squares


class SparseOptimizer(Protocol):
    """One update rule."""

    @property
    def name(self) -> str:
        """Name in recipes."""

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the state tensors, by name."""

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Direction [U, dim] and scale [U]: a row changes by scale * direction; state changes here; step is from 1."""

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """New rows from current rows: rows + scale * direction."""


@dataclass(frozen=True)
class SGD:
    """w -= lr * g."""

    name: str = "sgd"

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """No state."""
        return {}

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Plain descent."""
        return grad, grad.new_full((len(grad),), -lr)

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """New rows."""
        return _moved(rows, *self.move(state, grad, lr=lr, step=step))


@dataclass(frozen=True)
class RowwiseAdagrad:
    """One accumulator a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps)."""

    eps: float = 1e-8
    name: str = "rowwise_adagrad"

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """One number a row."""
        return {"square_sum": (num_rows, 1)}

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Descent scaled by the row's gradient history."""
        state["square_sum"] += mean_squares(grad)[:, None]
        return grad, -lr / (state["square_sum"].flatten().sqrt() + self.eps)

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """New rows."""
        return _moved(rows, *self.move(state, grad, lr=lr, step=step))


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

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Descent along the bias-corrected moments."""
        direction = adam_direction(
            grad,
            state["moment1"],
            state["moment2"],
            beta1=self.beta1,
            beta2=self.beta2,
            step=step,
            eps=self.eps,
        )
        return direction, grad.new_full((len(grad),), -lr / (1 - self.beta1**step))

    def update(self, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> Tensor:
        """New rows."""
        return _moved(rows, *self.move(state, grad, lr=lr, step=step))


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


def _moved(rows: Tensor, direction: Tensor, scale: Tensor) -> Tensor:
    moved = rows.clone(memory_format=torch.contiguous_format)
    add_scaled(moved, torch.arange(len(rows), device=rows.device), direction, scale)
    return moved
