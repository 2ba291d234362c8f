"""One training step: forward and backward in micro-batches, dense update, rows sent home."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freescale.balance.work import WHOLE, SampleWork
from freescale.comm.priority import Gate
from freescale.comm.ranks import Ranks
from freescale.errors import TrainingError
from freescale.model.recommender import Recommender
from freescale.pipeline.schedule import ReadyBatch, Schedule
from freescale.trace.spans import compute
from freescale.train.dense_gradients import reduced_in_backward, sum_gradients
from freescale.train.item_vectors import BatchItems, looked_up
from freescale.train.timer import StepTimer


@dataclass(frozen=True)
class StepResult:
    """What a step did: this rank's share of the mean loss, and the norm of the dense gradient if it was clipped."""

    loss: float
    grad_norm: float | None


class TrainStep:
    """Forward, backward and both updates of one batch.

    The loss is the sum over this rank's tokens divided by the GLOBAL number of tokens, and gradients are summed over
    ranks. So it does not matter which rank computes which sample, or whether a rank has any.

    Args:
        model: the dense part.
        optimizer: of the dense part.
        encode_items: batch -> its item vectors; rows of the table unless given.
        ranks: who takes part.
        lr: base learning rate of the dense part.
        table_lr: base learning rate of the tables.
        lr_factor: step -> what both are multiplied with.
        clip_norm: bound on the norm of the dense gradient.
        accumulate: micro-batches a step.
        autocast: compute matrix products in bfloat16.
        seed: of dropout, together with step and rank; nothing else needs a random state.
        gate: shut while dense gradients travel.
        work: what a sequence of a length has to compute, kept with measured times.
    """

    def __init__(
        self,
        model: Recommender,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: Ranks,
        encode_items: Callable[[ReadyBatch], BatchItems] = looked_up,
        lr: float,
        table_lr: float,
        lr_factor: Callable[[int], float],
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: bool = False,
        seed: int = 0,
        gate: Gate | None = None,
        work: SampleWork = WHOLE,
    ) -> None:
        self.timer = StepTimer(ranks.device, work=work)
        self._parameters = list(model.parameters())
        self._encode_items = encode_items
        self._item_parameters = [] if model.items is None else list(model.items.parameters())
        model = model.without_items()
        self._model: nn.Module = model
        if ranks.group is not None:
            self._model = reduced_in_backward(
                model,
                ranks.group,
                timeout_s=ranks.timeout_s,
                gate=gate,
                handed_over=self.timer.handed_over,
            )
        self._optimizer = optimizer
        self._ranks = ranks
        self._lr, self._table_lr, self._lr_factor = lr, table_lr, lr_factor
        self._clip_norm = clip_norm
        self._accumulate = accumulate
        self._autocast = autocast
        self._seed = seed

    def run(self, ready: ReadyBatch, schedule: Schedule) -> StepResult:
        """Learn from one batch."""
        step = ready.plan.step
        torch.manual_seed(_mix(self._seed, step, self._ranks.rank))
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision():
            items = self._encode_items(ready)
        self.timer.start(items.rows)
        loss = self._forward_backward(ready, items)
        self.timer.finish(ready.batch)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {step + 1}",
                got=f"epoch {ready.plan.epoch}, batch {ready.plan.plan_hash}: histories "
                f"{_some(ready.batch.samples['row'])} on rank {self._ranks.rank}",
                next_step="lower optim.lr or embedding.lr, set optim.clip_norm=1, or look at those histories",
            )
        with _in_this_thread():
            items.send_back()
        sum_gradients(self._item_parameters, self._ranks)
        factor = self._lr_factor(step)
        with compute("update weights"):
            norm = self._clip()
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr * factor
            self._optimizer.step()
        schedule.update(ready, lr=self._table_lr * factor)
        return StepResult(loss=loss, grad_norm=norm)

    def _forward_backward(self, ready: ReadyBatch, items: BatchItems) -> float:
        parts = items.batch.split(self._accumulate) if self._accumulate > 1 else [items.batch]
        total = torch.zeros((), dtype=torch.float64)
        tokens = max(1, ready.plan.global_tokens)
        for n, part in enumerate(parts):
            with self._reduce_now(n == len(parts) - 1), self._precision():
                loss = self._model(items.rows, part) / tokens
            with _in_this_thread():
                loss.backward()
            total += loss.detach().double().cpu()
        return float(total)

    def _reduce_now(self, last: bool) -> AbstractContextManager[None]:
        """Gradients travel with the last micro-batch only."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self._ranks.device.type, torch.bfloat16, enabled=self._autocast)

    def _clip(self) -> float | None:
        if self._clip_norm is None:
            return None
        return float(nn.utils.clip_grad_norm_(self._parameters, self._clip_norm))


def _in_this_thread() -> AbstractContextManager[None]:
    """On a GPU autograd hands the backward over to a thread of its own: 0.4 ms that nothing is gained for."""
    return torch.autograd.set_multithreading_enabled(False)


def _mix(seed: int, step: int, rank: int) -> int:
    """A seed for torch, which takes 63 bits."""
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63


def _some(rows: Tensor) -> str:
    shown = rows[:5].tolist()
    return str(shown) if len(rows) <= 5 else f"{str(shown)[:-1]}, ... {len(rows)} in all]"
