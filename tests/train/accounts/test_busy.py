"""Gaps between kernels are host time: held against a device in virtual time, whose every kernel is known."""

from __future__ import annotations

import time

import pytest
import torch

from freescale.balance import MeasuredStep
from freescale.errors import DataError
from freescale.trace import MetricsLog, Span, account_of, device_sentence, host_bound, split_step, total
from freescale.trace.spans import HostClock
from freescale.train.accounts import accounting
from freescale.train.accounts.accounting import AccountedStep
from freescale.train.accounts.busy import BusyTimes, SeenStep, dry_share, is_fed
from freescale.train.accounts.busy_meter import BusyMeter
from freescale.train.accounts.driver_counter import DriverCounter
from freescale.train.accounts.kernel_watch import KernelWatch
from freescale.train.log.reports import busy_fields
from tests.effort import slow
from tests.made_up_device import MadeUpDevice, Program
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks


@pytest.mark.parametrize("idle", [0.05, slow(0.2), 0.5, slow(0.8), 0.95])
def test_idle_time_is_host_time_wherever_it_lies(idle):
    """Before, all of a stretch was compute: host was near 0 however long the device had nothing to run."""
    kernel_us = 100.0
    device = MadeUpDevice(launch=kernel_us * 1e-6 / (1 - idle))
    program = Program(device, kernel_us=kernel_us)
    program.begin()
    program.run(120)
    program.end()
    assert [one.step for one in program.written] == list(range(1, 121))
    host, truth = program.shares(2, 120)
    assert truth > idle - 0.05
    assert host == pytest.approx(truth, abs=0.02)


def test_a_device_that_is_kept_busy_has_no_host_time():
    device = MadeUpDevice(launch=10e-6)
    program = Program(device, kernel_us=200.0)
    program.begin()
    program.run(100)
    program.end()
    host, truth = program.shares(2, 100)
    assert truth < 0.01
    assert host == pytest.approx(truth, abs=0.02)
    assert not any(one.unknown for one in program.written)


def test_twice_the_python_is_twice_the_host_and_the_same_compute():
    found = []
    for launch in (200e-6, 400e-6):
        program = Program(MadeUpDevice(launch=launch), kernel_us=50.0)
        program.begin()
        program.run(100)
        program.end()
        steps = [one.ranks[0] for one in program.written if not one.watched and one.step > 1]
        found.append((sum(s.compute for s in steps) / len(steps), sum(s.host for s in steps) / len(steps)))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05)
    assert found[1][1] > 1.9 * found[0][1]


def test_copies_of_the_next_batch_are_work_also_between_stretches():
    """Before, a step of 1.4 ms with a copy of 50 us beside it was told to be idle for 3 points more than it was."""
    program = Program(MadeUpDevice(launch=5e-6), kernel_us=20.0, idle_ms=1.0, copy_us=100.0)
    program.begin()
    program.run(100)
    program.end()
    host, truth = program.shares(2, 100)
    assert 0.3 < truth < 0.9
    assert host == pytest.approx(truth, abs=0.02)


def test_replays_are_work_from_end_to_end():
    device = MadeUpDevice(launch=300e-6)
    program = Program(device, kernel_us=20.0, replayed=True)
    program.begin()
    program.run(100)
    program.end()
    host, truth = program.shares(2, 100)
    assert truth > 0.2  # the update is still launched kernel by kernel
    assert host == pytest.approx(truth, abs=0.02)


def test_replays_that_begin_after_the_watch_leave_what_was_beside_the_model():
    device = MadeUpDevice(launch=300e-6)
    program = Program(device, kernel_us=20.0)
    program.begin()
    program.run(30)
    program.replayed = True  # recorded by now
    program.run(70)
    program.end()
    assert not any(one.unknown for one in program.written)
    for first, last in ((2, 30), (31, 42), (55, 100)):
        host, truth = program.shares(first, last)
        assert host == pytest.approx(truth, abs=0.02)


