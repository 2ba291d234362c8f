"""Ranks that compare notes: lateness that transfers have handed on, through whatever thread, is the wire's."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm.traffic import TrafficQueue
from freescale.comm.transport import Pending
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.traced import TracedTransport
from freescale.trace.bubbles import Parts, total
from freescale.trace.spans import HostClock, Recorder
from freescale.trace.stages import compute, record_into, stage
from freescale.train.accounts.accounting import AccountedStep, Accounts
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

pytestmark = pytest.mark.timed

STEPS = 7
HELD = 0.03


class LopsidedLink:
    """A transport that brings rank 1 its bytes later than rank 0."""

    name, engine, sm_free, reason = "lopsided", "sockets", True, "a test"

    def __init__(self, group: dist.ProcessGroup | None, held: float) -> None:
        self._inner = SocketTransport(group)
        self.rank, self.num_ranks = self._inner.rank, self._inner.num_ranks
        self._held = held if self.rank == 1 else 0.0

    def start(self, tensor, *, send, receive) -> Pending:
        pending, held = self._inner.start(tensor, send=send, receive=receive), self._held

        class Late:
            def wait(self):
                arrived = pending.wait()
                time.sleep(held)
                return arrived

        return Late()


def two_threads(rank: int, held: float, late: float, every: int) -> list[AccountedStep]:
    """Steps whose rows come over two links, one of them in another thread; rank 1 works longer by `late`."""
    ranks, accounted = these_ranks(), []
    recorder = Recorder(HostClock())
    record_into(recorder)
    accounts = Accounts(ranks=ranks, recorder=recorder, write=accounted.append, every=every)
    links = [TracedTransport(LopsidedLink(dist.new_group(backend="gloo"), held)) for _ in range(2)]
    sums = TracedTransport(LopsidedLink(dist.group.WORLD, 0.0))
    queue = TrafficQueue()

    def move(link: TracedTransport, name: str) -> None:
        with stage(name):
            link.start(torch.ones(2), send=[1, 1], receive=[1, 1]).wait()

    accounts.begin(1)
    for step in range(1, STEPS + 1):
        with stage("train", step=step):
            move(links[0], "OL rows")
            early = queue.submit(lambda: move(links[1], "NOL rows"))
            with compute("work"):
                time.sleep(0.01 + (late if rank == 1 else 0.0))
            with stage("wait for NOL rows", kind="wait"):
                early.wait()
            move(sums, "sums")
        accounts.end_step()
        accounts.add(step, {})
    accounts.pause()
    queue.close()
    record_into(None)
    return accounted


def of_first_rank(held: float, late: float, every: int) -> Parts:
    """What rank 0 waited for in the steps after the first two."""
    accounted = run_on_ranks(two_threads, 2, held, late, every)[0]
    assert [step.step for step in accounted] == list(range(1, STEPS + 1))
    return total(step.ranks[0] for step in accounted[2:])


def test_lateness_of_two_threads_that_the_wire_has_held_is_no_straggling():
    # At the sums rank 0 stands for what both links have held rank 1, one in each thread.
    for _ in range(6):
        parts = of_first_rank(HELD, 0.0, 1000)
        held = parts.straggler + parts.comm
        if held > 1.5 * HELD * (STEPS - 2) and parts.straggler < 0.15 * held:
            return
    raise AssertionError(parts)


def test_work_of_a_rank_that_the_wire_holds_is_still_waited_for():
    for _ in range(6):
        parts = of_first_rank(HELD, 0.05, 2)  # compared while the other thread is at work
        if abs(parts.straggler / (0.05 * (STEPS - 2)) - 1) < 0.2 and parts.comm > 0.5 * HELD * (STEPS - 2):
            return
    raise AssertionError(parts)
