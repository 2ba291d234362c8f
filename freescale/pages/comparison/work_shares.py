"""How evenly ranks shared the work of their steps, by CPU time: what other programs on the machine do not disturb.

On a busy machine ranks wait for each other because the system gives their cores to somebody else, however even their
work is. The CPU time of a step is what each of them had to do in it. Only CPU ranks have one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freescale import units
from freescale.pages.comparison.certainty import Estimate, cut_into_blocks, jackknife
from freescale.trace import RunSpans, common_steps

StepWork = Mapping[int, tuple[float, float]]
"""Step -> seconds of CPU time of its busiest rank, and of the mean rank."""


def work_of_steps(spans: RunSpans) -> dict[int, tuple[float, float]]:
    """Of the steps that every rank has kept; empty for one rank, and where a device computes."""
    work = {}
    for step in common_steps(spans.ranks) if len(spans.ranks) > 1 else ():
        seconds = [one.steps[step].cpu for one in spans.ranks]
        known = [value for value in seconds if value is not None]
        if len(known) == len(seconds) and sum(known) > 0:
            work[step] = (max(known), math.fsum(known) / len(known))
    return work


@dataclass(frozen=True)
class WorkShares:
    """What the busiest rank had to do over the mean, of two runs; 1 is even.

    Args:
        before: of the baseline.
        after: of the run.
        change: of what is above 1, relative to the baseline's, with its interval; None where there are too few steps.
    """

    before: float
    after: float
    change: Estimate | None

    def verdict(self) -> str:
        """`more even: 88 % to 93 % less above 1`, or why that cannot be said."""
        if self.change is None:
            return "too few steps to tell"
        if not self.change.is_sure:
            return "no difference beyond noise"
        # Nobody has less than even shares: an interval that reaches further ends there.
        ends = sorted(abs(max(end, -1.0)) for end in (self.change.low, self.change.high))
        word, amount = ("more even", "less") if self.change.value < 0 else ("less even", "more")
        return f"{word}, {units.percent(ends[0])} to {units.percent(ends[1])} {amount} above 1"


def compare_work(before: StepWork, after: StepWork) -> WorkShares | None:
    """Two runs over the steps both have; None where one of them knows no CPU time."""
    common = sorted(set(before) & set(after))[1:]  # the first step compiles kernels
    if not common:
        return None
    rows = [(*before[step], *after[step]) for step in common]
    blocks = [_added([rows[row] for row in block]) for block in cut_into_blocks(len(rows))]
    busiest, mean, busiest_after, mean_after = _added(rows)
    try:
        change = jackknife(blocks, _change) if blocks else None
    except ValueError:
        change = None
    return WorkShares(busiest / mean, busiest_after / mean_after, change)


def _added(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows)]


def _change(sums: Sequence[float]) -> float:
    busiest, mean, busiest_after, mean_after = sums
    excess = busiest / mean - 1
    if excess <= 0:
        raise ValueError("nothing was uneven")
    return (busiest_after / mean_after - 1) / excess - 1