def test_lines_wait_until_the_first_watch_is_over_and_watched_steps_are_marked(monkeypatch):
    monkeypatch.setattr(accounting, "_ALONE_S", 0.0)
    program = Program(MadeUpDevice(launch=100e-6), kernel_us=50.0)
    program.begin()
    program.run(19)
    assert program.written == []
    program.run(3)
    assert [one.step for one in program.written] == list(range(1, 22))
    program.run(60)
    program.end()
    watched = [one.step for one in program.written if one.watched]
    # With each step that follows, which begins with a wait for the rank whose watch was read last.
    assert watched == [*range(9, 22), *range(43, 56)]
    assert not any(one.unknown for one in program.written)
    # Their time is in no sum.
    kept = sum(one.ranks[0].total for one in program.written if not one.watched and one.step > 1)
    assert program.accounts.totals[0].total == pytest.approx(kept)


def test_opening_the_watch_belongs_to_no_step():
    program = Program(MadeUpDevice(launch=100e-6), kernel_us=50.0)
    program.begin()
    program.run(60)
    program.end()
    assert program.device.num_watches == 2
    assert max(one.ranks[0].total for one in program.written) < 0.1


def test_another_profiler_later_on_takes_nothing_away():
    """A trace that a user makes at the wrong moment made gaps compute for two thousand steps."""
    program = Program(MadeUpDevice(launch=300e-6), kernel_us=20.0)
    program.begin()
    program.run(30)
    program.device.broken = "another profiler is on"
    program.run(70)
    program.end()
    assert not any(one.unknown for one in program.written)
    assert [text for text in program.told if "another profiler is on; its work is still told" in text]
    host, truth = program.shares(55, 100)
    assert host == pytest.approx(truth, abs=0.01)


@pytest.mark.parametrize("evaluates_at", [3, 8, 9, 10, 15])
def test_an_evaluation_before_the_watch_is_over_only_puts_it_off(evaluates_at):
    program = Program(MadeUpDevice(launch=100e-6), kernel_us=50.0)
    program.begin()
    program.run(evaluates_at)
    program.end()
    assert [one.step for one in program.written] == list(range(1, evaluates_at + 1))
    program.device.now += 5.0
    program.begin()
    for _ in range(60):
        program.take_step()
        if program.step > evaluates_at + 1:
            program.accounts.add(program.step - 1, {})
    program.end()
    host, truth = program.shares(evaluates_at + 1, program.step)
    assert host == pytest.approx(truth, abs=0.02)
    assert not program.written[-1].unknown
    assert bool(program.written[0].unknown) == (evaluates_at < 12)


def test_a_settled_run_is_not_told_by_its_first_steps():
    """Neighbours on a GPU that still compiled made the first steps' kernels shorter: compute was told too small."""
    program = Program(MadeUpDevice(launch=300e-6), kernel_us=20.0)
    program.begin()
    program.run(30)
    program.kernel_us = 26.0
    program.run(70)
    program.end()
    host, truth = program.shares(55, 100)
    assert truth > 0.3
    assert host == pytest.approx(truth, abs=0.01)


def watched_steps(meter, last, *, between=lambda step: None):
    """The steps of a run that are seen; `between` is called after each."""
    meter.begin(1)
    watched = []
    for step in range(1, last + 1):
        watched += [step] if meter.is_open else []
        if meter.closes_after(step):
            meter.close(step, [], [], [])
        if meter.opens_after(step):
            meter.open()
        between(step)
    return watched


def openings(watched):
    """The steps after which the watch was opened."""
    return [step - 1 for step, before in zip(watched, [-1, *watched]) if step != before + 1]


@pytest.mark.parametrize("evaluates_at", [43, 45, 51, 203])
def test_a_watch_that_an_evaluation_cuts_off_is_made_up_for(evaluates_at):
    meter = BusyMeter(watch=MadeUpDevice(launch=1e-4), later=300)

    def evaluate(step):
        if step == evaluates_at:
            if meter.is_open:
                meter.close(step, [], [], [])
            meter.begin(step + 1)

    watched = watched_steps(meter, 400, between=evaluate)
    again = [step for step in watched if evaluates_at < step < evaluates_at + 20]
    assert len(again) == 12
    assert [step for step in watched if step > 250] == list(range(301, 313))


@pytest.mark.parametrize(
    ("last", "watched"),
    [
        (12, []),
        (18, []),
        (19, [*range(9, 19)]),
        (54, [*range(9, 21), *range(43, 54)]),
        (90, [*range(9, 21), *range(43, 55)]),
    ],
)
def test_no_watch_is_opened_that_would_not_be_read(last, watched):
    """It takes as long as any other, and a run that ends inside of it throws it away."""
    meter = BusyMeter(watch=MadeUpDevice(launch=1e-4), last_step=last)

    def check(step):
        assert not meter.holds(step) or step <= meter.known_after < last

    assert watched_steps(meter, last, between=check) == watched
    assert not meter.is_open


