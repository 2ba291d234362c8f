"""A GPU in virtual time: a host that launches kernels one after the other, a stream that runs them, and their truth."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any

from freescale.balance import MeasuredStep
from freescale.trace import Interval, union
from freescale.trace.spans import Recorder, Span
from freescale.train.accounts.accounting import AccountedStep, Accounts
from freescale.train.accounts.busy_meter import BusyMeter
from tests.small_run import these_ranks

RECORDING_S = 4e-6


class MadeUpDevice:
    """Clock, watch and stream in one. Times in seconds.

    Args:
        launch: what a launch takes on the host.
        watched: what it takes, in launches, while the device is watched.
    """

    lag = 1
    idle_lag = RECORDING_S

    def __init__(self, *, launch: float, watched: float = 2.0) -> None:
        self.now, self.tail = 1000.0, 1000.0
        self.launch_s, self.slower = launch, watched
        self.kernels: list[Interval] = []
        self.is_watched = False
        self.num_watches = 0
        self.broken = ""
        self._since = 0

    def launch(self, seconds: float, *, host: float | None = None) -> None:
        self.now += (self.launch_s if host is None else host) * (self.slower if self.is_watched else 1.0)
        start = max(self.now, self.tail)
        self.tail = start + seconds
        self.kernels.append((start, self.tail))

    def mark(self) -> list[float]:
        self.now += 1e-7
        return [self.now, max(self.now + RECORDING_S, self.tail)]

    def read(self, mark: Any) -> float | None:
        if isinstance(mark, float):
            return mark
        return mark[1] if mark[1] <= self.now else None

    def lag_of(self, mark: Any) -> float | None:
        return mark[1] - mark[0]

    def wait_for_marks(self) -> None:
        self.now = max(self.now, self.tail) + 1e-5

    def start(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.num_watches += 1
        self.now += 0.3  # the profiler takes its time
        self.is_watched, self._since = True, len(self.kernels)

    def stop(self) -> list[Interval]:
        self.is_watched = False
        self.now += 0.2
        return union(self.kernels[self._since :])

    def worked(self, start: float, end: float) -> float:
        # They stand in the order of their starts, and none takes 50 ms.
        first, last = (bisect_left(self.kernels, (edge,)) for edge in (start - 0.05, end))
        return sum(max(0.0, min(end, high) - max(start, low)) for low, high in self.kernels[first:last])


class Program:
    """Steps of a made-up model on such a device: kernels as long as the step has tokens.

    Args:
        device: where.
        idle_ms: what the host does in a step beside launching.
        kernel_us: length of a kernel at 1,000 tokens.
        replayed: forward and backward are one replay.
        copy_us: a copy beside them, somewhere in the time in which the host is idle.
    """

    def __init__(
        self,
        device: MadeUpDevice,
        *,
        kernel_us: float,
        idle_ms: float = 0.0,
        copy_us: float = 0.0,
        replayed: bool = False,
        meter: BusyMeter | None = None,
        ranks: Any = None,
        every: int = 20,
    ) -> None:
        self.device, self.kernel_us, self.idle_ms, self.replayed = device, kernel_us, idle_ms, replayed
        self.copy_us = copy_us
        self.recorder = Recorder(device)
        self.written: list[AccountedStep] = []
        self.told: list[str] = []
        self.windows: dict[int, tuple[float, float]] = {}
        self.meter = meter or BusyMeter(watch=device, clock=device)
        self.accounts = Accounts(
            ranks=ranks or these_ranks(),
            recorder=self.recorder,
            write=self.written.append,
            busy=self.meter,
            say=self.told.append,
            every=every,
        )
        self.random = random.Random(3)
        self.step = 0

    def begin(self) -> None:
        self.accounts.begin(self.step + 1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.take_step()
            if self.step > 1:
                self.accounts.add(self.step - 1, {"n": self.step - 1})

    def end(self) -> None:
        self.accounts.add(self.step, {"n": self.step})
        self.accounts.pause()

    def take_step(self) -> None:
        device, recorder = self.device, self.recorder
        self.step += 1
        tokens = self.random.randint(500, 1500)
        begin = device.now + self.random.random() * (self.idle_ms - self.copy_us / 1000) / 1000
        if self.copy_us and begin >= device.tail:
            device.kernels.append((begin, begin + self.copy_us * 1e-6))
        device.now += self.idle_ms / 1000
        self._stretch("forward and backward", tokens, kernels=30, whole=self.replayed)
        recorder.describe(MeasuredStep(num_samples=10, tokens=tokens, squares=float(tokens), ms=0.0))
        self._stretch("update weights", 1000, kernels=4, whole=False)
        if device.tail - device.now > 0.02:  # a host reads the loss of the step before
            device.now = device.tail - 0.02
        begin, ending = recorder._begin, recorder.end_step

        def end_step() -> None:
            ending()
            self.windows[self.step] = (begin[1], recorder._ends[-1][2][1])

        recorder.end_step = end_step  # type: ignore[method-assign]
        self.accounts.end_step()
        recorder.end_step = ending  # type: ignore[method-assign]

    def _stretch(self, name: str, tokens: int, *, kernels: int, whole: bool) -> None:
        start = self.device.mark()
        seconds = self.kernel_us * 1e-6 * tokens / 1000
        if whole:
            self.device.launch(kernels * seconds, host=1e-5)
        else:
            for _ in range(kernels):
                self.device.launch(seconds)
        kind = "replay" if whole else "compute"
        self.recorder.add(Span(name, kind, "main", self.step, start, self.device.mark()))

    def shares(self, first: int, last: int) -> tuple[float, float]:
        """Host by the accounts and idle by the kernels, as shares of the time of some steps, watched ones left out."""
        steps = [one for one in self.written if first <= one.step <= last and not one.watched]
        time_s = sum(one.ranks[0].total for one in steps)
        host = sum(one.ranks[0].host for one in steps) / time_s
        busy = sum(self.device.worked(*self.windows[one.step]) for one in steps)
        return host, 1 - busy / time_s
