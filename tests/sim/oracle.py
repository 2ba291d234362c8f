"""The same programs, event by event: a heap of moments, one process a rank and lane, nothing vectorised."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator

from freescale.sim.engine.stages import (
    LAST,
    LATER,
    SIDE,
    URGENT,
    Exchange,
    Mark,
    Program,
    Ready,
    Stage,
    Start,
    Wait,
    Work,
)
from freescale.trace.spans import MAIN

Go = Callable[[float], None]
Request = Callable[[float, Go], None]
"""What a process waits for: (now, how to go on) -> nothing; it goes on when that is called with the time."""


class Oracle:
    """Runs a program on `num_ranks` ranks; `ends[step][rank]` is when the optimizer step was over."""

    def __init__(self, program: Program, *, num_ranks: int, num_steps: int) -> None:
        self.program, self.num_ranks, self.num_steps = program, num_ranks, num_steps
        self.ends = [[0.0] * num_ranks for _ in range(num_steps)]
        self.spans: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._heap: list[tuple[float, int, Go]] = []
        self._serial = itertools.count()
        self._arrived: dict[tuple[int, int], dict[int, tuple[float, Callable[[float], None]]]] = {}
        self._happened: dict[object, float] = {}
        self._waiting: dict[object, list[tuple[float, Callable[[float], None]]]] = {}

    def run(self) -> list[list[float]]:
        for rank in range(self.num_ranks):
            for lane in (MAIN, SIDE, URGENT):
                self._resume(self._process(rank, lane), None)
        while self._heap:
            now, _, action = heapq.heappop(self._heap)
            action(now)
        return self.ends

    def _resume(self, process: Generator[Request, float, None], now: float | None) -> None:
        try:
            request = next(process) if now is None else process.send(now)
        except StopIteration:
            return
        request(now or 0.0, lambda then: self._resume(process, then))

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), action))

    def _process(self, rank: int, lane: str) -> Generator[Request, float, None]:
        now = 0.0
        for step in range(self.num_steps):
            for number, stage in enumerate(self.program):
                begun = now
                if self._is_left_out(stage, step):
                    continue
                if isinstance(stage, Work) and stage.lane == lane:
                    seconds = float(stage.seconds[step % len(stage.seconds), rank])
                    now = yield lambda t, go, s=seconds: self._at(t + s, go)
                elif isinstance(stage, Exchange) and stage.lane == lane and stage.ready is not None:
                    # Where the rank has yet to come by it in this step, it is that of the step before.
                    arrived = step if self._place_of(stage.ready) < number else step - 1
                    if arrived >= 0:
                        key = ("through", number, arrived, rank)
                        now = yield lambda t, go, k=key: self._wait(k, t, go)
                elif isinstance(stage, Exchange) and stage.lane == lane:
                    now = yield lambda t, go, n=number, s=step: self._arrive(n, s, rank, t, go)
                elif isinstance(stage, Ready) and lane == MAIN:
                    for later in self._exchanges_of(stage):
                        key = ("through", later, step, rank)
                        self._arrive(later, step, rank, now, lambda then, k=key: self._happen(k, then))
                elif isinstance(stage, Start):
                    key = ("start", stage.lane, step, rank)
                    if lane == MAIN:
                        self._happen(key, now)
                    elif lane == stage.lane:
                        now = yield lambda t, go, k=key: self._wait(k, t, go)
                elif isinstance(stage, Mark) and lane == stage.lane:
                    self._happen((stage.name, step, rank), now)
                elif isinstance(stage, Wait) and lane == stage.lane and (step or stage.this_step):
                    key = (stage.mark, step if stage.this_step else step - 1, rank)
                    now = yield lambda t, go, k=key: self._wait(k, t, go)
                self.spans[step, number, rank] = (begun, now)
            if lane == MAIN:
                self.ends[step][rank] = now

    def _is_left_out(self, stage: Stage, step: int) -> bool:
        when = stage.when if isinstance(stage, Work | Exchange) else None
        return (when == LATER and step == 0) or (when == LAST and step < self.num_steps - 1)

    def _place_of(self, name: str) -> int:
        return next(n for n, one in enumerate(self.program) if isinstance(one, Ready) and one.name == name)

    def _exchanges_of(self, ready: Ready) -> list[int]:
        """The exchanges at which a rank arrives with this; it may wait for each of them somewhere else."""
        return [
            number
            for number, stage in enumerate(self.program)
            if isinstance(stage, Exchange) and stage.ready == ready.name
        ]

    def _happen(self, key: object, now: float) -> None:
        self._happened[key] = now
        for since, go in self._waiting.pop(key, []):
            self._at(max(since, now), go)

    def _wait(self, key: object, now: float, go: Go) -> None:
        if key in self._happened:
            self._at(max(now, self._happened[key]), go)
        else:
            self._waiting.setdefault(key, []).append((now, go))

    def _arrive(self, number: int, step: int, rank: int, now: float, go: Go) -> None:
        arrived = self._arrived.setdefault((number, step), {})
        arrived[rank] = (now, go)
        if len(arrived) < self.num_ranks:
            return
        stage = self.program[number]
        assert isinstance(stage, Exchange)
        own = [float(value) for value in stage.seconds[step % len(stage.seconds)]]
        pieces = 0.0
        if stage.lead is not None and stage.total is not None:
            lead, total = (values[step % len(values)] for values in (stage.lead, stage.total))
            first = max(when - float(lead[other]) for other, (when, _) in arrived.items())
            pieces = first + max(float(value) for value in total)
        for other, (_, go_on) in arrived.items():
            self._at(max(now + (max(own) if stage.whole else own[other]), pieces), go_on)
