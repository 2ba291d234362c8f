"""Where the time goes, held against programs whose waits are known."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm.clocks import SharedClock
from freescale.comm.local_sockets import LocalTransport
from freescale.comm.transport import Pending
from freescale.comm.watched import WatchedTransport
from freescale.trace.bubbles import Parts, add_up
from freescale.trace.spans import HostClock, Recorder, compute, record_into, stage
from freescale.train.accounting import AccountedStep, Accounts
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

STEPS = 12


class ThrottledLink:
    """A transport whose transfers end `delay` after everybody has begun."""

    name, rank, num_ranks = "throttled", 0, 1

    def __init__(self, delay: float) -> None:
        self._inner = LocalTransport(dist.group.WORLD)
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
        return self._inner.exchange_counts(counts)


def work(seconds: float) -> None:
    with compute("work"):
        time.sleep(seconds)


def program(rank: int, *, late: float = 0.0, link: float = 0.0, host: float = 0.0, every: int = 4, skew=None):
    """STEPS steps of 30 ms of work; rank 1 works longer by `late`, every exchange takes `link`, hosts dawdle."""
    ranks = these_ranks()
    accounted: list[AccountedStep] = []
    clock = SharedClock(ranks)
    recorder = Recorder(HostClock())
    record_into(recorder)
    accounts = Accounts(ranks=ranks, recorder=recorder, write=accounted.append, every=every, clock=clock)
    transport = WatchedTransport(ThrottledLink(link))
    accounts.begin(1)
    for step in range(1, STEPS + 1):
        with stage("train", step=step):
            time.sleep(host)
            work(0.03 + (late if rank == 1 else 0.0))
            with stage("exchange rows"):
                ones = [1] * ranks.num_ranks
                transport.start(torch.ones(ranks.num_ranks), send=ones, receive=ones).wait()
        accounts.end_step()
        accounts.add(step, {"n": step})
    accounts.pause()
    accounts.close()
    record_into(None)
    return accounted


def total_of(accounted: list[AccountedStep], rank: int | None = None) -> Parts:
    """All steps but the first, which opens connections."""
    steps = accounted[1:]
    return add_up(one for step in steps for one in (step.ranks if rank is None else [step.ranks[rank]]))


CASES = {
    "sleep on one rank": ({"late": 0.06}, "straggler", 0.06 / 2),
    "throttled link": ({"link": 0.03}, "comm", 0.03),
    "slow host": ({"host": 0.03}, "host", 0.03),
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_found_within_five_percent(name):
    options, cause, seconds_a_step = CASES[name]
    # A busy machine adds waits of its own: of three tries, one must be quiet enough to show the truth.
    for _attempt in range(3):
        everybody = run_on_ranks(_run, 2, options)
        accounted = everybody[0]
        assert [step.step for step in accounted] == list(range(1, STEPS + 1))
        total = total_of(accounted)
        found = getattr(total, cause) / (2 * (STEPS - 1))
        others = {
            c: getattr(total, c) / (2 * (STEPS - 1)) for c in ("straggler", "comm", "host") if c != cause
        }
        assert total.compute + total.straggler + total.comm + total.host == pytest.approx(
            total.total, rel=1e-9
        )
        if abs(found / seconds_a_step - 1) < 0.05 and max(others.values()) < 0.1 * seconds_a_step:
            return
    raise AssertionError(
        f"{cause}: {1000 * found:.2f} ms a step, truth {1000 * seconds_a_step}; others {others}"
    )


def _run(rank, options):
    return program(rank, **options)
