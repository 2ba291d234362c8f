"""What is said where a step could not be computed, or left no number."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.balance import StepPlan
from freescale.errors import TrainingError


def memory_ran_out(
    error: torch.OutOfMemoryError,
    *,
    step: int,
    what: str,
    recorded_bytes: int,
    postponed_mb: float,
    accumulate: int,
) -> TrainingError:
    """What can be done where the memory of the GPU was not enough.

    Args:
        error: torch's own words.
        step: number of the step.
        what: was computed, and where.
        recorded_bytes: what recordings hold.
        postponed_mb: what is kept for postponed weight gradients.
        accumulate: micro-batches a step.
    """
    ways = []
    if recorded_bytes:
        ways.append(f"run.capture=off frees {recorded_bytes / 2**30:.1f} GiB of recordings")
    if postponed_mb:
        less = f"pipeline.postpone_mb={postponed_mb / 2:.0f}"
        ways.append(f"{less} keeps half as much for postponed weight gradients")
    ways.append(f"optim.accumulate={2 * accumulate} computes smaller parts of a batch one by one")
    return TrainingError(
        f"the memory of the GPU was not enough for step {step + 1}",
        got=f"{what}: {str(error).splitlines()[0]}",
        next_step="; ".join(ways),
    )


def loss_is_no_number(loss: float, plan: StepPlan, histories: Tensor, *, rank: int) -> TrainingError:
    """Which step, which batch, and whose histories."""
    return TrainingError(
        f"the loss is {loss} at step {plan.step + 1}",
        got=f"epoch {plan.epoch}, batch {plan.plan_hash}: histories {_some(histories)} on rank {rank}",
        next_step="lower optim.lr or embedding.lr, set optim.clip_norm=1, or look at those histories",
    )


def _some(rows: Tensor) -> str:
    shown = rows[:5].tolist()
    return str(shown) if len(rows) <= 5 else f"{str(shown)[:-1]}, ... {len(rows)} in all]"
