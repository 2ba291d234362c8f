"""Runs the program of a step on all ranks at once: a critical path over ranks x steps, in plain numpy.

Every rank has three clocks: the training thread (or stream), the side that moves what has time, and the urgent chain
beside a split backward. A stage moves one of them on all ranks at once:

    Work        clock += seconds
    Exchange    nobody goes on before the last has arrived: clock = max over ranks + seconds
    Ready       a rank arrives here at an exchange that stands further on, or in the next step, and waits only there
    Start       a lane begins when the training thread gets here: side = max(side, main)
    Mark, Wait  a lane waits for what another had marked, mostly one step earlier: main = max(main, mark)

Only sums and maxima: a stage that takes longer never makes anything end earlier. `accounts.py` says where the time
went; `tests/sim/oracle.py` simulates the same programs event by event and must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.engine.accounts import Record, StepAccounts, account
from freescale.sim.engine.shared_cores import shared_finish
from freescale.sim.engine.stages import (
    SIDE,
    URGENT,
    Exchange,
    Mark,
    Program,
    Ready,
    Stage,
    Start,
    Work,
    has_turn,
)
from freescale.trace import MAIN

# Stages of this many (step, rank) pairs are kept before they are accounted for: 2 MB an array stays in the cache.
CHUNK = 1 << 18

Arrivals = dict[str, tuple[int, FloatArray]]
"""Name of a `Ready` -> the last step that came by it, and [ranks] when."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A simulated run.

    Args:
        ends: [steps, ranks] end of every optimizer step, in seconds.
        accounts: where the time of every step and rank went.
    """

    ends: FloatArray
    accounts: StepAccounts


def simulate(
    program: Program,
    *,
    num_ranks: int,
    num_steps: int,
    cores: int | None = None,
    observe: Callable[[int, Record], None] | None = None,
) -> Outcome:
    """Run the program of a step `num_steps` times.

    Args:
        program: stages in an order in which each finds the clocks it needs: the side's before those that wait for it.
        num_ranks: ranks.
        num_steps: steps; the arrays of the stages have as many rows, or fewer and start again from the first.
        cores: ranks share this many cores, evenly among those that have work; None: every rank has its own device.
        observe: called with the first step and the moments of all stages, for timelines.
    """
    clocks = {lane: np.zeros(num_ranks) for lane in (MAIN, SIDE, URGENT)}
    marks: dict[str, FloatArray] = {}
    ready: Arrivals = {}
    chunk = max(1, min(num_steps, CHUNK // num_ranks))
    ends, accounts = np.empty((num_steps, num_ranks)), StepAccounts.empty(num_steps, num_ranks)
    before: Record | None = None
    for first in range(0, num_steps, chunk):
        size = min(chunk, num_steps - first)
        record = Record.empty(program, size, num_ranks, step_start=clocks[MAIN])
        for row in range(size):
            step = first + row
            stages = [
                (number, stage)
                for number, stage in enumerate(program)
                if has_turn(stage, step=step, num_steps=num_steps)
            ]
            _run_step(stages, step, row, clocks, marks, ready, record, cores)
            ends[step] = record.step_ends[row] = clocks[MAIN]
        accounts.fill(first, account(program, record, before))
        if observe is not None:
            observe(first, record)
        before = record.tail(before)
    return Outcome(ends, accounts)


def _run_step(
    stages: Sequence[tuple[int, Stage]],
    step: int,
    row: int,
    clocks: dict[str, FloatArray],
    marks: dict[str, FloatArray],
    ready: Arrivals,
    record: Record,
    cores: int | None,
) -> None:
    new_marks: dict[str, FloatArray] = {}
    shared: list[tuple[int, Work]] = []
    for number, stage in stages:
        if cores is not None and shared and not (isinstance(stage, Work) and stage.lane == MAIN):
            _run_shared(shared, step, row, clocks, record, cores)
            shared = []
        if isinstance(stage, Work):
            if cores is not None and stage.lane == MAIN:
                shared.append((number, stage))
                continue
            clock = clocks[stage.lane]
            record.starts[number, row] = clock
            clocks[stage.lane] = record.ends[number, row] = clock + _row(stage.seconds, step)
        elif isinstance(stage, Exchange):
            _run_exchange(stage, number, step, row, clocks, ready, record)
        elif isinstance(stage, Ready):
            ready[stage.name] = step, clocks[MAIN]
        elif isinstance(stage, Start):
            clocks[stage.lane] = np.maximum(clocks[stage.lane], clocks[MAIN])
        elif isinstance(stage, Mark):
            new_marks[stage.name] = clocks[stage.lane]
        else:
            clock, there = clocks[stage.lane], new_marks if stage.this_step else marks
            record.starts[number, row] = clock
            if stage.mark in there:
                clock = np.maximum(clock, there[stage.mark])
            clocks[stage.lane] = record.ends[number, row] = clock
    if cores is not None and shared:
        _run_shared(shared, step, row, clocks, record, cores)
    marks.clear()
    marks.update(new_marks)


def _run_exchange(
    stage: Exchange,
    number: int,
    step: int,
    row: int,
    clocks: dict[str, FloatArray],
    ready: Arrivals,
    record: Record,
) -> None:
    clock = arrived = clocks[stage.lane]
    if stage.ready is not None:
        if stage.ready not in ready:
            return
        step, arrived = ready[stage.ready]
    last = arrived.max()
    seconds = _row(stage.seconds, step)
    end = last + (seconds.max() if stage.whole else seconds)
    if stage.lead is not None and stage.total is not None:
        early = (arrived - _row(stage.lead, step)).max() + _row(stage.total, step).max()
        end = np.maximum(end, early)
    record.starts[number, row] = clock
    record.lasts[number, row] = last
    record.ends[number, row] = np.maximum(end, clock)
    clocks[stage.lane] = record.ends[number, row]


def _run_shared(
    works: Sequence[tuple[int, Work]],
    step: int,
    row: int,
    clocks: dict[str, FloatArray],
    record: Record,
    cores: int,
) -> None:
    """Work that follows on each other without an exchange between: ranks share the cores over all of it."""
    numbers = [number for number, _ in works]
    work = np.stack([_row(stage.seconds, step) for _, stage in works])
    start = clocks[MAIN]
    done = np.cumsum(work, axis=0)
    finish = shared_finish(start, done[-1], cores)
    share = done / np.maximum(done[-1], 1e-300)
    edges = start + share * (finish - start)
    edges[-1] = finish
    record.starts[numbers[0], row] = start
    for place, number in enumerate(numbers):
        if place:
            record.starts[number, row] = edges[place - 1]
        record.ends[number, row] = edges[place]
    clocks[MAIN] = record.ends[numbers[-1], row]


def _row(values: FloatArray, step: int) -> FloatArray:
    row: FloatArray = values[step % len(values)]
    return row
