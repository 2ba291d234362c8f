"""Reading metrics.jsonl back: whole events, in order, with a note of everything that is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from freescale.units import number

Event = dict[str, object]

POPULARITY = "popularity_"
"""Prefix of a baseline's value inside an eval event: `popularity_hr@10` stands beside `hr@10`."""

REPEAT = "repeat_last_"
"""The same of recommending a user's own items again, the last one first."""

BASELINES = {POPULARITY: "popularity", REPEAT: "repeat last"}
"""What such a value is of, for people."""

NOT_A_METRIC = frozenset(
    {"event", "step", "time", "epoch", "seconds", "num_users", "num_items", "num_samples", "repeat_share"}
    | {"trained_steps", "window", "targets", "unknown"}
)
"""Fields that say when or over what something was measured; they are not curves of their own."""


IDS_OF = "ids_"
"""How events of the id maps of tables besides that of items begin."""


@dataclass(frozen=True)
class MetricsLog:
    """One run's events by kind; `problems` says in plain words what could not be read.

    `evals` are those along the way, on validation targets; `test` is the last one on test targets. `ranks` is the last
    summary of where each rank's time went. `resumes` are the starts after the first; `pipeline` what was decided about
    how rows travel. `ids` are pictures of the id map of items, `ids_of` those of other tables by name. `windows`
    are those of a log that were learnt.
    """

    start: Event = field(default_factory=dict)
    steps: list[Event] = field(default_factory=list)
    evals: list[Event] = field(default_factory=list)
    ids: list[Event] = field(default_factory=list)
    ids_of: dict[str, list[Event]] = field(default_factory=dict)
    experts: list[Event] = field(default_factory=list)
    test: Event | None = None
    end: Event | None = None
    ranks: Event | None = None
    resumes: list[Event] = field(default_factory=list)
    pipeline: list[Event] = field(default_factory=list)
    windows: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The furthest step any event speaks of."""
        return max((step_of(event) or 0 for event in (*self.steps, *self.evals, self.end or {})), default=0)

    def facts(self) -> dict[str, dict[str, object]]:
        """The start tables: section -> name -> value; loose start fields become a section `run`."""
        sections: dict[str, dict[str, object]] = {}
        known = ("event", "time", "facts", "total_steps", "origin")
        loose = {key: value for key, value in self.start.items() if key not in known}
        facts = self.start.get("facts")
        for name, rows in facts.items() if isinstance(facts, Mapping) else ():
            if isinstance(rows, Mapping):
                sections[str(name)] = {str(key): value for key, value in rows.items()}
            else:
                loose[str(name)] = rows
        return sections | ({"run": loose} if loose else {})

    def best(self, metric: str) -> tuple[float, int] | None:
        """The best value of a metric and the step at which the run first had it."""
        found: tuple[float, int] | None = None
        for event in self.evals:
            value, step = number(event.get(metric)), step_of(event) or 0
            if value is None:
                continue
            if found is None or is_better(metric, value, found[0]) or (value == found[0] and step < found[1]):
                found = (value, step)
        return found

    def popularity(self, metric: str) -> float | None:
        """What recommending the most popular items reaches on this metric, if the run measured it."""
        return self.baseline(metric, POPULARITY)

    def baseline(self, metric: str, prefix: str) -> float | None:
        """What recommending without a model (see `BASELINES`) reaches on this metric, if the run measured it."""
        values = (number(event.get(prefix + metric)) for event in reversed(self.evals))
        return next((value for value in values if value is not None), None)

    def eval_metrics(self) -> list[str]:
        """Names of the evaluated metrics, in the order the run reported them."""
        return [name for name in numeric_fields(self.evals) if not name.startswith(tuple(BASELINES))]


SMALLER_IS_BETTER = frozenset({"ne", "logloss", "mse", "mae"})
"""Metrics of tasks (METRIC/TASK) that are errors; of all others more is better."""


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Whether a value of a metric beats the best so far; what is not a number beats nothing."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best if metric.partition("/")[0] in SMALLER_IS_BETTER else value > best


def read_metrics(path: Path, *, growing: bool = False) -> MetricsLog:
    """Read what is there of a metrics.jsonl; a missing file, cut lines and gaps become `problems`.

    Args:
        path: the file.
        growing: whether a run may be writing it: that it has no end yet, or half a last line, is then no problem.
    """
    if not path.is_file():
        return MetricsLog(problems=[f"{path.name} is missing: no curves and no headline numbers."])
    problems: list[str] = []
    kinds: dict[str, list[Event]] = {"start": [], "step": [], "eval": [], "ranks": [], "end": []}
    with path.open("rb") as lines:
        for event in _whole_events(lines, problems, growing=growing):
            kinds.setdefault(str(event.get("event")), []).append(event)
    tests = [event for event in kinds["eval"] if event.get("split") == "test"]
    along = [event for event in kinds["eval"] if event.get("split") != "test"]
    steps, evals = _latest_per_step(kinds["step"]), _latest_per_step(along)
    log = MetricsLog(
        start=kinds["start"][-1] if kinds["start"] else {},
        steps=steps,
        evals=evals,
        ids=_latest_per_step(kinds.get("ids", [])),
        ids_of={
            kind.removeprefix(IDS_OF): _latest_per_step(found)
            for kind, found in kinds.items()
            if kind.startswith(IDS_OF)
        },
        experts=_latest_per_step(kinds.get("experts", [])),
        test=tests[-1] if tests else None,
        end=kinds["end"][-1] if kinds["end"] else None,
        ranks=kinds["ranks"][-1] if kinds["ranks"] else None,
        resumes=kinds.get("resume", []),
        pipeline=_latest_per_step(kinds.get("pipeline", [])),
        windows=_latest_per_step(kinds.get("window", [])),
        problems=problems,
    )
    problems.extend(_gaps(log, growing=growing))
    return log


def decode(line: bytes) -> Event | None:
    """One line as an event, or None if it is cut, garbled or not an object with an event kind."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def step_of(event: Mapping[str, object]) -> int | None:
    """The step an event belongs to, or None for events of the whole run."""
    step = number(event.get("step"))
    return None if step is None else int(step)


