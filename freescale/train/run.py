"""Run: the parts of a run. `freescale.recipe` puts them together, `loop` makes them work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from freescale.comm.world import Ranks
from freescale.data import DataDigest
from freescale.embedding import IdMap, ShardedEmbedding
from freescale.errors import ConfigError
from freescale.model import Recommender
from freescale.pipeline import PostponeShare, Schedule, Switch
from freescale.train.accounts.accounting import Accounts
from freescale.train.compute.owned_parameters import OwnedParameters
from freescale.train.compute.step import TrainStep
from freescale.train.extension import StepExtension, check_names
from freescale.train.growing_log import GrowingLog, WindowTimetable
from freescale.train.log.events import Progress
from freescale.train.quality.run_evaluation import Evaluation
from freescale.train.rebalance import Rebalancer
from freescale.train.state.checkpoint import Checkpoints
from freescale.train.stop_request import StopRequest


@dataclass(kw_only=True)
class RunState:
    """What learns, and what a checkpoint keeps of it.

    Args:
        model: the dense part.
        optimizer: of the dense part.
        owned: parameters of the dense part that this rank holds a part of.
        embedding: the tables.
        id_maps: of every table, raw ids to rows.
        extensions: what takes part in every step, the same objects as those of the step; their tensors are kept.
        recipe: the configuration, kept beside the tensors.
        data: what it learns from, kept, too.
        hosts: of all ranks.
        identity: what tells it from other runs; stays where it goes on, also elsewhere or with other data.
    """

    model: Recommender
    optimizer: torch.optim.Optimizer
    owned: OwnedParameters
    embedding: ShardedEmbedding
    id_maps: Mapping[str, IdMap]
    extensions: Sequence[StepExtension]
    recipe: Mapping[str, Any]
    data: DataDigest
    hosts: Sequence[str]
    identity: str

    def __post_init__(self) -> None:
        check_names(self.extensions)

    @property
    def learns_ids(self) -> bool:
        """Whether any map gives rows to ids in training."""
        return any(each.learns for each in self.id_maps.values())


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """How long a run is, and after which steps it stops to look and to save.

    Args:
        total_steps: length of the run.
        eval_every: steps between evaluations; 0: never.
        checkpoint_every: steps between checkpoints; None: with every evaluation.
        first_eval: no evaluation before this step, but the last.
    """

    total_steps: int
    eval_every: int
    checkpoint_every: int | None
    first_eval: int = 0

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether an evaluation and a checkpoint are due after a step (from 1)."""
        last = step == self.total_steps
        every = self.eval_every if last or step >= self.first_eval else 0
        return due_at(step, every=every, save_every=self.checkpoint_every, last=last)


def due_at(step: int, *, every: int, save_every: int | None, last: bool = False) -> tuple[bool, bool]:
    """Whether an evaluation and a checkpoint are due after a step (from 1); without `save_every` they go together."""
    evaluates = every > 0 and (last or step % every == 0)
    return evaluates, last or (evaluates if save_every is None else step % save_every == 0)


@dataclass(kw_only=True)
class Run:
    """The parts of a run.

    Args:
        ranks: who takes part.
        state: what learns and is saved.
        timetable: how long, and what is due when.
        open_schedule: (first step) -> batches with their rows, from there to the end.
        usual_tokens: fewest and most of a batch of this rank, nearly always.
        train_step: learns from one batch.
        rebalancer: agrees on costs and speeds measured in the run.
        switch: agrees on whether hiding traffic pays.
        postponing: agrees on how much of the weight gradients is postponed, where that is to be found out.
        evaluation: how good the run is, and was.
        checkpoints: where state is kept.
        progress: where events go.
        accounts: where step lines wait until their time is accounted for.
        stop: whether and where it is told to stop.
        log: the log it learns from, where the data grow.
        train_samples: of an epoch; 0 where the data grow.
    """

    ranks: Ranks
    state: RunState
    timetable: Timetable | WindowTimetable
    open_schedule: Callable[[int], Schedule]
    usual_tokens: tuple[int, int]
    train_step: TrainStep
    rebalancer: Rebalancer
    switch: Switch
    evaluation: Evaluation
    checkpoints: Checkpoints
    progress: Progress
    accounts: Accounts
    postponing: PostponeShare | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    log: GrowingLog | None = None
    train_samples: int = 0

    def __post_init__(self) -> None:
        if self.accounts.busy is not None:  # balance and accounts mean the same by compute
            self.train_step.timer.busy = self.accounts.busy.times
        if tuple(self.state.extensions) != self.train_step.extensions:
            raise ConfigError(
                "a run and its step must have the same extensions",
                got=f"state: {_names(self.state.extensions)}; train_step: {_names(self.train_step.extensions)}",
                next_step="give the same tuple to RunState and to TrainStep",
            )


def _names(extensions: Sequence[StepExtension]) -> str:
    return ", ".join(extension.name for extension in extensions) or "none"
