"""One training step: forward and backward in micro-batches, dense update, rows sent home."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from freescale.balance import WHOLE, SampleWork, StepPlan
from freescale.comm.traffic import Gate
from freescale.comm.world import Ranks
from freescale.data import SequenceBatch
from freescale.embedding import EmbeddingTable
from freescale.errors import TrainingError
from freescale.kernels.dropout import key_of_step
from freescale.kernels.runtime import PostponedGradients, Readback, on_device
from freescale.model import Recommender, dropout_step
from freescale.pipeline import ReadyBatch, Schedule
from freescale.trace import compute
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import all_reduce_gradients
from freescale.train.compute.flat_gradients import VectorsOf, rows_of_items
from freescale.train.compute.gradient_sums import choose_sums
from freescale.train.compute.owned_parameters import OwnedParameters
from freescale.train.compute.padded_step import PaddedStep
from freescale.train.compute.postpone_story import postpone_story
from freescale.train.compute.recorder import Recorder
from freescale.train.compute.seeds import begin_step
from freescale.train.compute.step_errors import loss_is_no_number, memory_ran_out
from freescale.train.extension import StepExtension
from freescale.train.item_vectors import BatchItems, looked_up


@dataclass(frozen=True)
class StepResult:
    """What a step did on this rank; its numbers may still be on their way from the device, and asking waits for them.

    Args:
        losses: this rank's share of the mean loss.
        norms: norm of the dense gradient over the whole model, if it was clipped.
        counts: numbers of every extension, in their order.
        captured: its forward and backward were replayed; None where no batch is padded for that.
    """

    losses: Readback
    norms: Readback | None
    counts: tuple[Readback, ...] = ()
    captured: bool | None = None

    @property
    def loss(self) -> float:
        """This rank's share of the mean loss."""
        return float(self.losses.read())

    @property
    def grad_norm(self) -> float | None:
        """Norm of the dense gradient over the whole model, if it was clipped."""
        return None if self.norms is None else float(self.norms.read())

    @property
    def counted(self) -> list[Tensor]:
        """Numbers of every extension on the CPU, in their order."""
        return [counts.read() for counts in self.counts]


