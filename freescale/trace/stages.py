"""What code says of itself while it runs: the stage a thread is in, moments, exchanges it is ready for or waits at.

`with stage("send gradients home", step=7):` names the stage for errors, and records a span while a recorder is on
(`spans.py`).
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, NamedTuple

from freescale.trace.spans import MAIN, Arrival, Mark, Recorder, Span

_LONG_S = 0.01
"""Stages that take longer are always kept: a timeline that begins later may show their ends."""

_main_thread: list[dict[str, Any]] = []


class _Here(threading.local):
    """Where this thread is."""

    stage = "start"
    step: int | None = None

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.lane = MAIN if thread is threading.main_thread() else thread.name
        if self.lane == MAIN:
            _main_thread.append(self.__dict__)


class _Failure(NamedTuple):
    """Where the first error was raised that no stage has outlived."""

    stage: str
    step: int | None
    lane: str


_here = _Here()
_serials = itertools.count()
_host_now = time.monotonic
_failure: _Failure | None = None
_recorder: Recorder | None = None


def record_into(recorder: Recorder | None) -> None:
    """Record the spans of this process from now on; None stops."""
    global _recorder
    _recorder = recorder


class stage:  # noqa: N801  used like a function
    """Name the code inside: for errors that say where a rank was, and as a span while a recorder is on.

    Args:
        name: what is done, in words for a reader of the timeline.
        step: the step it belongs to, counted from 1; the surrounding one unless given.
        kind: "stage", "compute" or "wait".
    """

    __slots__ = ("_before", "_kind", "_name", "_shown", "_start", "_step")

    def __init__(self, name: str, *, step: int | None = None, kind: str = "stage") -> None:
        self._name, self._step, self._kind = name, step, kind

    def __enter__(self) -> stage:
        global _failure
        here = _here
        if _failure is not None and _failure.lane == here.lane:
            _failure = None  # this thread goes on: that error was dealt with
        self._before = here.stage
        here.stage = self._name
        if self._step is not None:
            here.step = self._step
        recorder = _recorder
        if recorder is None or recorder.paused:
            self._start = None
        else:
            self._start = _host_now() if self._kind == "stage" else recorder.clock.mark()
            self._shown = recorder.shown
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        global _failure
        here = _here
        if error is not None:
            # The innermost stage is told, and the first thread that failed: others fail because of it.
            if _failure is None:
                _failure = _Failure(self._name, here.step, here.lane)
            return
        here.stage = self._before
        recorder = _recorder
        if recorder is not None and self._start is not None:
            if self._kind == "stage":
                end = _host_now()
                if not self._shown and not recorder.shown and end - self._start < _LONG_S:
                    return
            else:
                end = recorder.clock.mark()
            step = recorder.step if here.step is None else here.step
            recorder.add(Span(self._name, self._kind, here.lane, step, self._start, end))


def compute(name: str) -> stage:
    """Useful work. Keep it tight: what stands still inside is counted as work."""
    return stage(name, kind="compute")


def mark(*, on_device: bool = True) -> Mark:
    """This moment of the work queued so far, or of the host; None while nothing is recorded."""
    if _recorder is None or _recorder.paused:
        return None
    return _recorder.clock.mark() if on_device else _host_now()


def lag_of(moment: Mark) -> float | None:
    """Seconds by which the device came later to a marked moment than the host; None where that is not known."""
    return None if _recorder is None or moment is None else _recorder.clock.lag_of(moment)


def add(name: str, *, kind: str, start: Mark, end: Mark, arrival: Arrival | None = None) -> None:
    """Record an interval whose ends were marked by hand."""
    recorder = _recorder
    if recorder is not None and start is not None and end is not None:
        step = recorder.step if _here.step is None else _here.step
        recorder.add(Span(name, kind, _here.lane, step, start, end, arrival))


def describe(load: Any) -> None:
    """What the step that is going on has to compute, for those who split its time."""
    if _recorder is not None:
        _recorder.describe(load)


def arrive(name: str | None = None, *, on_device: bool = False) -> Arrival | None:
    """This rank is ready for an exchange, named after the stage it is in unless told.

    Every rank does so once for each exchange; those of one name in the same order everywhere.
    """
    recorder = _recorder
    if recorder is None or recorder.paused:
        return None
    step = recorder.step if _here.step is None else _here.step
    moment = recorder.clock.mark() if on_device else _host_now()
    return Arrival(name or _here.stage, step, moment, next(_serials))


def waited(arrival: Arrival | None, start: Mark, *, on_device: bool = False, over: bool = True) -> None:
    """This rank stood still for an exchange since `start`, and goes on now, though the exchange may not be over."""
    recorder = _recorder
    if recorder is not None and arrival is not None and start is not None:
        end = recorder.clock.mark() if on_device else _host_now()
        recorder.add(Span(arrival.name, "wait", _here.lane, arrival.step, start, end, arrival, over=over))


def have_ready() -> Arrival | None:
    """This thread has something ready for another one, in host time; None while nothing is recorded."""
    recorder = _recorder
    if recorder is None or recorder.paused:
        return None
    return Arrival(_here.lane, recorder.step, _host_now(), -1)


def took_over(ready: Arrival | None, start: Mark) -> None:
    """This thread stood still since `start` for what another one had ready, and goes on with it now."""
    recorder = _recorder
    if recorder is not None and ready is not None:
        end = _host_now()
        start = end if start is None else start  # nothing was recorded then
        recorder.add(Span("take over", "handover", _here.lane, ready.step, start, end, ready))


class exchange:  # noqa: N801  used like a function
    """An exchange that is over when the code inside returns: arrival and wait in one, in host time."""

    __slots__ = ("_arrival", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._arrival = arrive(self._name)

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if self._arrival is not None and error is None:
            waited(self._arrival, self._arrival.mark)


def current_stage() -> tuple[str, int | None]:
    """The stage and step this thread is in, or the stage in which the failure began."""
    return _named(_here.stage, _here.step) if _failure is None else _named(_failure.stage, _failure.step)


def stage_of_main_thread() -> tuple[str, int | None]:
    """The stage and step the main thread is in, asked by another one."""
    where = _main_thread[-1] if _main_thread else {}
    return _named(where.get("stage", _Here.stage), where.get("step"))


def _named(stage: str, step: int | None) -> tuple[str, int | None]:
    """Before the first step nothing is named but the start; after it, what has no name lies between steps."""
    return ("between steps" if stage == _Here.stage and step is not None else stage), step
