"""Where the simulated time went, by the definitions of `trace.bubbles`, for all ranks and many steps at once.

`trace.bubbles.split_step` is the definition; this is the same for stages whose order is known. The stages of one lane
never overlap, so lengths of intersections may simply be added up; where two lanes run beside the training thread, what
both cover is taken off again. `spans_of` gives the stages of a rank as the spans a
real run records: split by `split_step`, they give the same parts (tests/sim/engine/test_engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.engine.stages import SIDE, URGENT, Exchange, Program, Wait, Work
from freescale.trace import MAIN, Arrival, Parts, Span

# A side lane's stages reach into at most this many steps after their own: what stands behind a lane's mark in one step
# is over before its mark in the next, and the training thread waits for that one in the step after it.
REACH = 2


@dataclass(eq=False)
class Record:
    """The moments of all stages of some steps.

    Args:
        starts: [stages, steps, ranks].
        ends: the same; a stage that takes no time (a mark) has both at 0.
        lasts: the same, last arrival at an exchange.
        step_ends: [steps, ranks] end of the optimizer step.
        step_start: [ranks] end of the one before the first.
    """

    starts: FloatArray
    ends: FloatArray
    lasts: FloatArray
    step_ends: FloatArray
    step_start: FloatArray

    @classmethod
    def empty(cls, program: Program, steps: int, ranks: int, *, step_start: FloatArray) -> Record:
        """Room for the moments of some steps."""
        shape = (len(program), steps, ranks)
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.empty((steps, ranks)), step_start)

    def tail(self, before: Record | None) -> Record:
        """The last `REACH` steps up to the end of this record, some of them of the record `before` it."""
        parts = [self] if before is None else [before, self]

        def last(name: str, axis: int) -> FloatArray:
            joined = np.concatenate([getattr(part, name) for part in parts], axis=axis)
            return joined[-REACH:] if axis == 0 else joined[:, -REACH:]

        starts, ends, lasts = (last(name, 1) for name in ("starts", "ends", "lasts"))
        return Record(starts, ends, lasts, last("step_ends", 0), self.step_start)


@dataclass(eq=False)
class StepAccounts:
    """[steps, ranks] seconds of every step: in all, computing, waiting for ranks, waiting for transfers."""

    total: FloatArray
    compute: FloatArray
    straggler: FloatArray
    comm: FloatArray

    @classmethod
    def empty(cls, steps: int, ranks: int) -> StepAccounts:
        """Room for a run."""
        return cls(*(np.zeros((steps, ranks)) for _ in range(4)))

    def fill(self, first: int, part: StepAccounts) -> None:
        """Put the accounts of some steps in their place."""
        rows = slice(first, first + len(part.total))
        for name in ("total", "compute", "straggler", "comm"):
            getattr(self, name)[rows] = getattr(part, name)

    def parts(self, *, warmup: int = 0, rank: int | None = None) -> Parts:
        """All steps after the first `warmup` as one, of a rank or of the mean rank."""
        columns = slice(None) if rank is None else slice(rank, rank + 1)
        sums = [
            float(getattr(self, name)[warmup:, columns].mean(axis=1).sum())
            for name in ("total", "compute", "straggler", "comm")
        ]
        return Parts(*sums)

    def shares(self, *, warmup: int = 0) -> dict[str, float]:
        """bubble, straggler, comm, host: the fields of a log line."""
        return self.parts(warmup=warmup).shares()


Interval = tuple[FloatArray, FloatArray]


def account(program: Program, record: Record, before: Record | None) -> StepAccounts:
    """The parts of the steps of a record; `before` holds the steps in front of it, `REACH` or fewer."""
    beside = _Beside.of(program, record, before)
    total = np.diff(record.step_ends, axis=0, prepend=record.step_start[None])
    result = StepAccounts(total, *(np.zeros_like(total) for _ in range(3)))
    for number, stage in enumerate(program):
        if getattr(stage, "lane", MAIN) != MAIN:
            continue
        start, end = record.starts[number], record.ends[number]
        if isinstance(stage, Work) and stage.kind == "compute":
            result.compute += end - start
        elif isinstance(stage, Work):
            result.compute += beside.work((start, end))
        elif isinstance(stage, Exchange):
            hidden = beside.work((start, end))
            missing_until = np.clip(record.lasts[number], start, end)
            missing = missing_until - start - beside.work((start, missing_until))
            result.compute += hidden
            result.straggler += missing
            result.comm += end - start - hidden - missing
        elif isinstance(stage, Wait):
            hidden, missing = beside.work((start, end)), beside.missing((start, end))
            result.compute += hidden
            result.straggler += missing
            result.comm += end - start - hidden - missing
    return result


@dataclass(eq=False)
class _Beside:
    """What the lanes beside the training thread do: disjoint intervals of each lane, of this step and of those before.

    Args:
        works: of each lane, when it computes.
        missings: of each lane, when it stands at an exchange that some rank has not reached.
        both_work: when both lanes compute.
        idle_missing: when a lane stands for another rank while the other one computes, or stands, too: counted twice
            by `missings`, or not to be counted.
    """

    works: list[Interval]
    missings: list[Interval]
    both_work: list[Interval]
    idle_missing: list[Interval]

    @classmethod
    def of(cls, program: Program, record: Record, before: Record | None) -> _Beside:
        """From the moments of some steps."""
        works: dict[str, list[Interval]] = {SIDE: [], URGENT: []}
        missings: dict[str, list[Interval]] = {SIDE: [], URGENT: []}
        for number, stage in enumerate(program):
            lane = getattr(stage, "lane", MAIN)
            if lane == MAIN:
                continue
            if isinstance(stage, Work) and stage.kind == "compute":
                works[lane] += _around(record, before, number)
            elif isinstance(stage, Exchange):
                missings[lane] += _around(record, before, number, until_arrival=True)
        pairs = ((works[SIDE], missings[URGENT]), (missings[SIDE], works[URGENT]), tuple(missings.values()))
        return cls(
            [*works[SIDE], *works[URGENT]],
            [*missings[SIDE], *missings[URGENT]],
            _common(works[SIDE], works[URGENT]),
            [both for one, other in pairs for both in _common(one, other)],
        )

    def work(self, inside: Interval) -> FloatArray:
        """Seconds of an interval in which some lane computes."""
        return _overlap(inside, self.works) - _overlap(inside, self.both_work)

    def missing(self, inside: Interval) -> FloatArray:
        """Seconds of an interval in which no lane computes and some lane waits for another rank."""
        return _overlap(inside, self.missings) - _overlap(inside, self.idle_missing)


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What intervals of two lanes have in common, pair by pair; disjoint, since those of each lane are."""
    found = []
    for first, last in one:
        for begin, end in other:
            start = np.maximum(first, begin)
            found.append((start, np.maximum(np.minimum(last, end), start)))
    return found


