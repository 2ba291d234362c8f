"""What training targets are like: how many repeat an earlier item, how many a threshold or a task calls positive.

They are the same on every rank and in every run: they follow from the data and the split alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freescale.data.batches.examples import Examples
from freescale.data.requests.request_examples import RequestExamples
from freescale.data.requests.task_rule import TaskRule
from freescale.data.scan import spread_rows
from freescale.data.source import Histories, IntArray
from freescale.jagged import number_inside

_MAX_EVENTS = 1 << 20
"""Events looked at for a share; sorting them takes about 0.2 s."""
_REQUESTS = 10_000
"""Requests read together where labels are looked at."""


@dataclass(frozen=True, kw_only=True)
class RepeatShare:
    """How many training targets repeat an earlier item of their history.

    Args:
        repeated: those that do.
        targets: all that were looked at.
        whole: whether that was every one, or a part spread evenly over the data.
    """

    repeated: int
    targets: int
    whole: bool

    @property
    def share(self) -> float:
        """0 where there are no targets."""
        return self.repeated / max(1, self.targets)


def measure_repeats(examples: Examples, *, max_events: int = _MAX_EVENTS) -> RepeatShare:
    """Look at the training targets of a data set, at a part of a large one."""
    rows = spread_rows(examples.source, max_events=max_events)
    repeated, targets = 0, 0
    for block in _blocks(rows, examples.source.lengths, max_events=max_events):
        part = examples.part(block)
        is_target = _is_target(part, examples.max_length)
        repeated += int((~_is_first(part) & is_target).sum())
        targets += int(is_target.sum())
    return RepeatShare(repeated=repeated, targets=targets, whole=len(rows) == len(examples.source.lengths))


def label_shares(
    examples: Examples, thresholds: Sequence[float], *, max_events: int = _MAX_EVENTS
) -> tuple[list[float], npt.NDArray[np.generic]]:
    """The share of training targets with an action above each threshold, and the values that occur, ascending.

    A part of a large data set is looked at; all of it where some threshold has not met both labels in that part.
    """
    rows = spread_rows(examples.source, max_events=max_events)
    shares, values = _label_shares(examples, thresholds, rows)
    if len(rows) < len(examples.source.lengths) and not all(0 < share < 1 for share in shares):
        return _label_shares(examples, thresholds, np.arange(len(examples.source.lengths)))
    return shares, values


def _label_shares(
    examples: Examples, thresholds: Sequence[float], rows: IntArray
) -> tuple[list[float], npt.NDArray[np.generic]]:
    above, targets = np.zeros(len(thresholds), dtype=np.int64), 0
    values: npt.NDArray[np.generic] = np.zeros(0)
    for block in _blocks(rows, examples.source.lengths, max_events=_MAX_EVENTS):
        part = examples.part(block)
        actions = part.columns["action"][_is_target(part, examples.max_length)]
        above += (actions[:, None] > np.asarray(thresholds)).sum(0)
        targets += len(actions)
        values = np.union1d(values, actions)
    return [int(count) / max(1, targets) for count in above], values


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What the training candidates are to a task.

    Args:
        counted: candidates that have a label and meet the task's condition, of those looked at.
        true: those of them whose label is 1, of a binary task.
        lowest: smallest label; NaN where none counts.
        highest: largest label.
    """

    counted: int
    true: int
    lowest: float
    highest: float

    @property
    def learnable(self) -> bool:
        """Whether there are labels, and more than one."""
        return self.counted > 0 and self.lowest < self.highest


def task_facts(
    examples: RequestExamples, tasks: Sequence[TaskRule], *, max_events: int = _MAX_EVENTS
) -> list[TaskFacts]:
    """Look at the training candidates, at a part of many; at all of them where some task shows one label there."""
    number = len(examples.index.user)
    each = max(1, examples.index.num_candidates // max(1, number))
    some = np.unique(np.linspace(0, number - 1, min(number, max(1, max_events // each)), dtype=np.int64))
    found = _task_facts(examples, tasks, some)
    if len(some) < number and not all(fact.learnable for fact in found):
        found = _task_facts(examples, tasks, np.arange(number))
    return found


def _task_facts(examples: RequestExamples, tasks: Sequence[TaskRule], rows: IntArray) -> list[TaskFacts]:
    none = TaskFacts(counted=0, true=0, lowest=np.inf, highest=-np.inf)
    found = [none] * len(tasks)
    for block in np.array_split(rows, max(1, len(rows) // _REQUESTS)):
        given = {name: torch.from_numpy(x).double() for name, x in examples.candidate_values(block).items()}
        labels = {task.name: task.of(given[task.column]) for task in tasks}
        for n, task in enumerate(tasks):
            own = labels[task.name]
            counts = ~own.isnan() if task.where is None else ~own.isnan() & (labels[task.where] == 1)
            own, before = own[counts], found[n]
            if not len(own):
                continue
            found[n] = TaskFacts(
                counted=before.counted + len(own),
                true=before.true + int((own == 1).sum()),
                lowest=min(before.lowest, float(own.min())),
                highest=max(before.highest, float(own.max())),
            )
    return found


def _blocks(rows: IntArray, lengths: IntArray, *, max_events: int) -> Iterator[IntArray]:
    """Rows in parts of about so many events."""
    part = np.cumsum(lengths[rows]) // max_events
    return iter(np.split(rows, np.flatnonzero(np.diff(part)) + 1))


def _is_target(part: Histories, max_length: int) -> npt.NDArray[np.bool_]:
    """Which events training has as targets: all but the first, or those after the cut."""
    lengths = part.lengths
    return number_inside(lengths) >= np.repeat(np.maximum(lengths - max_length, 1), lengths)


def _is_first(part: Histories) -> npt.NDArray[np.bool_]:
    """Which events are the first of their item in their history."""
    user = np.repeat(np.arange(len(part.lengths)), part.lengths)
    order = np.lexsort((part.columns["item"], user))
    user, item = user[order], part.columns["item"][order]
    first = np.ones(len(order), dtype=bool)
    first[order[1:]] = (user[1:] != user[:-1]) | (item[1:] != item[:-1])
    return first
