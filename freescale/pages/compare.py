"""Runs side by side: what they are held against, what keeps them from being comparable, and how sure a difference is.

The first run is the baseline. A difference that the spread over steps could have made is called neither gain nor loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp
from pathlib import Path

import yaml

from freescale import units
from freescale.errors import DataError
from freescale.pages.certainty import (
    LEAST_STEPS,
    LEVEL,
    NUM_BLOCKS,
    Estimate,
    cut_into_blocks,
    jackknife,
    log_ratio,
)
from freescale.pages.report import require_run
from freescale.trace import CAUSES, Account, Event, MetricsLog, account_of, column, read_metrics, step_of

MOST_RUNS = 8
"""More curves than this cannot be told apart."""

SMALLEST = 0.002
"""A part of the time below this share of a step is not worth a percentage: any two starts differ by as much."""

StepTimes = Mapping[int, tuple[float, Mapping[str, float]]]
"""Step -> its milliseconds, and of them those of each cause and of the whole bubble."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs; `account` is over the steps that all of them have."""

    name: str
    log: MetricsLog
    recipe: Mapping[str, object]
    account: Account | None
    times: StepTimes


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
            return self.unsure or "no difference"
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


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[ComparedRun]:
    """The runs, the baseline first, cut to the steps they have in common.

    Raises:
        FreeScaleError: one of the folders holds no run.
        DataError: too many runs to be told apart.
    """
    if len(folders) > MOST_RUNS:
        raise DataError(
            "these are too many runs to be told apart",
            got=f"{len(folders)} runs",
            allowed=f"at most {MOST_RUNS}",
            next_step="compare fewer at a time",
        )
    paths = [Path(folder) for folder in folders]
    return on_common_steps([_read(path, name) for path, name in zip(paths, distinct_names(paths))])


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as much of the path before it as tells it from the others."""
    whole = [folder.resolve() for folder in folders]
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(set(whole)):
            break
    # A folder that is given twice is the same run twice.
    return [f"{name} (again)" if name in names[:place] else name for place, name in enumerate(names)]


def on_common_steps(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """A longer run must not be judged by steps the others never took."""
    common = set.intersection(*({step_of(event) for event in run.log.steps} for run in runs))
    return [
        replace(run, account=account_of([event for event in run.log.steps if step_of(event) in common]))
        for run in runs
    ]


def doubts(runs: Sequence[ComparedRun]) -> list[str]:
    """What keeps the runs from being comparable, in plain words."""
    said = [f"{run.name} has no breakdown of its time in metrics.jsonl." for run in runs if run.account is None]
    base, others = runs[0], runs[1:]
    steps = [{step_of(event) for event in run.log.steps} for run in runs]
    if not set.intersection(*steps):
        return [*said, "The runs have no step in common."]
    for run in others:
        tokens = [_tokens(one.log) for one in (base, run)]
        common = sorted(set(tokens[0]) & set(tokens[1]))
        other = [step for step in common if tokens[0][step] != tokens[1][step]]
        if other:
            said.append(
                f"{run.name} did not compute the same samples as {base.name}: {len(other):,} of {len(common):,} "
                f"common steps have another number of tokens, first step {other[0]:,}."
            )
    facts: dict[str, Callable[[ComparedRun], object]] = {
        "numbers of ranks": num_ranks,
        "machines": lambda run: _origin(run, "host"),
        "versions of FreeScale": lambda run: _origin(run, "freescale"),
        "versions of torch": lambda run: _origin(run, "torch"),
    }
    for name, fact in facts.items():
        values = [fact(run) for run in runs]
        if len({value for value in values if value is not None}) > 1:
            told = ", ".join(f"{run.name} {units.fact(value)}" for run, value in zip(runs, values))
            said.append(f"The runs have different {name}: {told}.")
    return said


def differences(runs: Sequence[ComparedRun], place: int) -> dict[str, Difference]:
    """Of one run against the first: the bubble, each cause of it, and `step`, the time of a step."""
    base, run = runs[0], runs[place]
    if base.account is None or run.account is None:
        return {}
    measures = {"step": (base.account.step_ms, run.account.step_ms)}
    measures |= {part: (share(base.account, part), share(run.account, part)) for part in ("bubble", *CAUSES)}
    sums = _block_sums(base, run)
    gaps = repeat_gaps(runs)
    same = place and _is_repeat(base, run)
    return {
        name: _difference(name, *values, sums=sums, gap=gaps.get(name), same=bool(same))
        for name, values in measures.items()
    }


def repeat_gaps(runs: Sequence[ComparedRun]) -> dict[str, float]:
    """By how much runs of one recipe differ, the largest relative change of each measure; empty without repeats."""
    gaps: dict[str, float] = {}
    for one, other in combinations(runs, 2):
        if one.account is None or other.account is None or not _is_repeat(one, other):
            continue
        pairs = {"step": (one.account.step_ms, other.account.step_ms)}
        pairs |= {part: (share(one.account, part), share(other.account, part)) for part in ("bubble", *CAUSES)}
        for name, (a, b) in pairs.items():
            if min(a, b) > 0:
                gaps[name] = max(gaps.get(name, 0.0), max(a, b) / min(a, b) - 1)
    return gaps


def how_sure(runs: Sequence[ComparedRun]) -> str:
    """What the intervals rest on, and what they cannot know."""
    known = [run.account.num_steps for run in runs if run.account is not None]
    if not known or min(known) < LEAST_STEPS:
        return f"Fewer than {LEAST_STEPS} common steps: too few to tell a difference from noise."
    said = (
        f"{LEVEL} intervals, from the spread over {min(known):,} steps in {NUM_BLOCKS} blocks. They do not know what "
        "another start of the same run would change"
    )
    gap = repeat_gaps(runs).get("bubble")
    if gap is None:
        return f"{said}: repeat a run and compare all of them to see that."
    return f"{said}; here runs of one recipe differ by up to {units.percent(gap)} of their bubble."


def comparison_lines(run_dir: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The outcome in a few lines for a terminal: what to doubt, then bubble and step of each run, and how sure."""
    runs = read_runs([*others, run_dir])
    lines = [f"warning: {doubt}" for doubt in doubts(runs)]
    told = False
    for place in range(1, len(runs)):
        found = differences(runs, place)
        if not found:
            continue
        told = True
        if len(runs) > 2:
            lines.append(f"{runs[place].name} against {runs[0].name}:")
        bubble, step = found["bubble"], found["step"]
        lines.append(
            f"bubble {units.percent(bubble.before)} -> {units.percent(bubble.after)}: {_outcome(bubble)}"
        )
        times = f"step {units.milliseconds(step.before)} -> {units.milliseconds(step.after)}"
        lines.append(f"{times}: {_outcome(step, less='shorter', more='longer')}")
    return [*lines, how_sure(runs)] if told else lines