def _around(
    record: Record, before: Record | None, number: int, *, until_arrival: bool = False
) -> list[Interval]:
    """A side lane's stage of each step, and that of the `REACH` steps before, which may reach into it."""

    def end_of(part: Record) -> FloatArray:
        return np.minimum(part.ends[number], part.lasts[number]) if until_arrival else part.ends[number]

    steps, ranks = record.step_ends.shape
    known = 0 if before is None else len(before.step_ends)
    starts, ends = (np.zeros((REACH + steps, ranks)) for _ in range(2))
    starts[REACH:], ends[REACH:] = record.starts[number], end_of(record)
    if before is not None:
        starts[REACH - known : REACH], ends[REACH - known : REACH] = before.starts[number], end_of(before)
    return [(starts[REACH - back :][:steps], ends[REACH - back :][:steps]) for back in range(REACH + 1)]


def _overlap(one: Interval, others: Sequence[Interval]) -> FloatArray:
    """Seconds of an interval that disjoint others cover."""
    covered = np.zeros_like(one[0])
    for start, end in others:
        covered += np.maximum(np.minimum(one[1], end) - np.maximum(one[0], start), 0.0)
    return covered


def spans_of(program: Program, record: Record, *, rank: int, row: int, step: int) -> list[Span]:
    """The stages of one step of one rank as the spans a real run would have recorded."""
    spans = []
    for number, stage in enumerate(program):
        start, end = float(record.starts[number, row, rank]), float(record.ends[number, row, rank])
        if isinstance(stage, Work):
            kind = "compute" if stage.kind == "compute" else "stage"
            spans.append(Span(stage.name, kind, stage.lane, step, start, end))
        elif isinstance(stage, Exchange):
            arrival = Arrival(stage.name, step, start, number)
            last = float(record.lasts[number, row, rank])
            spans.append(Span(stage.name, "wait", stage.lane, step, start, end, arrival, last))
        elif isinstance(stage, Wait):
            spans.append(Span(stage.name, "wait", stage.lane, step, start, end))
    return [span for span in spans if span.end > span.start]