class TrainStep:
    """Forward, backward and both updates of one batch.

    The loss is the sum over this rank's tokens divided by the GLOBAL number of tokens that have a loss, and gradients
    are summed over ranks. So it does not matter which rank computes which sample, or whether a rank has any.

    Args:
        model: the dense part.
        optimizer: of the dense part.
        encode_items: batch -> its item vectors; rows of the table unless given.
        ranks: who takes part.
        owned: parameters that this rank holds a part of.
        extensions: what takes part in every step.
        lr: base learning rate of the dense part.
        table_lr: base learning rate of the tables.
        lr_factor: step -> what both are multiplied with.
        clip_norm: bound on the norm of the dense gradient.
        accumulate: micro-batches a step.
        autocast: compute matrix products in bfloat16.
        seed: of dropout, whose masks follow from it, step and sample. torch's own random numbers, for modules from
            outside that use them, begin anew from seed, step and rank.
        gate: shut while dense gradients travel.
        transport: how rows travel, and the numbers of a step.
        sums: how dense gradients do; "auto": the group of the ranks adds them up where it can, else as rows.
        work: what a sequence of a length has to compute, kept with measured times.
        recorder: records steps of padded batches as CUDA graphs; without one batches must not be padded.
        tables: whose rows steps of padded batches read and update by themselves; they then come without rows.
        vectors_of: makes item vectors in steps of padded batches, instead of `encode_items`.
        postpone_bytes: gradients of weights are computed after those of rows have left, and what is kept for them may
            take so much; None: in the plain order. With a recorder only on several ranks.
        postpone_share: step -> how much of what could be postponed is; all unless given.
    """

    def __init__(
        self,
        model: Recommender,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: Ranks,
        owned: OwnedParameters,
        extensions: Sequence[StepExtension] = (),
        encode_items: Callable[[ReadyBatch], BatchItems] = looked_up,
        lr: float,
        table_lr: float,
        lr_factor: Callable[[int], float],
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: bool = False,
        seed: int = 0,
        gate: Gate | None = None,
        transport: str = "auto",
        sums: str = "auto",
        work: SampleWork = WHOLE,
        recorder: Recorder | None = None,
        tables: Mapping[str, EmbeddingTable] | None = None,
        vectors_of: VectorsOf = rows_of_items,
        postpone_bytes: int | None = None,
        postpone_share: Callable[[int], float] | None = None,
    ) -> None:
        self.timer = StepTimer(ranks.device, work=work)
        self.extensions = tuple(extensions)
        self._owned = owned
        self._encode_items = encode_items
        self._item_parameters = [] if model.items is None else list(model.items.parameters())
        model = model.without_items()
        self._loss_weights: Callable[[SequenceBatch], Tensor] | None = getattr(
            model.head, "loss_weights", None
        )
        self._postpone_share = postpone_share
        chosen = choose_sums(
            model,
            optimizer,
            ranks=ranks,
            owned=owned,
            padded=recorder is not None,
            postpone_bytes=postpone_bytes,
            clipped=clip_norm is not None,
            transport=transport,
            sums=sums,
            gate=gate,
            timer=self.timer,
        )
        self._model, self._sums, self.sums_by = chosen.model, chosen.sums, chosen.by
        self._split, self._late = chosen.split, chosen.late
        self._optimizer = optimizer
        self._parameters = [param for group in optimizer.param_groups for param in group["params"]]
        self._ranks, self.transport = ranks, transport
        shared = ranks.num_ranks > 1 and ranks.device.type == "cuda"
        self._readbacks = torch.cuda.Stream(ranks.device) if shared else None
        self._lr, self._table_lr, self._lr_factor = lr, table_lr, lr_factor
        self._clip_norm = clip_norm
        self._accumulate = accumulate
        self._autocast = autocast
        self._seed = seed
        # Filled anew in every step, so that recorded work finds the step's key where it lay.
        self._dropout_key = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        self.padded: PaddedStep | None = None
        if recorder is not None:
            self.padded = PaddedStep(
                model,
                optimizer,
                recorder=recorder,
                sums=chosen,
                timer=self.timer,
                precision=self._precision,
                move_weights=self._move_weights,
                dropout_key=self._dropout_key,
                tables=tables,
                vectors_of=vectors_of,
                postpone_bytes=postpone_bytes,
            )

    def run(self, ready: ReadyBatch, schedule: Schedule) -> StepResult:
        """Learn from one batch."""
        try:
            if (padded := self._padded_for(ready)) is not None and padded.is_whole:
                with dropout_step(self._dropout_key):
                    return self._run_whole(padded, ready)
            self._dropout_key.fill_(key_of_step(self._seed, ready.plan.step))
            with dropout_step(self._dropout_key):
                return self._run(ready, schedule)
        except torch.OutOfMemoryError as error:
            raise self.too_full(ready.plan.step, error, ready.batch) from error

    def _run(self, ready: ReadyBatch, schedule: Schedule) -> StepResult:
        step, padded = ready.plan.step, self._padded_for(ready)
        begin_step(self._seed, step, self._ranks.rank, self._ranks.device)
        if self._split is not None and self._postpone_share is not None:
            self._split.postponed.share = self._postpone_share(step)
        for param in self._parameters:
            param.grad = None  # as `zero_grad` does, without its hooks
        for extension in self.extensions:
            extension.begin(ready)
        captured, items = None, None
        if padded is not None:
            losses, captured = padded.forward_backward(ready)
        else:
            with self._precision():
                items = self._encode_items(ready)
            self.timer.start(items.rows)
            if self._late is not None:
                self._late.step_begins()
            losses = self._forward_backward(ready, items)
            self.timer.finish(ready.batch)
        loss = Readback(losses, beside=self._readbacks)
        if not self._sums.outlast_backward:
            self.timer.summed()
        counts = tuple(
            Readback(extension.counts(step), beside=self._readbacks) for extension in self.extensions
        )
        if loss.here:  # on a CPU; on a GPU a loss that is not finite is found when the step is reported
            self.check(ready.plan, ready.batch.samples["row"], StepResult(loss, None, counts))
        if items is not None:
            with _in_this_thread():
                items.send_back()
            all_reduce_gradients(self._item_parameters, self._ranks)
        factor = self._lr_factor(step)
        # Rows first: dense gradients may be added up meanwhile.
        schedule.update(ready, lr=self._table_lr * factor)
        if self._split is not None:
            self._split.compute()
        elif padded is not None:
            padded.compute_later()
        lr = self._lr * factor
        left = self._leave_sums(padded, lr=lr)
        if self._sums.outlast_backward and not left:
            self.timer.wait_for_sums()
            self._sums.wait()
            self.timer.summed()
        with compute("update weights"):
            norm = None
            if padded is None:
                norm = self._move_weights(lr=lr)
            elif not left:
                norm = padded.update(lr=lr)
        return StepResult(
            loss, None if norm is None else Readback(norm, beside=self._readbacks), counts, captured
        )

    def too_full(
        self, step: int, error: torch.OutOfMemoryError, batch: SequenceBatch | None = None
    ) -> TrainingError:
        """What can be done where the memory of the GPU was not enough for a step, or for what happens beside it."""
        samples = "" if batch is None else f"{len(batch):,} samples with {batch.num_tokens:,} tokens "
        return memory_ran_out(
            error,
            step=step,
            what=f"{samples}on rank {self._ranks.rank}",
            recorded_bytes=0 if self.padded is None else self.padded.held_bytes,
            postponed_mb=self.postponed_mb(),
            accumulate=self._accumulate,
        )

    def _run_whole(self, padded: PaddedStep, ready: ReadyBatch) -> StepResult:
        """The same as one piece of work, in which everything lies where it is read; all of it can be one replay."""
        for extension in self.extensions:
            extension.begin(ready)
        losses, norms, captured = padded.run_whole(ready)
        loss, norm = Readback(losses), None if norms is None else Readback(norms)
        counts = tuple(Readback(extension.counts(ready.plan.step)) for extension in self.extensions)
        result = StepResult(loss, norm, counts, captured)
        if loss.here:  # as above
            self.check(ready.plan, ready.batch.samples["row"], result)
        return result

    def settle(self) -> None:
        """Update what is left to the next forward: before anybody else looks at the weights."""
        if self._late is not None:
            self._late.settle()

    def postponed_mb(self) -> float:
        """The most that was kept for postponed weight gradients so far, in MiB."""
        return 0.0 if self._postponed is None else self._postponed.most_kept_bytes / (1 << 20)

    def postpone_story(self) -> str | None:
        """What was kept for postponed weight gradients, and how many had no room; None where none was to wait."""
        return None if self._postponed is None else postpone_story(self._postponed)

    @property
    def _postponed(self) -> PostponedGradients | None:
        by = self._split if self.padded is None else self.padded.compute.later
        return None if by is None else by.postponed

    def captured_share(self) -> float | None:
        """Of all batches those that were replayed; None where none could be."""
        return None if self.padded is None else self.padded.compute.recordings.share()

    def capture_story(self) -> str | None:
        """How many batches were replayed, why others were not, and what pads cost; None where none could be."""
        story = None if self.padded is None else self.padded.compute.recordings.story()
        return None if story is None else f"{story}; pads add {self.timer.pads:.1%} to the tokens"

    def check(self, plan: StepPlan, histories: Tensor, result: StepResult) -> None:
        """Raise where the loss of a step over these histories is no number."""
        if math.isfinite(result.loss):
            return
        for extension, counts in zip(self.extensions, result.counted, strict=True):
            extension.check(counts)
        raise loss_is_no_number(result.loss, plan, histories, rank=self._ranks.rank)

    def _forward_backward(self, ready: ReadyBatch, items: BatchItems) -> Tensor:
        parts = items.batch.split(self._accumulate) if self._accumulate > 1 else [items.batch]
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        layouts = ready.layouts or (None,) * len(parts)
        tokens = ready.plan.divisor
        if self._loss_weights is not None:
            # Tasks are divided by their own weight over all ranks, not by the number of tokens. Counted where the batch
            # was loaded: the host would wait for the device, and have nothing queued for it when it goes on.
            own = self._loss_weights(items.batch if ready.loaded is None else ready.loaded)
            totals = on_device(self._ranks.sum_on_cpu(own.cpu()), self._ranks.device)
            parts = [part.with_samples(loss_weights=totals.expand(len(part), -1)) for part in parts]
            tokens = 1
        for n, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
            last = n == len(parts) - 1
            with nullcontext() if self._split is None else self._split.taking(last):
                with self._reduce_now(last), self._precision():
                    loss = self._model(items.rows, part, layout, items.tables) / tokens
                with _in_this_thread():
                    loss.backward()
            total += loss.detach().double()
        return total

    def _padded_for(self, ready: ReadyBatch) -> PaddedStep | None:
        """What computes this batch, where it is padded."""
        if ready.padded is None:
            return None
        if self.padded is None:
            raise TrainingError("a step without a recorder takes no padded batches")
        return self.padded

    def _leave_sums(self, padded: PaddedStep | None, *, lr: float) -> bool:
        """Instead of waiting for sums, leave them to the next forward, where that is possible."""
        if self._split is not None:
            return self._split.leave(lr=lr)
        return padded is not None and padded.leave(lr=lr)

    def _reduce_now(self, last: bool) -> AbstractContextManager[None]:
        """Gradients travel with the last micro-batch only."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self._ranks.device.type, torch.bfloat16, enabled=self._autocast)

    def _move_weights(self, *, lr: float | None = None) -> Tensor | None:
        """Clip and update, by this rate if it is given; the norm of the gradients before, where they are clipped."""
        if lr is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        norm = self._clip()
        self._optimizer.step()
        return norm

    def _clip(self) -> Tensor | None:
        if self._clip_norm is None:
            return None
        return self._owned.clip(self._clip_norm)


def _in_this_thread() -> AbstractContextManager[None]:
    """On a GPU autograd hands the backward over to a thread of its own: 0.4 ms that nothing is gained for."""
    return torch.autograd.set_multithreading_enabled(False)
