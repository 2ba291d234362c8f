"""What a rank did when: named intervals of every thread, kept for almost nothing. `stages.py` has what code says.

These kinds matter to the accounting of bubbles (`bubbles.py`):

    stage      anything with a name; only shown
    compute    useful work; its union over all threads is what a step is for
    replay     the same, of work recorded before that a device repeats without the host: no gap is inside
    wait       standing still at an exchange; `arrive` says since when this rank was ready for it
    handover   a thread goes on with what another one had ready (`took_over`); read by `ideal.py`, shown to nobody

Recording appends one tuple to a list: no lock, no file, no waiting for a device. Moments of work on a GPU are given
by the device's own clock (`Clock`), read once they have passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

MAX_PENDING = 50_000
"""Spans kept in memory; more than this between two accounts are dropped, never waited for, and that is told."""

MAX_NOTES = 1000
"""Steps of which something is known that nobody has asked for; more, and those before the last one asked for go."""

MAIN = "main"

WORK = ("compute", "replay")
"""Kinds of spans in which a rank does what a step is for."""

Mark = Any
"""A moment: seconds of the monotonic clock, or what the device's clock will turn into such seconds."""


class Clock(Protocol):
    """Moments in the order of the work: on a CPU now, on a GPU when its stream gets there."""

    lag: int

    def mark(self) -> Mark:
        """This moment of the work queued so far."""

    def read(self, mark: Mark) -> float | None:
        """Its time in seconds of this process's monotonic clock; None while it lies ahead."""

    def lag_of(self, mark: Mark) -> float | None:
        """Seconds by which the device came later than the host; None where both are one, or it has not come."""

    def wait_for_marks(self) -> None:
        """Wait until every mark has passed; only called where the run stands still anyway."""


class HostClock:
    """The monotonic clock, which all processes of one machine share."""

    lag = 0
    mark = staticmethod(time.monotonic)

    def read(self, mark: Mark) -> float | None:
        """A moment of the host has passed when it is marked."""
        return float(mark)

    def lag_of(self, mark: Mark) -> float | None:
        """The host is its own device."""
        return None

    def wait_for_marks(self) -> None:
        """Nothing is ever pending."""


class Arrival(NamedTuple):
    """This rank is ready for an exchange: which one, and since when; `serial` tells it from others of its name."""

    name: str
    step: int
    mark: Mark
    serial: int


class Span(NamedTuple):
    """One interval. Marks while recorded, seconds of this rank's clock once taken.

    Args:
        name: what was done.
        kind: "stage", "compute", "replay", "wait" or "handover".
        lane: the thread, "main" for the one that trains.
        step: the step it belongs to, counted from 1.
        start: its beginning.
        end: its end.
        arrival: of a wait: since when this rank was ready for the exchange. Of a handover: which thread had ready what
            this one goes on with, and when.
        last: of a wait: when the last rank was, once the ranks have compared notes.
        missing: of a wait: when it was for another rank, not for a transfer; until `last` where nobody knows better.
        over: of a wait: whether the exchange was over with it; not so where a rank only starts to send.
    """

    name: str
    kind: str
    lane: str
    step: int
    start: Mark
    end: Mark
    arrival: Arrival | None = None
    last: float | None = None
    missing: tuple[tuple[float, float], ...] | None = None
    over: bool = True


class StepNotes:
    """What is known of a step beside its spans.

    Args:
        load: what there was to compute, as `describe` was told; None where nobody said.
        lags: seconds by which the device came later than the host to the ends of the main thread's work.
    """

    __slots__ = ("lags", "load")

    def __init__(self) -> None:
        self.load: Any = None
        self.lags: list[float] = []


