"""How two runs differ, and how sure that is: more than the steps differ by themselves, than repeats, than the machine.

A difference that noise could have made is called neither gain nor loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp

from freescale import units
from freescale.pages.comparison.certainty import (
    LEAST_STEPS,
    LEVEL,
    Estimate,
    cut_into_blocks,
    jackknife,
    log_ratio,
)
from freescale.pages.comparison.compared_runs import ComparedRun, differing_keys, is_same_place
from freescale.trace import CAUSES, Account

SMALLEST = 0.002
"""A part of the time below this share of a step is not worth a percentage: any two starts differ by as much."""

OTHER_MACHINE = 0.1
"""The same work may take so much longer or shorter before the machine, not the recipe, is what was compared."""

MOVES_WORK = frozenset({"balance", "run", "trace"})
"""Sections of a recipe that move work between ranks and change none of it: compute takes as long whatever they say.

Not `comm` and `pipeline`: transfers beside compute may slow it.
"""

_COLUMNS = ("step", "compute", "bubble", *CAUSES)


@dataclass(frozen=True)
class Difference:
    """What one measure of a run is against the baseline.

    Args:
        before: of the baseline.
        after: of the run.
        change: (after - before) / before with its interval; None where there is none.
        unsure: why it is not called a difference; empty if it is one.
    """

    before: float
    after: float
    change: Estimate | None = None
    unsure: str = ""

    @property
    def is_sure(self) -> bool:
        """Whether this is more than noise."""
        return self.change is not None and not self.unsure

    def verdict(self, *, less: str = "less", more: str = "more") -> str:
        """`70.0% less`, or why that cannot be said."""
        if self.change is None or self.unsure:
            return self.unsure
        return _changed(self.change.value, less=less, more=more)

    def interval(self, *, less: str = "less", more: str = "more") -> str:
        """`69.1% to 70.9% less`, `12.0% less to 45.0% more`; empty where there is none."""
        if self.change is None:
            return ""
        ends = (self.change.low, self.change.high)
        if ends[0] >= 0 or ends[1] <= 0:
            near, far = sorted(ends, key=abs)
            return f"{units.percent(abs(near))} to {_changed(far, less=less, more=more)}"
        return " to ".join(_changed(end, less=less, more=more) for end in ends)


def differences(runs: Sequence[ComparedRun], place: int) -> dict[str, Difference]:
    """Of one run against the first: `step` and `compute`, times of a step; `bubble` and its causes, shares of it."""
    base, run = runs[0], runs[place]
    if base.account is None or run.account is None:
        return {}
    sums = _block_sums(base, run)
    # The difference of two repeats is not held against itself.
    gaps = {} if _is_repeat(base, run) else repeat_gaps(runs)
    found = {
        name: _difference(name, before, after, sums=sums, gap=gaps.get(name))
        for name, before, after in _measures(base.account, run.account)
    }
    step, reason = found["step"], ""
    if _machine_changed(base, run, found["compute"]):
        reason = "compute differs: see the notes"
    elif _only_moves_work(base, run) and not found["bubble"].is_sure:
        # Where compute is the same work, only the bubble can make steps shorter.
        reason = "not explained by the bubble"
    if step.is_sure and reason:
        found["step"] = Difference(step.before, step.after, step.change, reason)
    return found


def machine_doubts(runs: Sequence[ComparedRun]) -> list[str]:
    """Runs in which the same work took another time, though nothing in the recipes says why."""
    said = []
    for place in range(1, len(runs)):
        compute = differences(runs, place).get("compute")
        if compute is None or compute.change is None or not _machine_changed(runs[0], runs[place], compute):
            continue
        change = _changed(compute.change.value, less="less", more="more")
        said.append(
            f"The same work took {change} compute time in {runs[place].name} than in {runs[0].name}, which "
            "nothing in the recipes explains: the machine was busier in one of them, or the code changed. Times of a "
            "step are not held against each other; shares of it are."
        )
    return said


def repeat_gaps(runs: Sequence[ComparedRun]) -> dict[str, float]:
    """By how much runs of one recipe differ, the largest relative change of each measure; empty without repeats."""
    gaps: dict[str, float] = {}
    for one, other in combinations(runs, 2):
        if one.account is None or other.account is None or not _is_repeat(one, other):
            continue
        for name, a, b in _measures(one.account, other.account):
            if min(a, b) > 0:
                gaps[name] = max(gaps.get(name, 0.0), max(a, b) / min(a, b) - 1)
    return gaps


def how_sure(runs: Sequence[ComparedRun]) -> str:
    """What the intervals rest on, and what they cannot know."""
    known = [run.account.num_steps for run in runs if run.account is not None]
    if not known or min(known) < LEAST_STEPS:
        return f"Fewer than {LEAST_STEPS} common steps: too few to tell a difference from noise."
    blocks = len(cut_into_blocks(min(known)))
    said = (
        f"{LEVEL} intervals, from the spread over {min(known):,} steps in {blocks} blocks. They do not know what "
        "another start of the same run would change"
    )
    gap = repeat_gaps(runs).get("bubble")
    if gap is None:
        return f"{said}: repeat a run and compare all of them to see that."
    return (
        f"{said}. Here runs of one recipe differ by up to {units.percent(gap)} of their bubble: unless code or machine "
        "changed between them that is noise, and no smaller difference is called one."
    )


def share(account: Account, part: str) -> float:
    """A part's share of the time; `bubble` is all but compute."""
    return account.bubble if part == "bubble" else account.shares[part]