def test_an_evaluation_brings_no_watch_that_was_not_due():
    """Neither where the next one would come behind the end of the run, nor where a log has grown meanwhile."""
    meter = BusyMeter(watch=MadeUpDevice(launch=1e-4), last_step=900)

    def evaluate(step):
        if step % 300 == 0:
            meter.last_step = step + 900
            meter.begin(step + 1)

    assert openings(watched_steps(meter, 2_100, between=evaluate)) == [8, 42, 200, 2_000]


def test_watches_are_ever_further_apart():
    """To read one took 0.1 to 0.9 s (H200), as long as some hundred steps of a small model that is replayed."""
    watched = watched_steps(BusyMeter(watch=MadeUpDevice(launch=1e-4)), 200_000)
    wanted = [8, 42, 200, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 192_000]
    assert openings(watched) == wanted


@pytest.mark.parametrize(("reading_s", "told"), [(0.0, False), (0.05, True)])
def test_what_watches_took_is_told_where_it_is_much(reading_s, told):
    device = MadeUpDevice(launch=100e-6)
    read = device.stop
    device.stop = lambda: (time.sleep(reading_s), read())[1]
    program = Program(device, kernel_us=50.0)
    program.begin()
    program.run(60)
    program.end()
    story = program.accounts.watch_story
    assert (story is not None and story.startswith("0.1 s went into seeing some steps")) == told


def test_a_device_that_cannot_be_watched_is_told_once_and_counts_stretches():
    device = MadeUpDevice(launch=200e-6)
    device.broken = "another profiler is on"
    program = Program(device, kernel_us=50.0)
    program.begin()
    program.run(100)
    program.end()
    assert all(one.unknown == (0,) for one in program.written)
    (told,) = program.told
    assert "another profiler is on" in told
    assert "gaps between kernels count as compute" in told


def test_a_run_that_dies_while_it_is_watched_leaves_no_profiler_open():
    program = Program(MadeUpDevice(launch=100e-6), kernel_us=50.0)
    program.begin()
    program.run(12)
    assert program.device.is_watched
    program.accounts.close()
    assert not program.device.is_watched
    assert [one.step for one in program.written] == list(range(1, 12))


def test_another_profiler_is_left_alone():
    watch = KernelWatch(torch.device("cpu"), HostClock())
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(DataError, match="another profiler is on"),
    ):
        watch.start()


def test_a_device_that_becomes_slower_is_not_called_idle():
    device = MadeUpDevice(launch=10e-6)
    program = Program(device, kernel_us=200.0)
    program.begin()
    program.run(60)
    program.kernel_us = 300.0  # throttled, and the host still ahead
    program.run(100)
    program.end()
    host, truth = program.shares(70, 150)
    assert host == pytest.approx(truth, abs=0.02)


def seen(tokens: int, busy_ms: float, stretch_ms: float, *, fed: bool = False) -> SeenStep:
    load = MeasuredStep(num_samples=8, tokens=tokens, squares=float(tokens), ms=0.0)
    return SeenStep(load, stretch_ms, busy_ms, busy_ms, False, fed)


def test_a_contradiction_makes_busy_time_unknown():
    times = BusyTimes()
    times.learn([seen(100 + n, 1.0, 4.0) for n in range(12)])
    load = MeasuredStep(num_samples=8, tokens=105, squares=105.0, ms=0.0)
    lags = [0.003, 0.003]
    found = [times.busy_s(load, 0.004, lags=lags, replayed=False) for _ in range(65)]
    assert found[0] == pytest.approx(0.001, rel=0.01)
    assert found[-1] is None
    assert "the host was ahead in 100% of the steps" in times.problem
    times.learn([seen(100, 3.9, 4.0, fed=True) for n in range(60)])
    assert times.busy_s(load, 0.004, lags=lags, replayed=False) == pytest.approx(0.0039, rel=0.01)


