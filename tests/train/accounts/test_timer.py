"""The compute time of a step leaves out what it stood still for in its middle."""

from __future__ import annotations

import time

import pytest
import torch

from freescale.balance import MeasuredStep
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.trace.spans import Recorder
from freescale.trace.stages import record_into
from freescale.train.accounts import cuda_clock
from freescale.train.accounts import timer as timer_module
from freescale.train.accounts.busy import BusyTimes, SeenStep
from freescale.train.accounts.cuda_clock import CudaClock
from freescale.train.accounts.timer import StepTimer


def test_exchanges_inside_a_step_are_not_its_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])
    timer = StepTimer(torch.device("cpu"))
    batch = SequenceBatch.from_sequences([{"item": torch.zeros(5)}])
    for stood in (0.0, 3.0):
        rows = torch.ones(2, requires_grad=True)
        timer.start(rows)
        now[0] += 1
        with timer.standing_still():
            now[0] += stood
        now[0] += 0.5
        rows.sum().backward()
        now[0] += 10  # waiting for the dense gradients of others
        timer.finish(batch)
    assert [step.ms for step in timer.take()] == pytest.approx([1500.0, 1500.0])
    assert timer.take() == []


def test_a_padded_batch_is_measured_by_the_moments_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])
    timer = StepTimer(torch.device("cpu"))
    recorder, described = Recorder(), []
    monkeypatch.setattr(recorder, "describe", described.append)
    recorder.begin(1)
    record_into(recorder)
    with timer.padded(SequenceBatch.from_sequences([{"item": torch.zeros(5)}]), num_tokens=64):
        now[0] += 2.0
    record_into(None)
    assert timer.pads == 59 / 5
    assert [load.tokens for load in described] == [64], "the device works on pads, too"
    (step,) = timer.take()
    assert (step.tokens, step.ms) == (5, pytest.approx(2000.0))
    assert [(span.name, span.kind) for span in recorder.take()] == [("forward and backward", "compute")]


def test_busy_time_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, all between two events was the cost of a batch, however long its host had kept the device waiting."""
    now = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])
    timer = StepTimer(torch.device("cpu"))
    timer.busy = BusyTimes()
    load = MeasuredStep(num_samples=1, tokens=5, squares=25.0, ms=0.0)
    timer.busy.learn(
        [SeenStep(load._replace(tokens=n), 1500.0, 100.0 * n, 100.0 * n, False, False) for n in range(1, 13)]
    )
    batch = SequenceBatch.from_sequences([{"item": torch.zeros(5)}])
    rows = torch.ones(2, requires_grad=True)
    timer.start(rows)
    now[0] += 1.5
    rows.sum().backward()
    timer.finish(batch)
    (step,) = timer.take()
    assert step.ms == pytest.approx(500.0, rel=0.05)


def test_one_event_serves_the_recorder_and_the_cost_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a moment was recorded twice: once as a span's end, once for what the batch costs."""
    device = [0.0]

    class Event:
        made = 0

        def __init__(self, **_: object) -> None:
            Event.made += 1
            self.at = float("inf")

        def record(self, stream: object = None) -> None:
            self.at = device[0]

        def query(self) -> bool:
            return self.at <= device[0] - 1.0

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_clock, "current_stream", lambda device: None)
    recorder, timer = Recorder(CudaClock(torch.device("cuda", 0))), StepTimer(torch.device("cuda", 0))
    batch = SequenceBatch.from_sequences([{"item": torch.zeros(5)}])
    recorder.begin(1)
    record_into(recorder)
    try:
        before = Event.made
        time.sleep(0.005)  # the clock is told that it was late by so much when it reads what comes now
        with timer.padded(batch, num_tokens=8):
            device[0] += 0.25
        assert Event.made - before == 2
        assert timer.take() == [], "the device is not there yet"
        device[0] += 2.0
        assert [step.ms for step in timer.take()] == pytest.approx([250.0], abs=1e-3)
        (span,) = recorder.take()
        assert span.end - span.start == pytest.approx(0.25, abs=1e-6)
        with timer.padded(batch, num_tokens=8):
            recorder.pause()
        device[0] += 2.0
        assert timer.take() == [], "its two moments are of two clocks"
    finally:
        record_into(None)
    with timer.padded(batch, num_tokens=8):  # nobody records any more
        device[0] += 0.5
    device[0] += 2.0
    assert [step.ms for step in timer.take()] == pytest.approx([500.0])
