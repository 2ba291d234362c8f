"""Keeps the balance true to the machine: at fixed steps the ranks pool what they measured and agree on a new plan.

Rank 0 fits the cost model and the speeds and sends them to all, so every rank plans with the same bits. It moves work
between ranks, never the curve. Decisions are logged, kept in checkpoints, and off with `balance.refit_every=null`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from freescale.balance import (
    COEFFICIENTS,
    CostModel,
    Decisions,
    MeasuredStep,
    OnlineCostModel,
    at_equal_speed,
    fit_cost_model,
    measured_speeds,
    next_speeds,
    speed_errors,
    table_of,
)
from freescale.comm.world import Ranks
from freescale.errors import DataError
from freescale.trace import exchange

# Steps a rank remembers for its own fit, and those it brings to an agreement.
_REMEMBERED, _WINDOW = 512, 64


@dataclass(kw_only=True)
class Rebalancer:
    """Observes this rank's steps and takes part in the agreement.

    Args:
        decisions: where agreed numbers go, and what the sampler plans with.
        ranks: who agrees.
        every: steps between agreements; None: never.
        lookahead: steps the loader may already have planned.
    """

    decisions: Decisions
    ranks: Ranks
    every: int | None
    lookahead: int
    _recent: deque[MeasuredStep] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def observe(self, steps: list[MeasuredStep]) -> None:
        """Remember measured steps."""
        self._recent.extend(step for step in steps if step.num_samples > 0 and step.ms > 0)

    def agree(self, step: int) -> dict[str, object] | None:
        """At a step where it is due: pool, decide, announce. Returns what was decided, for the log."""
        if self.every is None or self.ranks.control is None or step % self.every:
            return None
        with exchange("agree on costs"):
            pooled = self._pool()
        numbers = torch.zeros(len(COEFFICIENTS) + self.ranks.num_ranks + 1, dtype=torch.float64)
        if self.ranks.is_first:
            numbers = torch.tensor(self._decide(pooled), dtype=torch.float64)
        with exchange("agree on costs"):
            dist.broadcast(numbers, src=0, group=self.ranks.control)
        values = numbers.tolist()
        model = CostModel(**dict(zip(COEFFICIENTS, values[: len(COEFFICIENTS)])))
        speeds, error = values[len(COEFFICIENTS) : -1], values[-1]
        from_step = step + self.lookahead
        self.decisions.announce(from_step, model, speeds)
        return {
            "from_step": from_step,
            "model_error": error,
            "speeds": speeds,
            "cost_model": values[: len(COEFFICIENTS)],
        }

    def fit(self, *, hardware: str, model: str) -> CostModel | None:
        """The cost model of this rank's own steps, to be kept for other runs; None where they do not tell."""
        try:
            return fit_cost_model(self._recent, hardware=hardware, model=model).model
        except DataError:
            return None

    def _pool(self) -> list[list[MeasuredStep]]:
        """The recent steps of every rank, on every rank: [ranks, window, 4] numbers, 0 ms where there is none."""
        mine = torch.zeros(_WINDOW, 4, dtype=torch.float64)
        recent = list(self._recent)[-_WINDOW:]
        mine[: len(recent)] = torch.from_numpy(table_of(recent))
        everybody = [torch.empty_like(mine) for _ in range(self.ranks.num_ranks)]
        dist.all_gather(everybody, mine, group=self.ranks.control)
        return [
            [
                MeasuredStep(num_samples=int(n), tokens=int(t), squares=s, ms=ms)
                for n, t, s, ms in rows.tolist()
                if ms > 0
            ]
            for rows in everybody
        ]

    def _decide(self, pooled: list[list[MeasuredStep]]) -> list[float]:
        model, current = self.decisions.latest()
        speeds = measured_speeds(pooled, model)
        online = OnlineCostModel(model)
        fair = [step for steps, speed in zip(pooled, speeds) for step in at_equal_speed(steps, float(speed))]
        try:
            model = online.refit(fair)
        except DataError:
            # The steps do not tell (all alike, or too few): keep the model that is there.
            model = online.model
        speeds = next_speeds(current, measured_speeds(pooled, model), speed_errors(pooled, model))
        return [*(getattr(model, name) for name in COEFFICIENTS), *speeds, model.error or 0.0]
