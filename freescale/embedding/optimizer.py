"""Sparse optimizers: they change the rows a step touched, in place, and leave all others alone.

Every rule is a pure function of (state of a row, its summed gradient, learning rate, step), computed in float32 or
better. So it does not matter where a row lives, which rows are updated with it, or when its gradient arrives, only
that it arrives once a step.

A kind of your own is one file:

    @dataclass(frozen=True, kw_only=True)
    class MomentumOptions:
        decay: float = 0.9                                        # a key of the recipe

    class Momentum:
        def __init__(self, options): self.decay = options.decay
        def state_shapes(self, num_rows, dim): return {"velocity": (num_rows, dim)}
        def move(self, state, grad, *, lr, step):
            state["velocity"].mul_(self.decay).add_(grad)         # in place: what is kept for these rows
            return state["velocity"], grad.new_full((len(grad),), -lr)

    register("optimizer", "momentum", options=MomentumOptions)(Momentum)

Use element-wise operations, or those of `freescale.kernels.rows`: a row must get the same bits whatever rows stand
beside it, since a batch is updated in parts.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from freescale import registry
from freescale.errors import ConfigError
from freescale.kernels.rows import UpdateRule, add_scaled


class SparseOptimizer(Protocol):
    """One update rule. Its kind is called as `make(options)`, with the options dataclass it was registered with."""

    def state_shapes(self, num_rows: int, dim: int) -> dict[str, tuple[int, int]]:
        """What is kept for rows, by name: [num_rows, any width], zeros at first and when a row changes owner."""

    def move(self, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int) -> tuple[Tensor, Tensor]:
        """Direction [U, dim] and scale [U]: a row changes by scale * direction; state changes here; step is from 1."""


def make_optimizer(name: str, **options: Any) -> SparseOptimizer:
    """The sparse optimizer of that name; an option it does not know is refused."""
    kind = registry.find("optimizer", name)
    return cast(SparseOptimizer, kind.make(registry.options_of(kind, options)))


def rule_of(optimizer: SparseOptimizer) -> UpdateRule | None:
    """The optimizer as the fused kernel knows it; None where only `move` says what it does."""
    # A class that has changed `move` must say so itself: the rule it has inherited is another one.
    own = next((kind for kind in type(optimizer).__mro__ if "move" in vars(kind)), object)
    return cast(UpdateRule, optimizer.rule) if "rule" in vars(own) else None  # type: ignore[attr-defined]


def updated(
    optimizer: SparseOptimizer, rows: Tensor, state: dict[str, Tensor], grad: Tensor, *, lr: float, step: int
) -> Tensor:
    """New rows from current rows: rows + scale * direction. Their state changes in place."""
    direction, scale = optimizer.move(state, grad, lr=lr, step=step)
    moved = rows.clone(memory_format=torch.contiguous_format)
    add_scaled(moved, torch.arange(len(rows), device=rows.device), direction, scale)
    return moved


def check_state(optimizer: SparseOptimizer, dim: int) -> None:
    """Refuse state that could not be cut into rows, saved and reset: it is one row of numbers for each row."""
    for name, shape in optimizer.state_shapes(1, dim).items():
        if len(shape) != 2 or shape[0] != 1 or shape[1] < 1:
            raise ConfigError(
                f"state {name!r} of {type(optimizer).__name__} is not one row of numbers for each row",
                got=f"{tuple(shape)} for one row of width {dim}",
                allowed="(num_rows, width)",
            )
        if name == "weight" or "." in name:
            raise ConfigError(
                f"state {name!r} of {type(optimizer).__name__} cannot be saved under that name",
                allowed="any name without a dot but 'weight', which is the table itself",
            )