class Recorder:
    """Collects the spans of one rank, from all its threads, and the moments at which its steps end.

    Args:
        clock: gives the moments of compute and waits; stages are always host time.
        say: told once, by the thread that trains, if spans had to be dropped.
        shows: step -> whether a timeline will show it: of all others, short stages are not kept.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        say: Callable[[str], None] = lambda text: None,
        shows: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self.clock: Clock = clock or HostClock()
        self._shows = shows
        self.shown = True
        """Whether what happens now may be seen on a timeline."""
        self._say: Callable[[str], None] | None = say
        self.step = 1
        self.paused = True
        self.num_dropped = 0
        self._spans: deque[Span] = deque()
        self._ends: deque[tuple[int, Mark, Mark]] = deque()
        self._begin: Mark = None
        self._cpu: dict[int, float] = {}
        self._cpu_begin = 0.0
        self._notes: dict[int, StepNotes] = {}

    def begin(self, step: int) -> None:
        """From here on time belongs to `step`; call it where training starts or goes on."""
        self.step, self.paused, self.shown = step, False, True
        self._begin = self.clock.mark()
        self._cpu_begin = time.thread_time()

    def end_step(self) -> None:
        """The optimizer step is over; the next one begins here."""
        now = self.clock.mark()
        self._ends.append((self.step, self._begin, now))
        if self.num_dropped and self._say is not None:
            # Once: it goes on like this with every account.
            say, self._say = self._say, None
            say(
                f"more than {MAX_PENDING:,} spans came between two accounts of time and some were dropped: "
                "the steps they belong to are told with too little compute; lower run.log_every"
            )
        if isinstance(self.clock, HostClock):
            cpu = time.thread_time()
            self._cpu[self.step], self._cpu_begin = cpu - self._cpu_begin, cpu
        self.step, self._begin = self.step + 1, now
        # A device does later what a host has done in the steps before.
        self.shown = any(map(self._shows, range(self.step - 1 - self.clock.lag, self.step + 1)))

    def pause(self) -> None:
        """Forget what happens until `begin`: evaluations and checkpoints belong to no step."""
        self.paused = True

    def add(self, span: Span) -> None:
        """Keep a span, or count it as dropped where nobody has taken spans for too long."""
        if self.paused:
            return
        if len(self._spans) >= MAX_PENDING:
            self.num_dropped += 1
            return
        self._spans.append(span)

    def describe(self, load: Any) -> None:
        """What the step that is going on has to compute; a host's work has no gaps to be told by it."""
        if not self.paused and not isinstance(self.clock, HostClock):
            self._notes.setdefault(self.step, StepNotes()).load = load

    def notes_of(self, step: int) -> StepNotes:
        """What is known of a step; ask after `take`."""
        return self._notes.get(step) or StepNotes()

    def forget(self, step: int) -> None:
        """Let go of what is known of a step, and of what is left of earlier ones."""
        self._notes.pop(step, None)
        if len(self._notes) > MAX_NOTES:
            self._notes = {number: notes for number, notes in self._notes.items() if number > step}

    def ended_steps(self) -> list[tuple[int, float, float]]:
        """(step, start, end) of the steps that have passed since the last call, oldest first."""
        passed: list[tuple[int, float, float]] = []
        while self._ends:
            step, begin, end = self._ends[0]
            start_s, end_s = self.clock.read(begin), self.clock.read(end)
            if start_s is None or end_s is None:
                break
            passed.append((step, start_s, end_s))
            self._ends.popleft()
        return passed

    def take_cpu(self, step: int) -> float | None:
        """Seconds of CPU time the thread that trains spent on a step; asked once. None where a device computes."""
        return self._cpu.pop(step, None)

    def take(self) -> list[Span]:
        """The spans that have passed since the last call, with times in seconds; the others are kept."""
        next_one = self._spans.popleft
        if isinstance(self.clock, HostClock):
            return [next_one() for _ in range(len(self._spans))]
        taken: list[Span] = []
        for _ in range(len(self._spans)):
            span = next_one()
            timed = span if span.kind == "stage" else self._timed(span)  # stages are host time as they are
            if timed is None:
                self._spans.append(span)
            else:
                taken.append(timed)
        return taken

    def _timed(self, span: Span) -> Span | None:
        """With times in seconds; thousands of them are read at once, so nothing here is asked for twice."""
        name, kind, lane, step, start, end, arrival, _, _, over = span
        read = self.clock.read
        start_s, end_s = read(start), read(end)
        if start_s is None or end_s is None:
            return None
        if arrival is not None:
            at = read(arrival.mark)
            if at is None:
                return None
            arrival = Arrival(arrival.name, arrival.step, at, arrival.serial)
        if lane == MAIN and kind in WORK:
            lag = self.clock.lag_of(end)
            if lag is not None:
                notes = self._notes.get(step)
                if notes is None:
                    notes = self._notes[step] = StepNotes()
                notes.lags.append(lag)
        return Span(name, kind, lane, step, start_s, end_s, arrival, None, None, over)
