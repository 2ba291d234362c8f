"""How long this rank computes in a step, waits left out: from the start of the forward to the last gradient.

The gradient of the looked-up rows is the last thing a backward pass produces. What comes after it in a step is waiting
for other ranks (dense gradients) and the updates. On a GPU the two moments are events, read when they have passed; what
lies between them is longer than the device works where the host is slow, so that `busy` has the last word. The same
moments, and those at which dense gradients were handed over, are recorded as spans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from freescale import trace
from freescale.balance import WHOLE, MeasuredStep, SampleWork
from freescale.data import SequenceBatch
from freescale.train.accounts.busy import BusyTimes
from freescale.train.accounts.cuda_clock import CudaMoment

Moment = float | torch.cuda.Event | CudaMoment
"""Seconds of the host, or a place in the stream of a device: the recorder's mark, where there is one, or an event."""


class StepTimer:
    """Measures compute time step by step; never waits for the device.

    Args:
        device: where the model computes.
        work: what a sequence of a length has to compute.

    `busy` says how long the device works in a step of a size, once that is known; without it, or before, all that lies
    between two events is taken for work.
    """

    def __init__(self, device: torch.device, *, work: SampleWork = WHOLE) -> None:
        self.busy: BusyTimes | None = None
        self._work = work
        self._cuda = device.type == "cuda"
        self._running: deque[_TimedStep] = deque()
        self._done: list[MeasuredStep] = []
        self._start: Moment = 0.0
        self._end: Moment = 0.0
        self._began: trace.Mark = None
        self._last_gradient: trace.Mark = None
        self._arrival: trace.Arrival | None = None
        self._waiting: trace.Mark = None
        self._away: list[tuple[Moment, Moment]] = []
        self._tokens = self._places = 0

    def start(self, rows: Tensor) -> None:
        """The forward begins; the gradient of `rows` will end the measurement."""
        self._start, self._began = self._marked()
        self._end, self._last_gradient = self._start, self._began
        self._arrival = None
        self._away = []
        rows.register_post_accumulate_grad_hook(self._stop)

    def handed_over(self) -> trace.Arrival | None:
        """Dense gradients are ready to be added up; the last time counts where all are waited for at once."""
        self._arrival = trace.arrive("sum dense gradients", on_device=self._cuda)
        return self._arrival

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """An exchange inside the forward or the backward (tokens to experts, say): no compute of this rank."""
        left, mark = self._marked()
        trace.add("forward and backward", kind="compute", start=self._began, end=mark)
        yield
        back, self._began = self._marked()
        self._last_gradient = self._began
        self._away.append((left, back))

    def finish(self, batch: SequenceBatch) -> None:
        """The backward is through; `batch` is what was computed."""
        self._waiting = self._last_gradient
        trace.add("forward and backward", kind="compute", start=self._began, end=self._last_gradient)
        away, self._away = self._away, []
        moments = (self._began, self._last_gradient)
        self._add(_TimedStep(self._load_of(batch), self._start, self._end, away, moments, []))

    @contextmanager
    def padded(self, batch: SequenceBatch, *, num_tokens: int) -> Iterator[None]:
        """A batch padded to so many tokens, replayed or computed as usual, instead of `start` and `finish`.

        What the device works is told of its padded size, what a sample costs of its own: pads are nobody's.
        A replay has no gap inside. But to start one takes the host longer than the device needs for a small step, and
        that lies between the two moments, too: what was seen kernel by kernel has the last word here as well.
        Updates of weights that a replay makes itself (`train/compute/late_update.py`) count with it, in all steps.
        """
        self._arrival, self._away = None, []
        self._start, self._began = self._marked()
        yield
        self._end, self._last_gradient = self._marked()
        self._waiting = self._last_gradient
        trace.add("forward and backward", kind="compute", start=self._began, end=self._last_gradient)
        moments = (self._began, self._last_gradient)
        load = self._load_of(batch)
        self._tokens, self._places = self._tokens + load.tokens, self._places + num_tokens
        away, self._away = self._away, []
        step = _TimedStep(load, self._start, self._end, away, moments, [])
        self._add(step, load._replace(tokens=num_tokens))

    @contextmanager
    def later_part(self) -> Iterator[None]:
        """Compute of the step that was measured last, put off until its rows had left."""
        start = self._now()
        yield
        self._running[-1].later.append((start, self._now()))

    def wait_for_sums(self) -> None:
        """Only now this rank begins to wait for dense gradients, not where the backward ended."""
        self._waiting = trace.mark()

    def summed(self) -> None:
        """Dense gradients are added up."""
        trace.waited(self._arrival, self._waiting, on_device=self._cuda)

    @property
    def pads(self) -> float:
        """Tokens that padded batches compute for nothing, over those that somebody wants."""
        return max(0.0, self._places / self._tokens - 1) if self._tokens else 0.0

    def take(self) -> list[MeasuredStep]:
        """The steps measured since the last call."""
        while self._running and self._running[0].has_passed:
            self._done.append(self._measured(self._running.popleft()))
        done, self._done = self._done, []
        return done

    def _stop(self, _: Tensor) -> None:
        self._end, self._last_gradient = self._marked()

    def _marked(self) -> tuple[Moment, trace.Mark]:
        """This moment, and the recorder's mark of it: one event for both."""
        mark = trace.mark()
        return (mark if isinstance(mark, CudaMoment) else self._now()), mark

    def _now(self) -> Moment:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _load_of(self, batch: SequenceBatch) -> MeasuredStep:
        return MeasuredStep.of(batch.lengths.numpy(), ms=0.0, work=self._work)

    def _add(self, step: _TimedStep, worked: MeasuredStep | None = None) -> None:
        trace.describe(worked or step.load)
        moments = [step.start, step.end, *(moment for interval in step.away for moment in interval)]
        # A recorder that came or went in the middle: of such a step nobody knows how long it took.
        if len({isinstance(moment, CudaMoment) for moment in moments}) == 1:
            self._running.append(step)

    def _measured(self, step: _TimedStep) -> MeasuredStep:
        ms = _ms(step.start, step.end) - sum(_ms(*interval) for interval in step.away)
        if self.busy is not None:
            lags = [lag for moment in step.moments if (lag := trace.lag_of(moment)) is not None]
            ms = self.busy.model_ms(step.load, ms, lags=lags)
        return step.load._replace(ms=ms + sum(_ms(*interval) for interval in step.later))


class _TimedStep(NamedTuple):
    """What a step had to compute, when it began and ended, and when it stood still in between.

    `moments` are those of the recorder, which knows how far the host was ahead; `later` is work that was put off.
    """

    load: MeasuredStep
    start: Moment
    end: Moment
    away: list[tuple[Moment, Moment]]
    moments: tuple[trace.Mark, ...]
    later: list[tuple[Moment, Moment]]

    @property
    def has_passed(self) -> bool:
        """Whether all its moments lie behind; the first is asked first, as the clock gets better by what it reads."""
        return _has_passed(self.start) and _has_passed(self.later[-1][1] if self.later else self.end)


def _has_passed(moment: Moment) -> bool:
    if isinstance(moment, CudaMoment):
        return moment.has_passed
    return isinstance(moment, float) or moment.query()


def _ms(start: Moment, end: Moment) -> float:
    if isinstance(start, CudaMoment) and isinstance(end, CudaMoment):
        return end.ms_since(start)
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end))
    assert isinstance(start, float)
    assert isinstance(end, float)
    return 1000 * (end - start)
