"""adam: two moments of the size of the table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freescale.kernels.rows import UpdateRule, adam_direction
from freescale.registry import register


@dataclass(frozen=True)
class Adam:
    """Adam on the rows of the step; moments of absent rows rest, bias correction follows the run's step count.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
    """

    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8

    @property
    def rule(self) -> UpdateRule:
        """For the kernel that sums and updates in one pass."""
        return UpdateRule("adam", ("moment1", "moment2"), eps=self.eps, beta1=self.beta1, beta2=self.beta2)

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, int]]:
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


@register("optimizer", "adam", options=Adam)
def make(options: Adam) -> Adam:
    """It is made of its options."""
    return options
