"""Recording: names for errors, spans of every thread, moments that pass later, and bounds."""

from __future__ import annotations

import threading
import time

import pytest

from freescale.trace import spans, stages
from freescale.trace.spans import Recorder
from freescale.trace.stages import add, arrive, compute, current_stage, exchange, mark, stage, waited

pytestmark = pytest.mark.timed


@pytest.fixture
def recorder():
    made = Recorder()
    made.begin(1)
    stages.record_into(made)
    yield made
    stages.record_into(None)


class LateClock:
    """Marks pass when the test says so, as those of a GPU do."""

    lag = 1

    def __init__(self) -> None:
        self.passed = 0
        self.marked = 0

    def mark(self):
        self.marked += 1
        return [self.marked]

    def read(self, mark):
        if not isinstance(mark, list):
            return float(mark)
        return float(mark[0]) if mark[0] <= self.passed else None

    def lag_of(self, mark):
        return None

    def wait_for_marks(self):
        self.passed = self.marked


def test_stages_are_recorded_with_thread_step_and_kind(recorder):
    def fetch() -> None:
        with stage("fetch rows", step=8):
            pass

    with stage("train", step=7):
        with compute("forward"):
            time.sleep(0.002)
        thread = threading.Thread(target=fetch, name="communication")
        thread.start()
        thread.join()
        with stage("update"):
            pass
    taken = recorder.take()
    assert [(s.name, s.kind, s.lane, s.step) for s in taken] == [
        ("forward", "compute", "main", 7),
        ("fetch rows", "stage", "communication", 8),
        ("update", "stage", "main", 7),
        ("train", "stage", "main", 7),
    ]
    assert 0.002 <= taken[0].end - taken[0].start < 0.5
    assert recorder.take() == []


def test_the_innermost_stage_of_the_first_failure_is_told():
    def fail() -> None:
        with pytest.raises(ValueError, match="gone"), stage("fetch rows", step=8):
            raise ValueError("gone")

    with pytest.raises(KeyError), stage("train", step=7), stage("update"):
        raise KeyError
    assert current_stage() == ("update", 7)
    with stage("train", step=9):  # this thread went on, so that error is history
        assert current_stage() == ("train", 9)
        thread = threading.Thread(target=fail, name="communication")
        thread.start()
        thread.join()
        assert current_stage() == ("fetch rows", 8)
    with stage("evaluate"):
        assert current_stage() == ("fetch rows", 8)
    stages._failure = None


def test_exchanges_say_when_this_rank_was_ready(recorder):
    with stage("exchange ids"):
        arrival = arrive()
        start = mark(on_device=False)
        waited(arrival, start)
    with exchange("sum"):
        time.sleep(0.001)
    ids, _, total = recorder.take()
    assert ids.arrival is not None
    assert ids.arrival.name == "exchange ids"
    assert ids.arrival.mark <= ids.start <= ids.end
    assert total.arrival.serial > ids.arrival.serial
    assert total.end - total.start >= 0.001


def test_nothing_is_recorded_while_paused_or_off(recorder):
    recorder.pause()
    with compute("x"), exchange("y"):
        add("z", kind="compute", start=1.0, end=2.0)
    assert mark() is None
    assert arrive("y") is None
    assert recorder.take() == []
    stages.record_into(None)
    with compute("x"):
        pass
    assert mark() is None


def test_a_failed_exchange_records_no_wait(recorder):
    with pytest.raises(OSError, match="gone"), exchange("sum"):
        raise OSError("gone")
    assert recorder.take() == []


def test_marks_of_a_device_are_read_once_they_have_passed():
    clock = LateClock()
    recorder = Recorder(clock)
    recorder.begin(1)
    stages.record_into(recorder)
    try:
        with compute("forward"):
            pass
        waited(arrive("rows", on_device=True), mark(), on_device=True)
        recorder.end_step()
        # Marks so far: begin 1, forward 2 and 3, arrival 4, start of the wait 5, its end 6, end of the step 7.
        clock.passed = 3
        assert [s.name for s in recorder.take()] == ["forward"]
        assert recorder.ended_steps() == []
        clock.passed = 7
        assert recorder.ended_steps() == [(1, 1.0, 7.0)]
        (wait,) = recorder.take()
        assert (wait.arrival.mark, wait.start, wait.end) == (4.0, 5.0, 6.0)
    finally:
        stages.record_into(None)


def test_memory_is_bounded_and_what_is_dropped_is_told_once(monkeypatch):
    monkeypatch.setattr(spans, "MAX_PENDING", 10)
    told = []
    recorder = Recorder(say=told.append)
    stages.record_into(recorder)
    try:
        recorder.begin(1)
        for count, dropped, words in ((10, 0, 0), (15, 15, 1), (5, 20, 1)):
            for _ in range(count):
                with stage("x"):
                    pass
            recorder.end_step()
            assert (recorder.num_dropped, len(told)) == (dropped, words)
        assert len(recorder.take()) == 10
        assert "run.log_every" in told[0]
    finally:
        stages.record_into(None)


def test_recording_costs_a_few_microseconds(recorder):
    def seconds_of(num_spans: int) -> float:
        begin = time.thread_time()
        for _ in range(num_spans):
            with stage("x"):
                pass
        seconds = time.thread_time() - begin
        recorder.take()
        return seconds

    # 1.5 us on a quiet core; the bound only catches a change of kind, such as a file or a print in each span.
    # The best of many short tries: a busy machine may slow any one of them by a hundred times.
    assert min(seconds_of(100) for _ in range(50)) / 100 < 50e-6


def test_stages_need_no_reading_of_the_clock():
    class Unread(LateClock):
        def read(self, mark):
            assert isinstance(mark, list), "a stage has its times"
            return super().read(mark)

    recorder = Recorder(Unread())
    stages.record_into(recorder)
    try:
        recorder.begin(1)
        with stage("load"), compute("forward"):
            pass
        assert [span.name for span in recorder.take()] == ["load"]
        recorder.clock.wait_for_marks()
        assert [span.name for span in recorder.take()] == ["forward"]
    finally:
        stages.record_into(None)


def test_short_stages_of_steps_that_no_timeline_shows_are_not_kept():
    recorder = Recorder(shows=lambda step: step in (3, 4))
    stages.record_into(recorder)
    try:
        recorder.begin(1)
        for step in range(1, 9):
            with stage("short", step=step):
                pass
            if step == 7:
                with stage("long"):
                    time.sleep(0.02)
            with compute("work"):
                pass
            recorder.end_step()
        spans = recorder.take()
    finally:
        stages.record_into(None)
    # The first step is shown, since nothing is known of it; the one behind the last one shown may still be seen.
    assert [span.step for span in spans if span.name == "short"] == [1, 3, 4, 5]
    assert [span.name for span in spans if span.step == 7] == ["long", "work"]
    assert len([span for span in spans if span.name == "work"]) == 8