@pytest.mark.parametrize(("busy_ms", "told_ms"), [(3.8, 5.7), (2.8, 2.8)])
def test_only_a_stretch_full_of_work_tells_how_long_the_device_worked(busy_ms, told_ms):
    """A small step was launched at once, and idle for a third: told by its stretch it was 4 points off."""
    times = BusyTimes()
    times.learn([seen(100, busy_ms, 4.0, fed=True) for _ in range(12)])
    for _ in range(200):  # nor is it doubted
        told = times.busy_s(seen(100, 0.0, 0.0).load, 6e-3, lags=[2e-3, 3e-3], replayed=False)
        assert told == pytest.approx(told_ms / 1000)


def test_the_cost_of_samples_is_fitted_to_work_not_to_stretches():
    """Before, a host-bound step of any size cost what its Python cost."""
    times = BusyTimes()
    times.learn([seen(100 * n, 0.01 * n, 12.0) for n in range(1, 13)])
    small, large = (MeasuredStep(8, tokens, float(tokens), 0.0) for tokens in (100, 1200))
    assert times.model_ms(small, 12.0, lags=[5e-6]) == pytest.approx(0.01, rel=0.05)
    assert times.model_ms(large, 12.0, lags=[5e-6]) == pytest.approx(0.12, rel=0.05)
    # A host that is ahead measures the device itself, also one that has become slower.
    assert times.model_ms(large, 0.5, lags=[0.01, 0.01]) == 0.5


def test_few_steps_and_work_that_follows_nothing_are_told():
    times = BusyTimes()
    assert times.busy_s(MeasuredStep(1, 1, 1.0, 0.0), 1.0, lags=[], replayed=False) is None
    times.learn([seen(100, 1.0, 2.0)] * 2)
    assert "fewer than 3" in times.problem
    times = BusyTimes()
    times.learn([seen(100, ms, 12.0) for ms in (1.0, 9.0, 2.0, 11.0, 4.0)])
    assert "does not follow the sizes" in times.problem


def test_lags_tell_dry_from_fed():
    assert dry_share([5e-6, 1e-3], 4e-6) == 0.5
    assert dry_share([], 4e-6) == 0.0
    assert is_fed([2e-3, 3e-3], 0.01)
    assert not is_fed([2e-3, 1e-5], 0.01)
    assert not is_fed([5e-4], 0.01)
    assert not is_fed([], 0.01)


def test_busy_time_is_split_from_gaps_and_never_more_than_its_stretch():
    spans = [Span("a", "compute", "main", 1, 1.0, 5.0), Span("b", "replay", "main", 1, 4.0, 7.0)]
    parts = split_step(0.0, 10.0, spans, busy=lambda stretch, replayed: stretch / replayed)
    assert parts.compute == pytest.approx(3.0 + 1.0)
    assert split_step(0.0, 10.0, spans, busy=lambda stretch, replayed: 99.0).compute == pytest.approx(6.0)
    assert split_step(0.0, 10.0, spans).compute == pytest.approx(6.0)


def test_which_steps_are_watched_follows_from_step_numbers():
    meter = BusyMeter(watch=MadeUpDevice(launch=1e-6))
    meter.begin(1001)  # resumed
    opened = [step for step in range(1001, 1030) if meter.opens_after(step)]
    assert opened == [1008]
    assert meter.holds(1001)
    assert meter.holds(1019)
    assert not meter.holds(1020)


def test_the_driver_is_asked_at_most_once_a_second_and_contradicted_aloud():
    now, told = [0.0], []
    counter = DriverCounter(lambda: lambda: 0.9, say=told.append, clock=lambda: now[0])
    for _ in range(100):
        now[0] += 0.1
        counter.look()
    assert counter.busy == pytest.approx(0.9)
    counter.compare(compute=0.85, host=0.1)
    assert told == []
    counter.compare(compute=0.06, host=0.94)
    counter.compare(compute=0.06, host=0.94)
    assert len(told) == 1
    assert "the driver saw the GPU busy for 90% of the time" in told[0]


