"""What the ranks tell each other in an account: each exchange is begun at once, and what it returns waits for its end.

what is asked of all      begin_ask         the largest of each number, or what every rank has
where time went           begin_to_tell     every rank's parts of each step, to rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm.world import Ranks, gather, wait_for
from freescale.train.accounts.closed_parts import ClosedParts
from freescale.train.accounts.notes import Ask

_WHAT = "compare notes"


def begin_ask(ask: Ask, ranks: Ranks) -> Callable[[], Any]:
    """Begin to ask; the result waits for the answers."""
    if ask.kind == "everybody":  # rare: a rank has stood still, or they have not seen the same exchanges
        everybody = gather(ask.mine, group=ranks.control, what=_WHAT)
        return lambda: everybody
    table = torch.tensor(ask.mine, dtype=torch.float64)
    work = dist.all_reduce(table, op=dist.ReduceOp.MAX, group=ranks.control, async_op=True)

    def largest() -> list[float]:
        wait_for(work, what=_WHAT)
        found: list[float] = table.tolist()
        return found

    return largest


def begin_to_tell(mine: Sequence[ClosedParts], ranks: Ranks) -> Callable[[], list[list[ClosedParts]]]:
    """Begin to tell rank 0; the result waits for it: [steps][ranks] there, this rank's alone elsewhere."""
    if ranks.control is None or not mine:
        return lambda: [[closed] for closed in mine]
    numbers = torch.tensor([one.numbers() for one in mine], dtype=torch.float64)
    gathered: list[Tensor] | None = None
    if ranks.is_first:
        gathered = [torch.empty_like(numbers) for _ in range(ranks.num_ranks)]
    work = dist.gather(numbers, gathered, dst=0, group=ranks.control, async_op=True)

    def ended() -> list[list[ClosedParts]]:
        wait_for(work, what=_WHAT)
        if gathered is None:
            return [[closed] for closed in mine]
        by_step = torch.stack(gathered, dim=1).tolist()
        return [[ClosedParts.of_numbers(row) for row in rows] for rows in by_step]

    return ended
