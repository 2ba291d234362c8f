"""Decides which steps are seen kernel by kernel, and tells the accounts how long the device worked in all others.

First as soon as the run is warm, twice more while it settles, then at ever longer intervals: to read what was seen
takes tenths of a second, as long as some hundred steps of a small model. Which steps these are follows from step
numbers alone, so all ranks open and close their watches together.

While a run settles, ranks that share a GPU record graphs and load kernels at different times, and find the GPU emptier
than later: their kernels then took up to 15 % less. So until then, what is seen replaces what was seen before.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from freescale.balance import MeasuredStep
from freescale.trace import WORK, Clock, Interval, Span, StepNotes, overlap, union, without
from freescale.train.accounts.busy import FEWEST_STEPS, BusyTimes, SeenStep, dry_share, is_fed
from freescale.train.accounts.kernel_watch import Watch

_LITTLE = 0.05
"""Of a step: what is seen of copies in less says nothing."""

MODEL = "forward and backward"
"""The name of the spans that the balance's cost model is about."""


@dataclass(kw_only=True)
class BusyMeter:
    """Opens and closes the watch, and learns from what it saw.

    Args:
        watch: sees when the device works.
        clock: knows the lag of a stream that never has anything to do.
        times: what is known of busy times.
        warm: steps before the first watch.
        settling: steps after which the run is looked at anew.
        lasts: steps that a watch lasts.
        later: the step of the next one, and of others at twice that, four times that, and so on.
        rarest: steps from one to the next at most.
    """

    watch: Watch
    clock: Clock | None = None
    times: BusyTimes = field(default_factory=BusyTimes)
    warm: int = 8
    settling: Sequence[int] = (42, 200)
    lasts: int = 12
    later: int = 2000
    rarest: int = 64_000
    last_step: float = math.inf
    """Of the run: a watch ends before, or is not opened."""
    is_open: bool = False
    took_s: float = 0.0
    """By opening and closing watches, in which the run stands still."""
    _opens: float = math.inf
    _closes: float = math.inf
    _num_watches: int = 0
    _num_steps: int = 0
    _began: int = 0
    _has_settled: bool = False
    _sees: bool = False
    _watched: set[int] = field(default_factory=set)

    def begin(self, step: int) -> None:
        """Training starts or goes on with this step."""
        if self._opens == math.inf:
            self._began = step - 1
            self._plan(self._began + self.warm)
        elif not self.is_open:
            self._plan(step if self._opens < step - 1 else self._opens)

    def opens_after(self, step: int) -> bool:
        """Whether the watch is to be opened at the end of this step."""
        return step == self._opens < self._closes and not self.is_open

    def closes_after(self, step: int) -> bool:
        """Whether it is to be closed there."""
        return self.is_open and step >= self._closes

    def holds(self, step: int) -> bool:
        """Whether the line of a step should wait: what it needs will be known in a few steps."""
        return step < self._closes and (self._num_watches == 0 or step > self._opens)

    @property
    def known_after(self) -> int:
        """The step with which held lines can be written."""
        return int(self._closes)

    def open(self) -> None:
        """See what the device does, if that is possible."""
        self.is_open = self._sees = True
        began = time.monotonic()
        try:
            self.watch.start()
        except Exception as error:  # whatever a driver or another profiler may object to
            self._sees = False
            self.times.missed(f"the device could not be watched: {error}")
        self.took_s += time.monotonic() - began

    def close(
        self,
        step: int,
        ended: Sequence[tuple[int, float, float]],
        spans: Sequence[Span],
        notes: Sequence[StepNotes],
    ) -> None:
        """Learn from the steps that were seen, up to this one.

        Args:
            step: the last of them.
            ended: (step, start, end) of those whose time is known.
            spans: of these steps, in any order.
            notes: of these steps.
        """
        self.is_open = False
        opened = self._opens
        self._num_steps += int(step - opened)
        if self._num_steps < FEWEST_STEPS:
            self._opens = self._closes = -math.inf  # an evaluation came too early: `begin` tries again
        else:
            self._num_watches += 1
            self._num_steps = 0
            self._plan(self._next(step))
        if not self._sees:
            return
        # The step behind begins with a wait for the rank that has read its watch last.
        self._watched.update(number for number, _, _ in ended if opened < number <= step)
        self._watched.add(step + 1)
        began = time.monotonic()
        try:
            worked = self.watch.stop()
        except Exception as error:
            self.times.missed(f"what the device did is unknown: {error}")
            return
        finally:
            self.took_s += time.monotonic() - began
        seen = []
        for (number, start, end), note in zip(ended, notes, strict=True):
            if opened < number <= step and note.load is not None:
                seen.append(seen_step(start, end, spans, worked, note))
        if self.clock is not None:
            self.times.idle_lag = float(getattr(self.clock, "idle_lag", 0.0))
        if not self._has_settled and len(seen) >= FEWEST_STEPS:
            self.times.forget()
            self._has_settled = opened >= self._began + self.settling[-1]
        self.times.learn(seen)

    def abandon(self) -> None:
        """The run has ended in the middle of a watch: leave no profiler open."""
        if self.is_open and self._sees:
            self.is_open = False
            with suppress(Exception):
                self.watch.stop()

    def was_watched(self, step: int) -> bool:
        """Whether this step was seen, or came right behind, and so was slower than others; ask once."""
        known = step in self._watched
        self._watched.discard(step)
        return known

    def dry_share(self, lags: Sequence[float]) -> float:
        """The share of a step's moments at which the device had nothing left to run."""
        return dry_share(lags, self.times.idle_lag)

    def _plan(self, opens: float) -> None:
        """The next watch, or none where the run would end before enough was seen: opening and closing it takes time."""
        closes = min(opens + self.lasts, self.last_step - 1)
        self._opens, self._closes = opens, closes if closes - opens >= FEWEST_STEPS else -math.inf

    def _next(self, step: int) -> int:
        for after in self.settling:
            if step < self._began + after:
                return self._began + after
        later = self.later
        while later <= step:
            later += min(later, self.rarest)
        return later


def seen_step(
    start: float, end: float, spans: Sequence[Span], worked: Sequence[Interval], notes: StepNotes
) -> SeenStep:
    """How long the device worked in the stretches of a step."""
    inside = [span for span in spans if span.kind in WORK and span.end > start and span.start < end]
    replays = union((span.start, span.end) for span in inside if span.kind == "replay")

    def stretches(of: Sequence[Span]) -> list[Interval]:
        return without(union((max(start, span.start), min(end, span.end)) for span in of), replays)

    first = max(0, bisect_left(worked, (start,)) - 1)
    near = worked[first : bisect_left(worked, (end,))]
    whole = stretches(inside)
    model = stretches([span for span in inside if span.name == MODEL])
    stretch_s = _length(whole)
    waits = [span for span in spans if span.kind == "wait" and span.end > start and span.start < end]
    covered = union((max(start, span.start), min(end, span.end)) for span in (*inside, *waits))
    outside = without([(start, end)], covered)
    # Where ranks wait for each other their copies are communication.
    share = 0.0 if waits else _length(outside) / (end - start)
    load: MeasuredStep = notes.load
    return SeenStep(
        load=load,
        stretch_ms=1000 * stretch_s,
        busy_ms=1000 * _length(overlap(whole, near)),
        model_ms=1000 * _length(overlap(model, near)),
        replayed=bool(replays),
        fed=is_fed(notes.lags, stretch_s),
        copies_ms=1000 * _length(overlap(outside, near)) / share if share > _LITTLE else 0.0,
    )


def _length(intervals: Sequence[Interval]) -> float:
    return sum(high - low for low, high in intervals)
