"""sgd: plain descent, no state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freescale.kernels.rows import UpdateRule
from freescale.registry import register


@dataclass(frozen=True)
class SGD:
    """w -= lr * g."""

    @property
    def rule(self) -> UpdateRule:
        """For the kernel that sums and updates in one pass."""
        return UpdateRule("sgd")

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, int]]:
        """No state."""
        return {}

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Plain descent."""
        return grad, grad.new_full((len(grad),), -lr)


@register("optimizer", "sgd", options=SGD)
def make(options: SGD) -> SGD:
    """It is made of its options, of which there are none."""
    return options
