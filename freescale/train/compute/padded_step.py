"""PaddedStep: what a step does with padded batches, whose work is recorded as CUDA graphs and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from freescale import trace
from freescale.balance import bucket_bytes
from freescale.embedding import EmbeddingTable
from freescale.pipeline import ReadyBatch
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import FlatSum
from freescale.train.compute.flat_gradients import VectorsOf
from freescale.train.compute.gradient_sums import GradientSums
from freescale.train.compute.padded_compute import PaddedCompute, WholeStep
from freescale.train.compute.postponed_pieces import PieceSums
from freescale.train.compute.recorder import RecordedUpdate, Recorder


class PaddedStep:
    """Forward, backward and update of padded batches, as the parts of a step; or as one piece of work (`is_whole`).

    Args:
        model: the dense part, not wrapped.
        optimizer: of the dense part; from now on it reads its rate from the device.
        recorder: records.
        sums: how gradients are added up.
        timer: of the step.
        precision: a context in which the forward runs.
        move_weights: scales gradients and updates; returns their norm before, if it was asked for.
        dropout_key: [1] the key of the step's masks.
        tables: whose rows a step reads and updates by itself; then it is one piece.
        vectors_of: makes item vectors.
        postpone_bytes: what is kept for gradients of weights that wait may take; None: none wait.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        recorder: Recorder,
        sums: GradientSums,
        timer: StepTimer,
        precision: Callable[[], AbstractContextManager[None]],
        move_weights: Callable[[], Tensor | None],
        dropout_key: Tensor,
        tables: Mapping[str, EmbeddingTable] | None,
        vectors_of: VectorsOf,
        postpone_bytes: int | None,
    ) -> None:
        self._recorder, self._flat_sum, self._late, self._timer = recorder, sums.flat, sums.late, timer
        own = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        if sums.late is not None:
            own = sums.late.in_order(own)
        self._dense_lr = _recordable(optimizer, dropout_key.device)
        self.is_whole = tables is not None
        whole = None if tables is None else WholeStep(tables, dropout_key, self._dense_lr, move_weights)
        self.compute = PaddedCompute(
            model,
            own,
            precision=precision,
            recorder=recorder,
            whole=whole,
            vectors_of=vectors_of,
            postpone_bytes=postpone_bytes,
            piece_bytes=_piece_bytes(own, sums.flat),
            late=sums.late,
        )
        self._pieces: PieceSums | None = None
        if self.compute.later is not None:
            assert sums.flat is not None
            self._pieces = PieceSums(sums.flat, late=sums.late, timer=timer)
        self._update = RecordedUpdate(move_weights, recorder=recorder)

    @property
    def held_bytes(self) -> int:
        """What recordings compute in."""
        return self._recorder.held_bytes

    def run_whole(self, ready: ReadyBatch) -> tuple[Tensor, Tensor | None, bool]:
        """All of a step: its loss, the norm of its gradients if it was asked for, and whether it is a replay."""
        padded = ready.padded
        assert padded is not None
        captured = self.compute.recordings.will_replay(padded)
        with self._timer.padded(ready.batch, num_tokens=padded.num_tokens):
            losses, norms = self.compute.run_whole(padded)
        if not losses.is_cuda:
            losses, norms = losses.clone(), None if norms is None else norms.clone()
        return losses, norms, captured

    def forward_backward(self, ready: ReadyBatch) -> tuple[Tensor, bool]:
        """The loss, and whether it comes from a replay."""
        assert ready.padded is not None
        parts = ready.padded.parts
        captured = self.compute.recordings.will_replay_all(parts)
        if self._late is not None:
            self._late.step_begins()
        with self._timer.padded(ready.batch, num_tokens=sum(part.num_tokens for part in parts)):
            rows = {name: lookup.rows for name, lookup in ready.lookups.items()}
            loss, grads = self.compute.run_parts(rows, parts)
            for name, grad in grads.items():
                # Gradients of rows may still be on their way when the next step overwrites them.
                rows[name].grad = grad if self._flat_sum is None else grad.clone()
        if self.compute.later is None and self._flat_sum is not None:
            self._timer.handed_over()
            self._flat_sum.start(self.compute.flat)
            self._flat_sum.finish()  # beside what rows keep this thread waiting for
        return loss, captured

    def compute_later(self) -> None:
        """Gradients of weights that have waited until those of rows had left."""
        if self._pieces is not None:
            with trace.compute("weight gradients"), self._timer.later_part():
                self.compute.compute_later(self._pieces.send)

    def leave(self, *, lr: float) -> bool:
        """Instead of waiting for sums, leave them to the next forward, where that is possible."""
        if self._pieces is None or not self._pieces.leave(lr=self._dense_lr):
            return False
        self._dense_lr.fill_(lr)
        return True

    def update(self, *, lr: float) -> Tensor | None:
        """Move the weights; the norm of the gradients, if it was asked for."""
        self._dense_lr.fill_(lr)
        return self._update.run()


def _recordable(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """Let the optimizer read its learning rate from the device, where a replay finds that of its step; the rate."""
    # In single precision, as the fused kernel wants it; a CPU takes the rate as exactly as a number.
    rate = torch.zeros((), device=device, dtype=None if device.type == "cuda" else torch.float64)
    for group in optimizer.param_groups:
        group["lr"] = rate
        if device.type == "cuda":
            group["capturable"] = True
    # Steps of sizes that are not recorded are no mistake.
    optimizer._warned_capturable_if_run_uncaptured = True
    return rate


def _piece_bytes(parameters: Sequence[nn.Parameter], total: FlatSum | None) -> int | None:
    """Gradients are handed over in pieces where their sums travel beside other work."""
    if total is None or not total.only_starts:
        return None
    return bucket_bytes(sum(param.nbytes for param in parameters))
