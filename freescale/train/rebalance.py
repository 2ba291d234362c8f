"""Keeps the balance true to the machine: at fixed steps the ranks pool what they measured and agree on a new plan.

Rank 0 fits the cost model and the speeds and sends them to all, so every rank plans with the same bits. It moves work
between ranks, never the curve. Decisions are logged, kept in checkpoints, and off with `balance.refit_every=null`.

Nobody waits for it: what is begun at one step is looked after some steps later, at the same ones on every rank. A fit
takes 5 ms with 4 ranks and 110 with 256.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

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
from freescale.comm.world import Ranks, wait_for
from freescale.errors import DataError

# Steps a rank remembers for its own fit, and those it brings to an agreement.
_REMEMBERED, _WINDOW = 512, 64

_MOVES = 8
"""An agreement takes three moves; with so many between two of them, it is over long before the next."""

Decision = dict[str, object]


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
    _talk: Generator[None, None, list[float]] | None = None
    _begun: int = 0

    def observe(self, steps: list[MeasuredStep]) -> None:
        """Remember measured steps."""
        self._recent.extend(step for step in steps if step.num_samples > 0 and step.ms > 0)

    def agree(self, step: int) -> Decision | None:
        """Where it is due: pool; some steps later, decide; then announce. Returns what was decided, for the log."""
        if self.every is None or self.ranks.control is None:
            return None
        apart = self.every // _MOVES
        if step % self.every == 0:
            self._talk, self._begun = self._agreement(), step
        elif self._talk is None or not apart or (step - self._begun) % apart:
            return None
        assert self._talk is not None
        try:
            next(self._talk)
            while not apart:  # they follow each other too closely to be spread
                next(self._talk)
        except StopIteration as over:
            self._talk = None
            return self._announce(step, over.value)
        return None

    def _announce(self, step: int, values: list[Any]) -> Decision:
        """Plan with it from a step on that nobody has planned yet."""
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

    def _agreement(self) -> Generator[None, None, list[float]]:
        """Yields where something was begun that takes its time."""
        mine = self._window()
        everybody = [torch.empty_like(mine) for _ in range(self.ranks.num_ranks)]
        gathering = dist.all_gather(everybody, mine, group=self.ranks.control, async_op=True)
        yield
        wait_for(gathering, what="agree on costs")
        numbers = torch.zeros(len(COEFFICIENTS) + self.ranks.num_ranks + 1, dtype=torch.float64)
        if self.ranks.is_first:
            with ThreadPoolExecutor(1, thread_name_prefix="fit costs") as thread:
                deciding = thread.submit(self._decide, _steps_of(everybody))
                yield
                numbers = torch.tensor(deciding.result(), dtype=torch.float64)
        else:
            yield
        telling = dist.broadcast(numbers, src=0, group=self.ranks.control, async_op=True)
        yield
        wait_for(telling, what="agree on costs")
        values: list[float] = numbers.tolist()
        return values

    def fit(self, *, hardware: str, model: str) -> CostModel | None:
        """The cost model of this rank's own steps, to be kept for other runs; None where they do not tell."""
        try:
            return fit_cost_model(self._recent, hardware=hardware, model=model).model
        except DataError:
            return None

    def _window(self) -> torch.Tensor:
        """The recent steps of this rank: [window, 4] numbers, 0 ms where there is none."""
        mine = torch.zeros(_WINDOW, 4, dtype=torch.float64)
        recent = list(self._recent)[-_WINDOW:]
        mine[: len(recent)] = torch.from_numpy(table_of(recent))
        return mine

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


def _steps_of(everybody: list[torch.Tensor]) -> list[list[MeasuredStep]]:
    """The steps that each rank has sent."""
    return [
        [
            MeasuredStep(num_samples=int(n), tokens=int(t), squares=s, ms=ms)
            for n, t, s, ms in rows.tolist()
            if ms > 0
        ]
        for rows in everybody
    ]
