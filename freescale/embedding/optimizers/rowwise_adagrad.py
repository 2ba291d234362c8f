"""rowwise_adagrad: descent scaled by one number a row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freescale.kernels.rows import UpdateRule, mean_squares
from freescale.registry import register


@dataclass(frozen=True)
class RowwiseAdagrad:
    """One accumulator a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps).

    Args:
        eps: added to the denominator.
    """

    eps: float = 1e-8

    @property
    def rule(self) -> UpdateRule:
        """For the kernel that sums and updates in one pass."""
        return UpdateRule("rowwise_adagrad", ("square_sum",), eps=self.eps)

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, int]]:
        """One number a row."""
        return {"square_sum": (num_rows, 1)}

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Descent scaled by the row's gradient history."""
        state["square_sum"] += mean_squares(grad)[:, None]
        return grad, -lr / (state["square_sum"].flatten().sqrt() + self.eps)


@register("optimizer", "rowwise_adagrad", options=RowwiseAdagrad)
def make(options: RowwiseAdagrad) -> RowwiseAdagrad:
    """It is made of its options."""
    return options
