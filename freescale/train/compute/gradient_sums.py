"""GradientSums: how dense gradients are added up over the ranks of a run, and when weights are updated with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from freescale.comm import Transport
from freescale.comm.traffic import Gate
from freescale.comm.world import Ranks
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import FlatSum, Sums, reduced_in_backward
from freescale.train.compute.late_update import LateUpdate
from freescale.train.compute.owned_parameters import OwnedParameters
from freescale.train.compute.split_backward import SplitBackward, sum_of_all


class GradientSums(NamedTuple):
    """What was chosen for a run.

    Args:
        model: which steps call; wrapped where sums begin under its backward.
        sums: waits for them.
        flat: adds up what lies in one piece, as steps of padded batches leave it.
        split: computes gradients of weights after those of rows have left.
        late: updates weights when the next forward reaches them.
        by: what carries parts of sums; None: the group adds up, or there is one rank.
    """

    model: nn.Module
    sums: Sums | FlatSum | SplitBackward
    flat: FlatSum | None = None
    split: SplitBackward | None = None
    late: LateUpdate | None = None
    by: Transport | None = None


def choose_sums(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Ranks,
    owned: OwnedParameters,
    padded: bool,
    postpone_bytes: int | None,
    clipped: bool,
    transport: str,
    sums: str,
    gate: Gate | None,
    timer: StepTimer,
) -> GradientSums:
    """For a run whose batches are padded or not, with weight gradients that are postponed or not."""
    # A bound on the norm of all gradients must know all of them before the first weight is updated.
    may_be_late = ranks.group is not None and postpone_bytes is not None and not clipped
    outside = padded or postpone_bytes is not None
    total = sum_of_all(ranks, kind=transport, sums=sums, gate=gate) if outside else None
    by = None if total is None else total.by
    if padded and total is not None:
        late = LateUpdate(model, optimizer, timer=timer) if may_be_late and total.only_starts else None
        return GradientSums(model, total, flat=total, late=late, by=by)
    if postpone_bytes is not None:
        late = LateUpdate(model, optimizer, timer=timer) if may_be_late else None
        split = SplitBackward(
            [param for name, param in model.named_parameters() if name not in owned.names],
            most_bytes=postpone_bytes,
            total=total,
            timer=timer,
            late=late,
        )
        return GradientSums(model, split, split=split, late=late, by=by)
    if ranks.group is not None:
        wrapped, under_way = reduced_in_backward(
            model,
            ranks.group,
            timeout_s=ranks.timeout_s,
            kind=transport,
            sums=sums,
            gate=gate,
            handed_over=timer.handed_over,
            owned=owned.names,
        )
        return GradientSums(wrapped, under_way, by=under_way.by)
    return GradientSums(model, Sums())
