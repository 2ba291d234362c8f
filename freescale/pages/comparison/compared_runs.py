"""The runs of a comparison: cut to their common steps, and what keeps them from being comparable.

The first run is the baseline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from freescale import units
from freescale.errors import DataError
from freescale.pages.comparison.protocols import protocol_doubts
from freescale.pages.comparison.work_shares import StepWork, work_of_steps
from freescale.pages.report import require_run
from freescale.trace import (
    CAUSES,
    Account,
    Event,
    MetricsLog,
    account_of,
    busy_is_known,
    column,
    read_metrics,
    read_spans,
    step_of,
)

MOST_RUNS = 8
"""More curves than this cannot be told apart."""

StepTimes = Mapping[int, tuple[float, Mapping[str, float]]]
"""Step -> its milliseconds, and of them those of compute, of each cause and of the whole bubble."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs; `account` is over the steps that all of them have."""

    name: str
    log: MetricsLog
    recipe: Mapping[str, object]
    account: Account | None
    times: StepTimes
    work: StepWork = field(default_factory=dict)


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[ComparedRun]:
    """The runs, the baseline first, cut to the steps they have in common.

    Raises:
        FreeScaleError: one of the folders holds no run.
        DataError: too many runs to be told apart, or one of them twice.
    """
    if len(folders) > MOST_RUNS:
        raise DataError(
            "these are too many runs to be told apart",
            got=f"{len(folders)} runs",
            allowed=f"at most {MOST_RUNS}",
            next_step="compare fewer at a time",
        )
    paths = [Path(folder) for folder in folders]
    places = [path.resolve() for path in paths]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise DataError(
                "a run is compared with itself: that would pass for a repeat without noise",
                got=paths[number],
                next_step="name every run once; a repeat is a run of its own",
            )
    return on_common_steps([_read(path, name) for path, name in zip(paths, distinct_names(paths))])


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as much of the path before it as tells it from the others."""
    whole = [folder.resolve() for folder in folders]
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(set(whole)):
            break
    return names


def on_common_steps(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """A longer run must not be judged by steps the others never took."""
    common = set.intersection(*({step_of(event) for event in run.log.steps} for run in runs))
    return [
        replace(run, account=account_of([event for event in run.log.steps if step_of(event) in common]))
        for run in runs
    ]


def doubts(runs: Sequence[ComparedRun]) -> list[str]:
    """What keeps the runs from being comparable, in plain words."""
    said = [
        f"{run.name} has no breakdown of its time in metrics.jsonl." for run in runs if run.account is None
    ]
    base, others = runs[0], runs[1:]
    said += _unlike_busy_times(runs)
    for run in others:
        said += protocol_doubts((base.name, base.log), (run.name, run.log))
    steps = [{step_of(event) for event in run.log.steps} for run in runs]
    if not set.intersection(*steps):
        return [*said, "The runs have no step in common."]
    ends = [run.log.last_step for run in runs]
    if len(set(ends)) > 1:
        told = ", ".join(f"{run.name} {end:,}" for run, end in zip(runs, ends))
        said.append(
            f"The runs end at different steps: {told}. Only steps that all of them have are compared."
        )
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


def _unlike_busy_times(runs: Sequence[ComparedRun]) -> list[str]:
    """Runs on GPUs whose gaps between kernels are compute, beside others where they are host time."""
    told = {run.name: busy_is_known(run.log) for run in runs}
    apart = [name for name, known in told.items() if not known]
    if not apart or len(apart) == len(told):
        return []
    return [
        f"{', '.join(apart)} {'counts' if len(apart) == 1 else 'count'} gaps between kernels as compute (an older "
        "version, a CPU, or busy time unknown), the others as host time: only step times can be compared."
    ]


def num_ranks(run: ComparedRun) -> int | None:
    """Ranks of a run, where its log says."""
    values = (run.log.ranks or {}).get("total")
    return len(values) if isinstance(values, list) else None


def differing_keys(one: ComparedRun, other: ComparedRun) -> list[str]:
    """Keys of the recipes that have other values; where a run is kept does not count."""
    keys = sorted({*one.recipe, *other.recipe} - {"run.out"})
    return [key for key in keys if one.recipe.get(key) != other.recipe.get(key)]


def is_same_place(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether nothing says that two runs had other machines, versions or numbers of ranks."""
    facts = [
        [num_ranks(run), *(_origin(run, name) for name in ("host", "freescale", "torch"))]
        for run in (one, other)
    ]
    return all(a is None or b is None or a == b for a, b in zip(*facts))


def _read(folder: Path, name: str) -> ComparedRun:
    require_run(folder)
    log = read_metrics(folder / "metrics.jsonl")
    work = work_of_steps(read_spans(folder))
    return ComparedRun(name, log, _recipe(folder), account_of(log.steps), _step_times(log), work)


def _step_times(log: MetricsLog) -> StepTimes:
    columns = [column(log.steps, name) for name in ("step_ms", *CAUSES)]
    times: dict[int, tuple[float, Mapping[str, float]]] = {}
    for event, ms, *shares in zip(log.steps, *columns):
        known = [value for value in shares if value is not None]
        if ms is not None and len(known) == len(CAUSES) and not event.get("watched"):
            parts = {cause: ms * value for cause, value in zip(CAUSES, known)}
            bubble = sum(parts.values())
            times[step_of(event) or 0] = (ms, {"compute": ms - bubble, "bubble": bubble, **parts})
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