@pytest.mark.parametrize(("steps_s", "evaluation_s"), [(0.3, 0.4), (1.1, 0.5), (1.7, 0.3), (5.0, 2.0)])
def test_windows_of_the_driver_that_hold_more_than_steps_are_left_out(steps_s, evaluation_s):
    """Evaluations of a small model were held against accounts that leave them out: "other programs use it"."""
    now, told, busy = [0.0], [], []

    def read():
        """The last window of a second that is over: steps keep the device busy for 90 % of it, evaluations for 20."""
        until = int(now[0])
        window = [share for at, share in busy if until - 1 <= at < until]
        return sum(window) / len(window)

    driver = DriverCounter(lambda: read, say=told.append, clock=lambda: now[0])
    program = Program(MadeUpDevice(launch=1e-6), kernel_us=50.0)
    program.accounts.driver = driver
    for _ in range(40):
        program.accounts.begin(1)
        for _ in range(round(100 * steps_s)):
            now[0] += 0.01
            busy.append((now[0], 0.9))
            driver.look()
        program.accounts.pause()
        for _ in range(round(100 * evaluation_s)):
            now[0] += 0.01
            busy.append((now[0], 0.2))
    assert driver.busy is None or driver.busy == pytest.approx(0.9)
    driver.compare(compute=0.91, host=0.09)
    assert told == []
    if steps_s > 2:
        driver.compare(compute=0.3, host=0.7)
        assert len(told) == 1, "it is compared where there is something to compare"


def test_a_driver_that_cannot_be_asked_is_told_once():
    now, told = [0.0], []
    counter = DriverCounter(lambda: "NVML is not installed", say=told.append, clock=lambda: now[0])
    for _ in range(5):
        now[0] += 2.0
        counter.look()
    assert counter.busy is None
    assert len(told) == 1


def on_rank(rank: int, broken: bool) -> list[AccountedStep]:
    device = MadeUpDevice(launch=200e-6 if rank == 0 else 100e-6)
    device.broken = "no profiler here" if broken and rank == 1 else ""
    program = Program(device, kernel_us=50.0, ranks=these_ranks(), every=10)
    program.begin()
    program.run(60)
    program.end()
    return program.written


@pytest.mark.parametrize("broken", [False, True])
def test_all_ranks_hold_their_lines_together_and_the_first_knows_of_all(broken):
    written, _ = run_on_ranks(on_rank, 2, broken)
    assert [one.step for one in written] == list(range(1, 61))
    assert all(len(one.ranks) == 2 for one in written)
    assert written[-1].unknown == ((1,) if broken else ())
    usual = [one for one in written if one.step > 20 and not one.watched]
    slow, quick = (total(one.ranks[rank] for one in usual).share("host") for rank in range(2))
    assert slow == pytest.approx(0.75, abs=0.05)
    assert quick == pytest.approx(0.0 if broken else 0.5, abs=0.06)


def test_a_line_says_what_is_known_of_its_busy_time():
    step = AccountedStep(7, {}, dry=0.98765, unknown=(2, 3), watched=True)
    assert busy_fields(step) == {"dry": 0.9877, "busy_unknown": [2, 3], "watched": True}
    assert busy_fields(AccountedStep(7, {})) == {}


def line(step: int, *, host: float, ms: float = 10.0, **others: object) -> dict[str, object]:
    shares = {"bubble": host, "straggler": 0.0, "comm": 0.0, "host": host}
    return {"event": "step", "step": step, "step_ms": ms, **shares, **others}


def test_watched_steps_are_in_no_account_and_a_host_that_binds_is_told():
    steps = [
        line(1, host=0.1, dry=1.0),
        line(2, host=0.8, dry=1.0),
        line(3, host=0.99, ms=90.0, dry=1.0, watched=True),
    ]
    account = account_of(steps)
    assert account is not None
    assert (account.num_steps, account.bubble) == (1, pytest.approx(0.8))
    said = device_sentence(MetricsLog(steps=steps), account)
    assert said.startswith(
        "Bound by its host: the GPU had nothing to run for 80% of the time. 5 times the batch"
    )
    unknown = [line(n, host=0.1, dry=0.0, busy_unknown=[0]) for n in range(1, 4)]
    account = account_of(unknown)
    assert account is not None
    assert "unknown" in device_sentence(MetricsLog(steps=unknown), account)
    assert host_bound(0.1) == ""


def test_a_run_on_cpus_is_told_nothing_of_gpus():
    steps = [line(n, host=0.9) for n in range(1, 4)]
    account = account_of(steps)
    assert account is not None
    assert device_sentence(MetricsLog(steps=steps), account) == ""
