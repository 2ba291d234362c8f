"""Where the time goes, held against programs whose waits are known."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.transport import Pending
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.traced import TracedTransport
from freescale.comm.world.clocks import SharedClock
from freescale.trace.bubbles import CAUSES, Parts, slowest, total
from freescale.trace.spans import HostClock, Recorder
from freescale.trace.stages import compute, exchange, record_into, stage
from freescale.train.accounts import accounting
from freescale.train.accounts.accounting import AccountedStep, Accounts
from freescale.train.accounts.stalls import Stalls
from freescale.train.loop import train
from tests.machine import Stolen
from tests.ranks import run_on_ranks
from tests.small_run import make_run, these_ranks, train_small

pytestmark = pytest.mark.timed
STEPS = 12


class ThrottledLink:
    """A transport whose transfers end `delay` after everybody has begun."""

    name, engine, sm_free, reason = "throttled", "sockets", True, "a test"

    def __init__(self, delay: float) -> None:
        self._inner = SocketTransport(dist.group.WORLD)
        self.rank, self.num_ranks = self._inner.rank, self._inner.num_ranks
        self._delay = delay

    def start(self, tensor, *, send, receive) -> Pending:
        pending = self._inner.start(tensor, send=send, receive=receive)
        delay = self._delay

        class Slow:
            def wait(self):
                arrived = pending.wait()
                time.sleep(delay)
                return arrived

        return Slow()

    def exchange_counts(self, counts):
        return exchange_counts(self._inner, counts)


def sleep(seconds: float) -> float:
    """Sleep, and say how long it was: on a busy machine longer than asked for."""
    begin = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - begin


def program(rank: int, *, late: float = 0.0, link: float = 0.0, host: float = 0.0, every: int = 1000):
    """STEPS steps of 30 ms of work; rank 1 works longer by `late`, every exchange takes `link`, hosts dawdle."""
    ranks = these_ranks()
    accounted: list[AccountedStep] = []
    clock = SharedClock(ranks)
    recorder = Recorder(HostClock())
    record_into(recorder)
    accounts = Accounts(ranks=ranks, recorder=recorder, write=accounted.append, every=every, clock=clock)
    transport = TracedTransport(ThrottledLink(link))
    ones = [1] * ranks.num_ranks
    stamps: dict[str, list[float]] = {"host": [], "arrival": [], "end": []}
    accounts.begin(1)
    for step in range(1, STEPS + 1):
        with stage("train", step=step):
            stamps["host"].append(sleep(host))
            with compute("work"):
                time.sleep(0.03 + (late if rank == 1 else 0.0))
            with stage("exchange rows"):
                stamps["arrival"].append(time.monotonic())
                transport.start(torch.ones(ranks.num_ranks), send=ones, receive=ones).wait()
                stamps["end"].append(time.monotonic())
        accounts.end_step()
        accounts.add(step, {"n": step})
    accounts.pause()
    accounts.close()
    record_into(None)
    return accounted, stamps


def total_of(accounted: list[AccountedStep], rank: int | None = None) -> Parts:
    """All steps but the first, which opens connections, and the second, in which the ranks compare notes."""
    steps = accounted[2:]
    return total(one for step in steps for one in (step.ranks if rank is None else [step.ranks[rank]]))


def truth_of(cause: str, stamps: list[dict[str, list[float]]]) -> float:
    """Seconds of both ranks in the same steps, from the program's own stamps; the ranks share a clock."""
    if cause == "host":
        return sum(sum(one["host"][2:]) for one in stamps)
    last = [max(pair) for pair in zip(*(one["arrival"][2:] for one in stamps))]
    if cause == "straggler":
        return sum(late - own for one in stamps for late, own in zip(last, one["arrival"][2:]))
    return sum(end - late for one in stamps for late, end in zip(last, one["end"][2:]))