def column(events: Sequence[Event], name: str) -> list[float | None]:
    """One field of every event, None where it is missing, null or not a number."""
    return [number(event.get(name)) for event in events]


def numeric_fields(events: Iterable[Event]) -> list[str]:
    """Every field that holds a number in some event, in order of first appearance."""
    names: dict[str, None] = {}
    for event in events:
        new = (key for key in event if key not in names and number(event[key]) is not None)
        names.update(dict.fromkeys(new))
    return [name for name in names if name not in NOT_A_METRIC]


def _whole_events(lines: Iterable[bytes], problems: list[str], *, growing: bool) -> Iterable[Event]:
    unreadable: list[int] = []
    cut = False
    for row, line in enumerate(lines, start=1):
        event = decode(line)
        if event is not None:
            yield event
        elif line.strip():
            unreadable.append(row)
            cut = not line.endswith(b"\n")
    if cut:
        last = unreadable.pop()
        if not growing:
            problems.append(f"Line {last}, the last one, is cut: the run was stopped while writing it.")
    if unreadable:
        shown = ", ".join(map(str, unreadable[:5])) + (" ..." if len(unreadable) > 5 else "")
        noun = "lines" if len(unreadable) > 1 else "line"
        problems.append(
            f"{len(unreadable)} {noun} of metrics.jsonl could not be read and are left out: {shown}."
        )


def _latest_per_step(events: list[Event]) -> list[Event]:
    """One event per step, ordered; where a run repeated a step, the later line is the one it kept."""
    by_step = {step: event for event in events if (step := step_of(event)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def _gaps(log: MetricsLog, *, growing: bool) -> list[str]:
    gaps = []
    if not log.start:
        gaps.append("There is no start event: data, model and plan facts are missing.")
    if not log.steps:
        gaps.append("There are no training steps yet.")
    if not log.evals:
        when = "The run was never evaluated" if log.end is not None else "There was no evaluation yet"
        gaps.append(f"{when}: ranking metrics are missing.")
    if log.end is None and not growing:
        gaps.append(
            f"The run has no end event: it is still going or was stopped after step {log.last_step:,}."
        )
    lost = [event for event in log.steps if number(event.get("loss")) is None]
    if lost:
        where = f"first at step {step_of(lost[0]):,}"
        gaps.append(
            f"The loss is missing or not finite in {len(lost):,} of {len(log.steps):,} steps, {where}."
        )
    return gaps