def share(account: Account, part: str) -> float:
    """A part's share of the time; `bubble` is all but compute."""
    return account.bubble if part == "bubble" else account.shares[part]


def num_ranks(run: ComparedRun) -> int | None:
    """Ranks of a run, where its log says."""
    values = (run.log.ranks or {}).get("total")
    return len(values) if isinstance(values, list) else None


def _difference(
    name: str,
    before: float,
    after: float,
    *,
    sums: Sequence[Sequence[float]],
    gap: float | None,
    same: bool,
) -> Difference:
    if name != "step" and max(before, after) < SMALLEST:
        return Difference(before, after, unsure="too small to matter")
    if not sums:
        return Difference(before, after, unsure="too few steps to tell")
    column = _COLUMNS.index(name)
    width = len(_COLUMNS)

    def of_blocks(added: Sequence[float]) -> float:
        """log(after / before): shares of the time for its parts, plain times for the step."""
        over = (1.0, 1.0) if name == "step" else (added[0], added[width])
        if min(over) <= 0:
            raise ValueError("no time at all")
        return log_ratio(added[width + column] / over[1], added[column] / over[0])

    try:
        change = jackknife(sums, of_blocks).through(lambda log: exp(min(log, 50.0)) - 1)
    except ValueError:
        return Difference(before, after, unsure="nothing to hold it against")
    if same:
        return Difference(before, after, change, "one recipe: this is noise")
    if not change.is_sure:
        return Difference(before, after, change, "no difference beyond noise")
    if gap is not None and max(after / before, before / after) - 1 <= gap:
        return Difference(before, after, change, "no more than repeats differ")
    return Difference(before, after, change)


def _outcome(found: Difference, *, less: str = "less", more: str = "more") -> str:
    interval = found.interval(less=less, more=more)
    verdict = found.verdict(less=less, more=more)
    return f"{verdict} ({interval})" if interval else verdict


def _changed(change: float, *, less: str, more: str) -> str:
    return f"{units.percent(abs(change))} {less if change < 0 else more}"


_COLUMNS = ("step", "bubble", *CAUSES)


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


def _read(folder: Path, name: str) -> ComparedRun:
    require_run(folder)
    log = read_metrics(folder / "metrics.jsonl")
    return ComparedRun(name, log, _recipe(folder), account_of(log.steps), _step_times(log))


def _step_times(log: MetricsLog) -> StepTimes:
    columns = [column(log.steps, name) for name in ("step_ms", *CAUSES)]
    times: dict[int, tuple[float, Mapping[str, float]]] = {}
    for event, ms, *shares in zip(log.steps, *columns):
        known = [value for value in shares if value is not None]
        if ms is not None and len(known) == len(CAUSES):
            parts = {cause: ms * value for cause, value in zip(CAUSES, known)}
            times[step_of(event) or 0] = (ms, {"bubble": sum(parts.values()), **parts})
    return times


def _recipe(folder: Path) -> dict[str, object]:
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    sections = values.items() if isinstance(values, dict) else ()
    return {
        f"{section}.{key}": value
        for section, keys in sections
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


def _is_repeat(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether two runs were to do the same: one recipe, as many ranks."""
    recipes = [{key: value for key, value in run.recipe.items() if key != "run.out"} for run in (one, other)]
    return bool(recipes[0]) and recipes[0] == recipes[1] and num_ranks(one) == num_ranks(other)


def _origin(run: ComparedRun, name: str) -> object:
    origin = run.log.start.get("origin")
    return origin.get(name) if isinstance(origin, Mapping) else None


def _tokens(log: MetricsLog) -> dict[int, int]:
    """Tokens of every step, from what the log says of speed and time."""
    rows: zip[tuple[Event, float | None, float | None]] = zip(
        log.steps, column(log.steps, "tokens_per_s"), column(log.steps, "step_ms")
    )
    return {
        step_of(event) or 0: round(rate * ms / 1000)
        for event, rate, ms in rows
        if rate is not None and ms is not None
    }
