"""Weights that have blown up: a run notices them before it evaluates or saves them.

A loss can stay finite over weights that no longer mean anything: normalized layers make something ordinary of inputs of
any size. So at evaluations and checkpoints every weight and every moment is looked at, in one pass over memory, and all
ranks stop together if one of them holds what cannot be gone on with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from freescale.comm.world import gather
from freescale.errors import TrainingError
from freescale.train.run import Run
from freescale.train.state.run_state import run_tensors

LARGEST_WEIGHT = 1e18
"""A float32 overflows when something larger is squared; norms and second moments square weights and gradients."""
LARGEST_MOMENT = LARGEST_WEIGHT**2
"""Moments may be squares themselves."""


def check_weights(run: Run, step: int) -> None:
    """Raise on every rank where a weight or moment of any rank is not finite, or absurdly large.

    Raises:
        TrainingError: names the tensor, the rank and the step.
    """
    bad = first_blown_up(run)
    if bad is None:
        return
    rank, there = bad
    raise TrainingError(
        f"weights have blown up after step {step}: {next(iter(there))}",
        got=describe_blown_up(rank, there),
        allowed=f"finite numbers up to {LARGEST_WEIGHT:g} (moments: {LARGEST_MOMENT:g})",
        next_step=f"lower {_learning_rate(there)}, or set optim.clip_norm=1; this state was not saved, "
        "so the run resumes from the checkpoint before it, or starts again with --resume never",
    )


def first_blown_up(run: Run) -> tuple[int, dict[str, float]] | None:
    """The first rank with weights or moments that have blown up, and their largest magnitudes; alike on every rank."""
    weights, moments = _held_here(run)
    found = blown_up(weights, limit=LARGEST_WEIGHT) | blown_up(moments, limit=LARGEST_MOMENT)
    bad = torch.tensor([float(len(found))], dtype=torch.float64)
    if not run.ranks.sum_on_cpu(bad, what="compare weights").item():
        return None
    parts = gather(found, group=run.ranks.control, what="compare weights")
    return next((rank, part) for rank, part in enumerate(parts) if part)


def describe_blown_up(rank: int, found: Mapping[str, float]) -> str:
    """How large the first of them is, and how many there are."""
    others = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
    return f"its largest magnitude is {next(iter(found.values())):.3g} on rank {rank}{others}"


def blown_up(tensors: Mapping[str, Tensor], *, limit: float) -> dict[str, float]:
    """Of these tensors those with a number beyond the limit or none at all, with their largest magnitude."""
    filled = {name: values for name, values in tensors.items() if values.numel()}
    if not filled or _within(torch.nn.utils.get_total_norm(list(filled.values()), math.inf), limit):
        return {}
    largest = {name: torch.linalg.vector_norm(values, math.inf) for name, values in filled.items()}
    return {name: float(value) for name, value in largest.items() if not _within(value, limit)}


def _within(magnitude: Tensor, limit: float) -> bool:
    return float(magnitude) <= limit  # false for NaN, too


def _held_here(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments held by this rank; no buffers of the model, which may hold any number on purpose."""
    parameters = {f"model.{name}" for name, _ in run.state.model.named_parameters()}
    weights, moments = {}, {}
    for name, values in run_tensors(run).items():
        local = values.to_local() if isinstance(values, DTensor) else values
        if name in parameters or (name.startswith("table.") and name.endswith(".weight")):
            weights[name] = local.detach()
        elif name.startswith(("table.", "optimizer.")):
            moments[name] = local.detach()
    return weights, moments


def _learning_rate(found: Mapping[str, float]) -> str:
    """Which of the two, or both."""
    kinds = {"embedding.lr" if name.startswith("table.") else "optim.lr" for name in found}
    return " and ".join(sorted(kinds, reverse=True))
