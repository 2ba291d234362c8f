"""Plans every step before anything is read: this rank's rows of a global batch that all ranks agree on."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.costs.cost_model import CostModel
from freescale.balance.costs.decisions import Decisions
from freescale.balance.global_batches import GlobalBatches
from freescale.balance.limits import checked_speeds
from freescale.balance.step_plan import (
    Balancer,
    Cost,
    StepPlan,
    assign,
    imbalance_in_turn,
    named_balancer,
    plan_hash,
)
from freescale.balance.window_batches import WindowBatches
from freescale.balance.work import WHOLE, SampleWork
from freescale.errors import CheckpointError, PlanError

__all__ = ["BalancedSampler", "StepPlan"]

_WIDE = 3
"""Standard deviations of a sum of lengths that are dealt out in turn; balanced ones differ less."""
_LOOKED_AT = 32
"""Steps that tell what others will be like."""


class BalancedSampler:
    """Batch sampler that gives each rank its share of every global batch, with equal predicted time a rank.

    All ranks compute the same partition from the length index, so nothing is exchanged and any map-style data
    set, any DataLoader (`batch_sampler=`) and any model can use it. The global batches come from
    `GlobalBatches` and do not depend on the ranks: divide the summed loss by the GLOBAL count and balancing
    changes no gradient. It is already rank-aware, so do not let a trainer shard it again. A rank gets an
    empty list where a batch has fewer samples than ranks.

    One iteration is one epoch, and the next iteration is the next epoch, reshuffled. With `num_steps` one
    iteration is that many steps over any number of epochs.

    Args:
        lengths: [rows] tokens of every row, cut to the model's maximum by the caller; or what makes the global
            batches itself (`WindowBatches`), which then knows their size, seed and order.
        global_batch: samples a step over all ranks (or `global_tokens`).
        global_tokens: tokens a step over all ranks.
        num_ranks: number of ranks; that of torch.distributed unless given, 1 where it is not set up.
        rank: this rank; the same.
        cost_model: predicts the cost of a sample from its length; None takes `CostModel.default()`.
        seed: seed of the order.
        balanced: False deals the batch out in turn: random assignment with equal counts.
        balancer: a name or an object that shares batches out; unless given, "lpt", or "round_robin" where
            `balanced` is False.
        max_tokens_ratio: memory cap of a rank in mean tokens a rank, loosened where one sample alone is
            longer or speeds differ; None for no cap.
        window: see GlobalBatches.
        window_ranks: see GlobalBatches; not the number of ranks that happens to run.
        groups: see GlobalBatches.
        shuffle_rows: see GlobalBatches.
        shuffle: see GlobalBatches.
        drop_last: leave out the incomplete last batch of an epoch.
        start_step: the step to begin with.
        num_steps: steps of the whole run; None for epoch after epoch.
        speeds: [ranks] relative speed of every rank, the same list on all of them.
        decisions: cost model and speeds by step, as a trainer agrees on them; takes the place of both.
        work: what a sample has to compute where attention is masked; whole sequences unless given.
        min_count: samples that every rank gets at least, where a batch has as many: some collectives of other
            libraries fail on a rank without any.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.integer] | WindowBatches,
        *,
        global_batch: int | None = None,
        global_tokens: int | None = None,
        num_ranks: int | None = None,
        rank: int | None = None,
        cost_model: Cost | None = None,
        seed: int = 0,
        balanced: bool = True,
        balancer: str | Balancer | None = None,
        max_tokens_ratio: float | None = 1.10,
        window: int = 1,
        window_ranks: int | None = None,
        groups: Sequence[int] | npt.NDArray[np.integer] | None = None,
        shuffle_rows: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        start_step: int = 0,
        num_steps: int | None = None,
        speeds: Sequence[float] | FloatArray | None = None,
        decisions: Decisions | None = None,
        work: SampleWork = WHOLE,
        min_count: int = 0,
    ) -> None:
        here = _ranks_here()
        num_ranks = here[0] if num_ranks is None else num_ranks
        rank = here[1] if rank is None else rank
        _check_ranks(num_ranks=num_ranks, rank=rank, max_tokens_ratio=max_tokens_ratio)
        if start_step < 0 or (num_steps is not None and num_steps < 0):
            raise PlanError(
                "Steps must not be negative.", got=f"start_step={start_step}, num_steps={num_steps}"
            )
        self.batches: GlobalBatches | WindowBatches
        if isinstance(lengths, WindowBatches):
            self.batches = lengths
        else:
            self.batches = GlobalBatches(
                lengths,
                global_batch=global_batch,
                global_tokens=global_tokens,
                seed=seed,
                groups=groups,
                shuffle_rows=shuffle_rows,
                shuffle=shuffle,
                drop_last=drop_last,
                window=window,
                window_ranks=window_ranks,
            )
        self.num_ranks = num_ranks
        self.rank = rank
        self.balancer = _chosen(balancer, balanced=balanced)
        self.max_tokens_ratio = max_tokens_ratio
        self.cost_model: Cost = CostModel.default() if cost_model is None else cost_model
        self.speeds = None if speeds is None else checked_speeds(speeds, num_ranks)
        self.decisions = decisions
        self.work = work
        self.min_count = min_count
        self._end_step = None if num_steps is None else start_step + num_steps
        self._first_step = start_step
        self._next_step = start_step

    def plan(self, step: int) -> StepPlan:
        """This rank's rows of a step, counted from 0 over all epochs, and the balance over all ranks."""
        epoch, _ = self.batches.locate(step)
        rows = self.batches.batch(step)
        lengths = self.batches.lengths_of(rows)
        cost_model, speeds = self.decisions.at(step) if self.decisions else (self.cost_model, self.speeds)
        costs = self._costs(cost_model, lengths)
        assignment = assign(
            costs,
            tokens=self.work.tokens(lengths).astype(np.int64),
            num_ranks=self.num_ranks,
            balancer=self.balancer,
            max_tokens_ratio=self.max_tokens_ratio,
            speeds=speeds,
            min_count=self.min_count,
        )
        return StepPlan(
            step=step,
            epoch=epoch,
            rows=rows[assignment.owner == self.rank],
            global_samples=len(rows),
            global_tokens=int(lengths.sum()),
            imbalance=assignment.imbalance,
            bound=assignment.bound,
            plan_hash=plan_hash(rows, assignment.owner),
            imbalance_in_turn=imbalance_in_turn(costs, num_ranks=self.num_ranks, speeds=speeds),
            global_targets=int(self.batches.targets_of(rows).sum()),
        )

    def usual_tokens(self, *, parts: int = 1) -> tuple[int, int]:
        """Fewest and most tokens of this rank in nearly all steps, for those who prepare for them; nothing is planned.

        Args:
            parts: micro-batches a step.
        """
        ends = []
        for step in self.batches.some_steps(_LOOKED_AT):
            tokens = self.work.tokens(self.batches.lengths_of(self.batches.batch(step)))
            samples = len(tokens) / (self.num_ranks * parts)
            mean, spread = samples * tokens.mean(), _WIDE * math.sqrt(samples) * tokens.std()
            ends += [mean - spread, mean + spread]
        return max(0, round(min(ends))), round(max(ends))

    def _costs(self, cost_model: Cost, lengths: IntArray) -> FloatArray:
        """Predicted cost of each sample; a model of one's own is asked for lengths, ours for tokens and attention."""
        if not isinstance(cost_model, CostModel):
            return cost_model.cost(lengths)
        return cost_model.cost_of(self.work.tokens(lengths), self.work.squares(lengths))

    def plans(self, start_step: int, num_steps: int) -> Iterator[StepPlan]:
        """Plans of this many steps, on over the ends of epochs."""
        for step in range(start_step, start_step + num_steps):
            yield self.plan(step)

    def set_speeds(self, speeds: Sequence[float] | FloatArray | None) -> None:
        """Plan from now on for these rank speeds; call it on all ranks before the same step."""
        self.speeds = None if speeds is None else checked_speeds(speeds, self.num_ranks)

    def set_cost_model(self, cost_model: Cost) -> None:
        """Plan from now on with this model; call it with the same one on all ranks before the same step."""
        self.cost_model = cost_model

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; a position restored inside that same epoch is kept."""
        if self.batches.locate(self._first_step)[0] != epoch:
            self._first_step = self._next_step = self.batches.first_step(epoch)

    def __len__(self) -> int:
        """Batches the next iteration yields."""
        return max(0, self._last_step() - self._first_step)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's row numbers, step by step, to the end of the epoch (or of `num_steps`)."""
        last = self._last_step()
        self._next_step = self._first_step
        while self._next_step < last:
            rows = self.plan(self._next_step).rows.tolist()
            self._next_step += 1
            yield rows
        self._first_step = self._next_step

    def _last_step(self) -> int:
        if self._end_step is not None:
            return self._end_step
        epoch, _ = self.batches.locate(self._first_step)
        return self.batches.first_step(epoch + 1)

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Position, recipe of the batches, and what was measured.

        A DataLoader with workers asks for batches ahead of the training: pass the number of steps trained.
        """
        position = self._next_step if step is None else step
        model = self.cost_model
        return {
            "step": position,
            "epoch": self.batches.locate(position)[0],
            "recipe": self.batches.recipe(),
            "speeds": None if self.speeds is None else self.speeds.tolist(),
            "cost_model": asdict(model) if isinstance(model, CostModel) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on any number of ranks; speeds are kept where the ranks match.

        Raises:
            CheckpointError: the state is of something else, or of batches made by another recipe or data.
        """
        missing = {"step", "recipe"} - set(state)
        if missing:
            raise CheckpointError(f"This is not the state of a sampler: it lacks {sorted(missing)}.")
        mine = self.batches.recipe()
        changed = {
            name: state["recipe"].get(name) for name in mine if state["recipe"].get(name) != mine[name]
        }
        if changed:
            raise CheckpointError(
                "The saved position belongs to other global batches.",
                got=changed,
                allowed={name: mine[name] for name in changed},
                next_step="resume with the data and batch settings of the saved run, or start anew",
            )
        self._first_step = self._next_step = int(state["step"])
        if state.get("cost_model") is not None:
            self.cost_model = CostModel(**state["cost_model"])
        speeds = state.get("speeds")
        if speeds is not None and len(speeds) == self.num_ranks:
            self.set_speeds(speeds)


def _chosen(balancer: str | Balancer | None, *, balanced: bool) -> Balancer:
    if balancer is None:
        return named_balancer("lpt" if balanced else "round_robin")
    if not balanced:
        raise PlanError(
            "balanced=False names a balancer of its own.",
            got=f"balancer={balancer!r} besides",
            next_step="leave out balanced, or balancer",
        )
    return named_balancer(balancer)


def _ranks_here() -> tuple[int, int]:
    """How many ranks torch.distributed has and which this is; torch is looked at, never imported."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


def _check_ranks(*, num_ranks: int, rank: int, max_tokens_ratio: float | None) -> None:
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise PlanError(
            "The rank must be one of at least one rank.",
            got=f"rank {rank} of {num_ranks}",
            allowed="0 <= rank < num_ranks",
        )
    if max_tokens_ratio is not None and not max_tokens_ratio >= 1:
        raise PlanError(
            "The token cap must be at least the mean of a rank.", got=max_tokens_ratio, allowed=">= 1 or None"
        )