def _measures(before: Account, after: Account) -> list[tuple[str, float, float]]:
    """(name, before, after): milliseconds of the step and of its compute, shares of the rest."""
    times = [
        ("step", before.step_ms, after.step_ms),
        ("compute", before.shares["compute"] * before.step_ms, after.shares["compute"] * after.step_ms),
    ]
    return times + [(part, share(before, part), share(after, part)) for part in ("bubble", *CAUSES)]


def _difference(
    name: str, before: float, after: float, *, sums: Sequence[Sequence[float]], gap: float | None
) -> Difference:
    is_time = name in ("step", "compute")
    if not is_time and max(before, after) < SMALLEST:
        return Difference(before, after, unsure="too small to matter")
    if not sums:
        return Difference(before, after, unsure="too few steps to tell")
    column, width = _COLUMNS.index(name), len(_COLUMNS)

    def of_blocks(added: Sequence[float]) -> float:
        """log(after / before), of times as they are and of shares over the time."""
        over = (1.0, 1.0) if is_time else (added[0], added[width])
        return log_ratio(added[width + column] * over[0], added[column] * over[1])

    try:
        change = jackknife(sums, of_blocks).through(lambda log: exp(min(log, 50.0)) - 1)
    except ValueError:
        return Difference(before, after, unsure="nothing to hold it against")
    if not change.is_sure:
        return Difference(before, after, change, "no difference beyond noise")
    if gap is not None and max(after / before, before / after) - 1 <= gap:
        return Difference(before, after, change, "no more than repeats differ")
    return Difference(before, after, change)


def _block_sums(base: ComparedRun, run: ComparedRun) -> list[list[float]]:
    """Of each block of common steps: the milliseconds of `_COLUMNS`, of the one run and of the other."""
    # The first step compiles kernels and opens connections; accounts leave it out, too.
    common = sorted(set(base.times) & set(run.times))[1:]
    blocks = []
    for rows in cut_into_blocks(len(common)):
        sums = []
        for times in (base.times, run.times):
            steps = [times[common[row]] for row in rows]
            sums.append(sum(ms for ms, _ in steps))
            sums += [sum(parts[name] for _, parts in steps) for name in _COLUMNS[1:]]
        blocks.append(sums)
    return blocks


def _is_repeat(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether two runs were to do the same in the same place."""
    return bool(one.recipe) and not differing_keys(one, other) and is_same_place(one, other)


def _only_moves_work(base: ComparedRun, run: ComparedRun) -> bool:
    """Whether recipes, versions and machines let both runs compute the same work in the same time."""
    keys = differing_keys(base, run)
    return is_same_place(base, run) and all(key.partition(".")[0] in MOVES_WORK for key in keys)


def _machine_changed(base: ComparedRun, run: ComparedRun, compute: Difference) -> bool:
    """Whether compute took another time though nothing says why."""
    if compute.change is None or not _only_moves_work(base, run):
        return False
    return compute.change.is_sure and abs(compute.change.value) > OTHER_MACHINE


def _changed(change: float, *, less: str, more: str) -> str:
    return f"{units.percent(abs(change))} {less if change < 0 else more}"