CASES = {
    "sleep on one rank": ({"late": 0.06}, "straggler"),
    "throttled link": ({"link": 0.03}, "comm"),
    "slow host": ({"host": 0.03}, "host"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_found_within_five_percent(name):
    options, cause = CASES[name]
    # A busy machine may stop a rank between two stamps of the same moment: of eight tries, one must be quiet.
    for _ in range(8):
        everybody = run_on_ranks(_run, 2, options)
        accounted, stamps = everybody[0][0], [stamps for _, stamps in everybody]
        assert [step.step for step in accounted] == list(range(1, STEPS + 1))
        total = total_of(accounted)
        assert total.compute + sum(getattr(total, c) for c in CAUSES) == pytest.approx(total.total, rel=1e-9)
        found, truth = getattr(total, cause), truth_of(cause, stamps)
        if abs(found / truth - 1) < 0.05:
            return
    raise AssertionError(f"{cause}: found {found:.3f} s, truth {truth:.3f} s, {total}")


def _run(rank, options):
    return program(rank, **options)


def test_who_is_waited_for_is_named():
    for _ in range(8):
        accounted, _ = run_on_ranks(_run, 2, {"late": 0.06})[0]
        late = slowest([total_of(accounted, rank) for rank in range(2)])
        if (late.rank, late.cause) == (1, "compute") and late.excess == pytest.approx(0.03 / 0.09, abs=0.1):
            return
    raise AssertionError(late)


class SlowWire:
    """Two ranks whose messages need `delay` from one to the other; nobody waits for anybody before it has sent."""

    name, engine, sm_free, reason = "slow wire", "sockets", True, "a test"

    def __init__(self, delay: float) -> None:
        self._inner = SocketTransport(dist.group.WORLD)
        self.rank, self.num_ranks = self._inner.rank, self._inner.num_ranks
        self._delay = delay

    def start(self, tensor, *, send, receive) -> Pending:
        sent = torch.full((2,), time.monotonic(), dtype=torch.float64)
        pending = self._inner.start(sent, send=[1, 1], receive=[1, 1])
        rank, delay = self.rank, self._delay

        class OnItsWay:
            def wait(self):
                left = float(pending.wait()[1 - rank])
                time.sleep(max(0.0, left + delay - time.monotonic()))
                return tensor

        return OnItsWay()


def ping_pong(rank: int, delay: float) -> tuple[list[AccountedStep], list[tuple[float, float]]]:
    """Steps of ten exchanges over a slow wire, and when each began and ended; rank 1 is late to one of the ten."""
    ranks = these_ranks()
    accounted: list[AccountedStep] = []
    recorder = Recorder(HostClock())
    record_into(recorder)
    accounts = Accounts(ranks=ranks, recorder=recorder, write=accounted.append, every=1000)
    transport = TracedTransport(SlowWire(delay))
    stamps = []
    accounts.begin(1)
    for step in range(1, 7):
        with stage("train", step=step):
            time.sleep(delay / 2 if rank == 1 else 0.0)
            for _ in range(10):
                with stage("exchange rows"):
                    began = time.monotonic()
                    transport.start(torch.ones(2), send=[1, 1], receive=[1, 1]).wait()
                    stamps.append((began, time.monotonic()))
        accounts.end_step()
        accounts.add(step, {})
    accounts.pause()
    record_into(None)
    return accounted, stamps[10:]


def late_by(stamps: list[list[tuple[float, float]]], *, own_work: bool) -> float:
    """How long both ranks stood where the other had not begun; only while it was at its own work, or always."""
    seconds = 0.0
    for mine, others in (stamps, stamps[::-1]):
        for (_, free), (came, _), (began, _) in zip(others, others[1:], mine[1:]):
            seconds += max(0.0, came - (max(began, free) if own_work else began))
    return seconds


def test_a_rank_that_the_wire_has_held_is_no_straggler():
    for _ in range(6):
        (accounted, mine), (_, others) = run_on_ranks(ping_pong, 2, 0.02)
        found = total(parts for step in accounted[1:] for parts in step.ranks)
        truth, seen = (late_by([mine, others], own_work=only) for only in (True, False))
        # One late start makes the ranks take turns at being late, for as long as nothing else disturbs them.
        if seen - truth > 0.1 * found.total and abs(found.straggler - truth) < 0.03 * found.total:
            return
    raise AssertionError(
        f"{found}, waited for a rank at its own work {truth:.3f} s, for any rank {seen:.3f} s"
    )


class WorkingLink(ThrottledLink):
    """A transport whose bytes move only while both ranks have worked for `delay` inside the exchange."""

    def start(self, tensor, *, send, receive) -> Pending:
        inner, delay = self._inner, self._delay

        class Moving:
            def wait(self):
                time.sleep(delay)
                return inner.start(tensor, send=send, receive=receive).wait()

        return Moving()


def stopped_inside(rank: int, stop_s: float) -> list[AccountedStep]:
    """Four steps of one exchange; in the third, rank 0 stops rank 1 when both are inside it."""
    ranks = these_ranks()
    accounted: list[AccountedStep] = []
    recorder = Recorder(HostClock())
    record_into(recorder)
    accounts = Accounts(ranks=ranks, recorder=recorder, write=accounted.append, every=1000, stalls=Stalls())
    transport = TracedTransport(WorkingLink(0.1))
    everybody = [0, 0]
    dist.all_gather_object(everybody, os.getpid())
    exchange_counts(transport.inner._inner, torch.zeros(2, dtype=torch.int64))

    def stop() -> None:
        time.sleep(0.05)
        os.kill(everybody[1], signal.SIGSTOP)
        time.sleep(stop_s)
        os.kill(everybody[1], signal.SIGCONT)

    accounts.begin(1)
    for step in range(1, 5):
        with stage("train", step=step):
            if rank == 0 and step == 3:
                threading.Thread(target=stop).start()
            with stage("exchange rows"):
                transport.start(torch.ones(2), send=[1, 1], receive=[1, 1]).wait()
        accounts.end_step()
        accounts.add(step, {})
    accounts.pause()
    record_into(None)
    return accounted


def test_a_rank_that_stands_still_inside_an_exchange_is_who_is_waited_for():
    stolen = Stolen()
    for _ in range(8):
        accounted = run_on_ranks(stopped_inside, 2, 0.5)[0]
        first, second = accounted[2].ranks
        others = total(part for step in (accounted[1], accounted[3]) for part in step.ranks)
        if (
            0.4 < first.straggler < 0.6
            and 0.4 < second.host < 0.6
            and max(first.comm, second.comm) < 0.2
            and others.straggler < 0.1 * others.comm
        ):
            late = slowest(accounted[2].ranks)
            assert (late.rank, late.cause) == (1, "host")
            return
    if stolen.share() > 0.2:
        pytest.skip(f"the host took {stolen.share():.0%} of the cores: no rank keeps a time of 0.1 s")
    raise AssertionError(accounted)


class ShiftedClock:
    """A machine whose monotonic clock stands elsewhere."""

    def __init__(self, shift: float) -> None:
        self._shift = shift

    def __call__(self) -> float:
        return time.monotonic() + self._shift


def measured_offset(rank: int, shift: float) -> tuple[float, float, float]:
    clock = ShiftedClock(shift if rank else 0.0)
    shared = SharedClock(these_ranks(), clock=clock, machine=f"machine {rank}")
    shared.measure(rounds=4)
    return shared.offset, shared.error, shared.origin


def test_clocks_of_other_machines_are_brought_into_line():
    first, second = run_on_ranks(measured_offset, 2, 123.456)
    assert first[0] == 0.0
    assert second[0] == pytest.approx(-123.456, abs=max(1e-3, second[1]))
    assert 0 < second[1] < 0.05
    assert first[2] == second[2]  # one time zero for all


def one_machine(rank: int) -> float:
    return SharedClock(these_ranks()).offset


def test_ranks_of_one_machine_share_its_clock():
    assert run_on_ranks(one_machine, 2) == [0.0, 0.0]


def lopsided(rank: int) -> list[AccountedStep]:
    """Ranks that have seen different exchanges when they compare: a background one that only rank 0 has finished."""
    ranks = these_ranks()
    accounted: list[AccountedStep] = []
    recorder = Recorder()
    record_into(recorder)
    accounts = Accounts(ranks=ranks, recorder=recorder, write=accounted.append, every=2)
    accounts.begin(1)
    for step in (1, 2):
        with stage("train", step=step):
            if rank == 0:
                with exchange("only here"):
                    pass
            time.sleep(0.03 * rank)
            with exchange("both"):
                ranks.barrier()
        accounts.end_step()
        accounts.add(step, {})
    accounts.pause()
    record_into(None)
    return accounted


def test_ranks_with_different_exchanges_still_find_the_common_ones():
    for _ in range(8):
        first, second = run_on_ranks(lopsided, 2)[0][1].ranks
        if 0.025 < first.straggler < 0.2 and second.straggler < first.straggler / 2:
            return
    raise AssertionError((first, second))


class SlowDevice:
    """A clock whose marks pass only when asked twice, as those of a GPU that is behind."""

    lag = 1

    def mark(self):
        return [time.monotonic(), False]

    def read(self, mark):
        if isinstance(mark, float):
            return mark
        passed, mark[1] = mark[1], True
        return mark[0] if passed else None

    def lag_of(self, mark):
        return None

    def wait_for_marks(self):
        pass


def test_lines_wait_until_their_step_has_passed_on_the_device(monkeypatch):
    monkeypatch.setattr(accounting, "_ALONE_S", 0.0)
    written: list[AccountedStep] = []
    recorder = Recorder(SlowDevice())
    ranks = these_ranks()
    accounts = Accounts(ranks=ranks, recorder=recorder, write=written.append)
    accounts.begin(1)
    for step in range(1, 6):
        accounts.end_step()
        accounts.add(step, {"n": step})
    assert 0 < len(written) < 5
    for _ in range(4):
        accounts.pause()
        recorder.paused = False
    assert [step.step for step in written] == [1, 2, 3, 4, 5]
    assert all(len(step.ranks) == 1 for step in written)


def test_a_rank_alone_accounts_for_short_steps_together_and_for_long_ones_at_once():
    written: list[AccountedStep] = []
    accounts = Accounts(ranks=these_ranks(), recorder=Recorder(), write=written.append, every=10)

    def take(first: int, last: int, seconds: float = 0.0) -> list[int]:
        for step in range(first, last + 1):
            time.sleep(seconds)
            accounts.end_step()
            accounts.add(step, {})
        return [one.step for one in written]

    accounts.begin(1)
    accounts._accounted_at = time.monotonic() + 60  # however slow this machine is
    assert take(1, 9) == []
    assert take(10, 10) == list(range(1, 11))
    accounts._accounted_at = time.monotonic()
    assert take(11, 11, seconds=0.12) == list(range(1, 12))
    accounts._accounted_at = time.monotonic() + 60
    take(12, 14)
    accounts.pause()
    assert [one.step for one in written] == list(range(1, 15))
    assert all(len(one.ranks) == 1 for one in written)


def test_a_run_that_dies_still_writes_its_lines():
    written: list[AccountedStep] = []
    recorder = Recorder(SlowDevice())  # which has not come to the end of the step
    accounts = Accounts(ranks=these_ranks(), recorder=recorder, write=written.append)
    accounts.begin(1)
    accounts.end_step()
    accounts._held.append(AccountedStep(1, {"loss": 3.0}, seconds=0.5))
    accounts.close()
    assert [(step.line, step.ranks, step.seconds) for step in written] == [({"loss": 3.0}, (), 0.5)]


def test_a_rank_alone_that_dies_still_tells_where_the_time_of_its_steps_went():
    written: list[AccountedStep] = []
    accounts = Accounts(ranks=these_ranks(), recorder=Recorder(), write=written.append, every=100)
    accounts.begin(1)
    accounts._accounted_at = time.monotonic() + 60
    for step in range(1, 8):
        accounts.end_step()
        accounts.add(step, {})
    assert written == []
    accounts.close()
    assert [(one.step, len(one.ranks)) for one in written] == [(step, 1) for step in range(1, 8)]


def small(rank: int, overrides: list[str], folder: str):
    run, recorder = make_run(overrides, folder)
    train(run, resume_from=None)
    return recorder.events


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_step_line_of_a_run_has_parts_that_add_up(num_ranks, tmp_path):
    overrides = ["run.steps=12", "run.log_every=5", "run.eval_every=6"]
    alone = num_ranks == 1
    events = (
        small(0, overrides, str(tmp_path))
        if alone
        else run_on_ranks(small, num_ranks, overrides, str(tmp_path))[0]
    )
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    for event in steps:
        assert 0 <= event["bubble"] <= 1
        assert event["straggler"] + event["comm"] + event["host"] == pytest.approx(event["bubble"], abs=1e-9)
        assert event["step_ms"] > 0
        assert event["imbalance_in_turn"] >= 1
        if alone:
            assert event["straggler"] == event["comm"] == 0
    # Lines come before the evaluation that follows their step.
    kinds = [(event["event"], event["step"]) for event in events if event["event"] in ("step", "eval")]
    assert kinds.index(("step", 6)) < kinds.index(("eval", 6)) < kinds.index(("step", 7))
    ranks = [event for event in events if event["event"] == "ranks"][-1]
    assert len(ranks["total"]) == num_ranks
    total = [sum(ranks[name][0] for name in ("compute", "straggler", "comm", "host")), ranks["total"][0]]
    assert total[0] == pytest.approx(total[1], rel=1e-4)


def test_accounting_changes_no_bit_of_the_training():
    runs = [train_small(["run.steps=6", f"trace.enabled={on}"]) for on in ("true", "false")]
    assert runs[0]["losses"] == runs[1]["losses"]
    for name, value in runs[0]["tensors"].items():
        assert (value == runs[1]["tensors"][name]).all()


def test_without_accounting_steps_still_have_a_time(tmp_path):
    events = small(0, ["run.steps=3", "trace.enabled=false"], str(tmp_path))
    steps = [event for event in events if event["event"] == "step"]
    assert [event["bubble"] for event in steps] == [None] * 3
    assert all(event["step_ms"] > 0 and event["tokens_per_s"] > 0 for event in steps)


def with_a_slow_model(rank: int, folder: str):
    """A real run whose model takes 60 ms longer on rank 1; the first exchange after it is that of dense gradients."""
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # between machines, rows are waited for first
    run, recorder = make_run(["run.steps=8", "run.log_every=4"], folder)
    if rank == 1:
        run.state.model.register_forward_pre_hook(
            lambda *_: time.sleep(0.06) if run.state.model.training else None
        )
    seen = []
    add = run.accounts.recorder.add
    run.accounts.recorder.add = lambda span: (seen.append(span), add(span))
    train(run, resume_from=None)
    record_into(None)
    waits = [span.end - span.start for span in seen if span.name == "sum dense gradients"]
    return recorder.events, waits


def test_exposed_sums_of_dense_gradients_are_waits_not_work(tmp_path):
    for attempt in range(4):  # a busy machine may hold rank 0 up in several steps
        (events, waits), (_, others) = run_on_ranks(with_a_slow_model, 2, str(tmp_path / str(attempt)))
        assert len(waits) == len(others) == 8
        steps = [event for event in events if event["event"] == "step"][1:]
        totals = [event for event in events if event["event"] == "ranks"][-1]
        # Rank 0 stands there in nearly every step while rank 1 computes.
        if (
            sorted(waits)[3] > 0.03
            and totals["straggler"][0] > 4 * 0.05
            and totals["straggler"][0] > 2 * totals["straggler"][1]
            and totals["compute"][1] > totals["compute"][0]
            and sum((event["slowest"], event["slowest_by"]) == (1, "compute") for event in steps) >= 4
        ):
            return
    raise AssertionError((waits, totals, steps))
