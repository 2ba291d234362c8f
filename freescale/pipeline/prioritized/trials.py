"""What runs measure of themselves: when a few steps go another way, how long all ranks took, and what was decided.

    chosen way ... chosen way │ PROBE steps each of one or several ways, measured │ chosen way ... (agree) ...

Trials come at 1, 2, 4, 8, ... times `every`, and from 64 times on at every 64: a decision of an hour in which the
machine was busy must not last for days. Which way a step goes is a function of the step and of what the ranks agreed on
earlier; they agree on the mean of their median step times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from freescale.comm.world import Ranks
from freescale.errors import CheckpointError
from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD
from freescale.trace import exchange

PROBE = 10
# The first steps after a change are neither one way nor the other.
UNSETTLED = LOOK_AHEAD + 1
_LONGEST_GAP = 64
_KEPT = 4 * PROBE

T = TypeVar("T")


class Trials:
    """When ways are tried, and how long their steps took.

    Args:
        ranks: who agrees.
        every: steps before the first trial; None: no trials.
        least: the least that `every` is taken for: what is measured before a trial, and the trial, must have room.
        num_probes: ways that a trial measures, PROBE steps each.
        late: steps by which trials begin later, to miss those of something else.
        subject: what is agreed on, for traces.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        every: int | None,
        least: int,
        subject: str,
        num_probes: int = 1,
        late: int = 0,
    ) -> None:
        self._ranks, self._subject = ranks, subject
        self._every = None if every is None else max(every, least)
        self._num_steps, self._late = num_probes * PROBE, late
        self._ms: dict[int, float] = {}

    def probe_of(self, step: int) -> int | None:
        """Which probe of a trial a step (counted from 0) belongs to; None outside of trials."""
        start = self._last_start(step)
        if start is None or step >= start + self._num_steps:
            return None
        return (step - start) // PROBE

    def ended_with(self, step: int) -> int | None:
        """First step of a trial whose last one this is, where there are ranks to agree with."""
        start = self._last_start(step)
        if start is None or step != start + self._num_steps - 1 or self._ranks.control is None:
            return None
        return start

    def observe(self, step: int, ms: float) -> None:
        """How long a step took on this rank."""
        self._ms[step] = ms
        self._ms.pop(step - _KEPT, None)

    def pooled(self, parts: Sequence[range]) -> list[float]:
        """Of each part the mean over the ranks of their median step time, the same bits everywhere; 0: not known."""
        mine = [[self._ms[step] for step in part[UNSETTLED:] if step in self._ms] for part in parts]
        known = torch.tensor(
            [*(median(each) if each else 0.0 for each in mine), *(float(bool(each)) for each in mine)],
            dtype=torch.float64,
        )
        with exchange(f"agree on {self._subject}"):
            dist.all_reduce(known, group=self._ranks.control)
            dist.broadcast(known, src=0, group=self._ranks.control)
        total, count = known.view(2, -1).tolist()
        num = self._ranks.num_ranks
        return [ms / num if int(there) == num else 0.0 for ms, there in zip(total, count)]

    def _last_start(self, step: int) -> int | None:
        """First step of the last trial that began at or before a step."""
        if self._every is None or step < self._every + self._late:
            return None
        turn = (step - self._late) // self._every
        # The gap between trials doubles until it is the longest one.
        gap = min(1 << (turn.bit_length() - 1), _LONGEST_GAP)
        return turn // gap * gap * self._every + self._late


class Choices(Generic[T]):
    """What holds from which step on.

    Args:
        first: from the first step on.
    """

    def __init__(self, first: T) -> None:
        self._made: list[tuple[int, T]] = [(0, first)]

    def at(self, step: int) -> T:
        """What holds at a step."""
        return next(what for first, what in reversed(self._made) if first <= step)

    def add(self, from_step: int, what: T) -> None:
        """Decide what holds from a step on."""
        self._made.append((from_step, what))

    def state(self) -> list[tuple[int, T]]:
        """All of them, in order."""
        return list(self._made)

    def load(self, decisions: Sequence[Sequence[Any]], *, read: Callable[[Any], T], subject: str) -> None:
        """Take those of a checkpoint over; without any, what is decided here stays."""
        try:
            loaded = [(int(step), read(what)) for step, what in decisions]
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's {subject} cannot be read", got=str(error)) from None
        self._made = loaded or self._made
