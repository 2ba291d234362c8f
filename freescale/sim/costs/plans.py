"""Who computes what: the project's own plans for some global batches, as sums over each rank's samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from freescale.balance import (
    MOST_REPLAYED_TOKENS,
    CostModel,
    FloatArray,
    GlobalBatches,
    IntArray,
    assign,
    named_balancer,
)
from freescale.errors import ConfigError, nearest
from freescale.sim.inputs.workload import Workload, draw_lengths

BALANCERS = {"random": "round_robin", "kk_equal": "karmarkar_karp", "freescale": "lpt"}
"""What a scenario calls a balancer -> what `freescale.balance` calls it."""


@dataclass(frozen=True, eq=False)
class Loads:
    """What each rank has to do in each planned step.

    Args:
        samples: [steps, ranks].
        tokens: [steps, ranks] sum of lengths.
        squares: [steps, ranks] sum of squared lengths.
        bound: mean over steps of the idle share no assignment can avoid.
        planned: mean over steps of the idle share of these plans, by predicted cost.
        reason: why the bound is not zero, in words.
    """

    samples: FloatArray
    tokens: FloatArray
    squares: FloatArray
    bound: float
    planned: float
    reason: str | None = None

    @property
    def replayable(self) -> bool:
        """Whether steps are small enough to be recorded and replayed on a GPU."""
        return bool(self.tokens.max(initial=0) < MOST_REPLAYED_TOKENS)


def plan_loads(
    workload: Workload,
    *,
    num_ranks: int,
    num_steps: int,
    balancer: str,
    cost_model: CostModel,
    window: int = 1,
    max_tokens_ratio: float | None = 1.10,
    speeds: FloatArray | None = None,
    seed: int = 0,
) -> Loads:
    """Plan `num_steps` global batches as a training run would; the same batches for every balancer."""
    check_balancer(balancer)
    batch = workload.samples_per_gpu * num_ranks
    steps = -(-num_steps // window) * window
    batches = GlobalBatches(
        draw_lengths(workload, batch * steps, seed=seed),
        global_batch=batch,
        seed=seed,
        window=window,
        window_ranks=num_ranks if window > 1 else None,
    )
    return loads_of(
        lambda step: batches.lengths_of(batches.batch(step)),
        num_ranks=num_ranks,
        num_steps=num_steps,
        balancer=balancer,
        cost_model=cost_model,
        max_tokens_ratio=max_tokens_ratio,
        speeds=speeds,
    )


def loads_of(
    lengths_of: Callable[[int], IntArray],
    *,
    num_ranks: int,
    num_steps: int,
    balancer: str,
    cost_model: CostModel,
    max_tokens_ratio: float | None = 1.10,
    speeds: FloatArray | None = None,
) -> Loads:
    """The same for given batches: step -> lengths of its samples, in order."""
    shape = (num_steps, num_ranks)
    samples, tokens, squares = np.empty(shape), np.empty(shape), np.empty(shape)
    fair, planned, bound = np.empty(num_steps), np.empty(num_steps), np.empty(num_steps)
    reason = None
    sharing = named_balancer(BALANCERS[balancer])
    for step in range(num_steps):
        lengths = lengths_of(step)
        costs = cost_model.cost(lengths)
        plan = assign(
            costs,
            tokens=lengths,
            num_ranks=num_ranks,
            balancer=sharing,
            max_tokens_ratio=max_tokens_ratio,
            speeds=speeds,
        )
        sizes = lengths.astype(np.float64)
        samples[step], tokens[step] = plan.counts, plan.tokens
        squares[step] = np.bincount(plan.owner, weights=sizes * sizes, minlength=num_ranks)
        fair[step] = float(plan.times.max()) / plan.imbalance
        planned[step], bound[step] = float(plan.times.max()), fair[step] * plan.bound
        reason = reason or plan.reason
    idle, least = (1 - float(fair.sum() / latest.sum()) for latest in (planned, bound))
    return Loads(samples, tokens, squares, bound=max(0.0, least), planned=max(0.0, idle), reason=reason)


def check_balancer(name: str) -> None:
    """Refuse a name that is none."""
    if name not in BALANCERS:
        raise ConfigError(
            "there is no such balancer", got=name, allowed=nearest(name, BALANCERS) or ", ".join(BALANCERS)
        )
