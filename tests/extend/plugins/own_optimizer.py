"""A sparse optimizer from outside the package, with a state of its own for every row."""

from dataclasses import dataclass

from freescale import register


@dataclass(frozen=True, kw_only=True)
class MomentumOptions:
    """Keys of a recipe, in the section `embedding`."""

    decay: float = 0.75


@register("optimizer", "slowing_momentum", options=MomentumOptions)
class SlowingMomentum:
    """Descent along a velocity, slower the more often a row was updated."""

    def __init__(self, options):
        self.decay = options.decay

    def state_shapes(self, num_rows, dim):
        return {"velocity": (num_rows, dim), "updates": (num_rows, 1)}

    def move(self, state, grad, *, lr, step):
        state["velocity"].mul_(self.decay).add_(grad)
        state["updates"] += 1
        return state["velocity"], -lr / state["updates"].flatten().sqrt()
