"""How long this rank computes in a step, waits left out: from the start of the forward to the last gradient.

The gradient of the looked-up rows is the last thing a backward pass produces. What comes after it in a step is waiting
for other ranks (dense gradients) and the updates. On a GPU the two moments are events, read when they have passed.
The same moments, and those at which dense gradients were handed over, are recorded as spans.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from freescale.balance.cost_fit import MeasuredStep
from freescale.balance.work import WHOLE, SampleWork
from freescale.data.sequence_batch import SequenceBatch
from freescale.trace import spans


class StepTimer:
    """Measures compute time step by step; never waits for the device.

    Args:
        device: where the model computes.
        work: what a sequence of a length has to compute.
    """

    def __init__(self, device: torch.device, *, work: SampleWork = WHOLE) -> None:
        self._work = work
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[SequenceBatch, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._done: list[MeasuredStep] = []
        self._start: float | torch.cuda.Event = 0.0
        self._end: float | torch.cuda.Event = 0.0
        self._began: spans.Mark = None
        self._last_gradient: spans.Mark = None
        self._arrival: spans.Arrival | None = None

    def start(self, rows: Tensor) -> None:
        """The forward begins; the gradient of `rows` will end the measurement."""
        self._start = self._now()
        self._end = self._start
        self._began = self._last_gradient = spans.mark()
        self._arrival = None
        rows.register_post_accumulate_grad_hook(self._stop)

    def handed_over(self) -> None:
        """Dense gradients are ready to be added up; the last time counts."""
        self._arrival = spans.arrive("sum dense gradients", on_device=self._cuda)

    def finish(self, batch: SequenceBatch) -> None:
        """The backward is through, dense gradients are added up; `batch` is what was computed."""
        spans.waited(self._arrival, self._last_gradient, on_device=self._cuda)
        spans.add("forward and backward", kind="compute", start=self._began, end=self._last_gradient)
        if isinstance(self._start, float) and isinstance(self._end, float):
            self._done.append(self._measured(batch, 1000 * (self._end - self._start)))
        elif isinstance(self._start, torch.cuda.Event) and isinstance(self._end, torch.cuda.Event):
            self._running.append((batch, self._start, self._end))

    def take(self) -> list[MeasuredStep]:
        """The steps measured since the last call."""
        while self._running and self._running[0][2].query():
            batch, start, end = self._running.popleft()
            self._done.append(self._measured(batch, start.elapsed_time(end)))
        done, self._done = self._done, []
        return done

    def _stop(self, _: Tensor) -> None:
        self._end = self._now()
        self._last_gradient = spans.mark()

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _measured(self, batch: SequenceBatch, ms: float) -> MeasuredStep:
        return MeasuredStep.of(batch.lengths.numpy(), ms=ms, work=self._work)
