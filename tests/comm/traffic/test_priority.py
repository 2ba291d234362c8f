"""The traffic queue: urgent goes first, bulk in chunks, nobody starves, and a failure ends everything at once."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm.traffic.channels import open_channels
from freescale.comm.traffic.priority import Deadline, Gate, Ticket, TrafficQueue
from freescale.comm.transport import AloneTransport
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.throttled import Link, ThrottledTransport
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed


def test_deadlines_stand_in_the_order_in_which_bytes_are_needed():
    assert [each.name for each in sorted(Deadline)] == [
        "OL_GRADIENTS",
        "OL_ROWS",
        "DENSE_GRADIENTS",
        "NOL_ROWS",
        "NOL_GRADIENTS",
        "IDS",
    ]
    assert [each.urgent for each in Deadline] == [True, True, True, False, False, False]


def test_jobs_are_done_in_the_order_they_were_submitted():
    queue, done = TrafficQueue(), []
    tickets = [queue.submit(lambda n=n: done.append(n) or n) for n in range(100)]
    assert [ticket.wait() for ticket in tickets] == list(range(100))
    assert done == list(range(100))
    queue.close()
    assert not queue._thread.is_alive()


def test_a_failed_job_fails_all_that_follow_and_every_later_call():
    queue, ran = TrafficQueue(), []
    hold = threading.Event()
    first = queue.submit(lambda: hold.wait(60))
    bad = queue.submit(lambda: 1 / 0)
    after = queue.submit(lambda: ran.append(1))
    hold.set()
    assert first.wait() is True
    for ticket in (bad, after):
        with pytest.raises(ZeroDivisionError):
            ticket.wait()
    with pytest.raises(ZeroDivisionError):
        queue.submit(lambda: ran.append(2))
    with pytest.raises(ZeroDivisionError):
        queue.check()
    queue.close()  # does not wait for anything
    assert not ran


class FailsInBetween(TrafficQueue):
    """Breaks, in another thread, right after it was asked whether it has."""

    def check(self) -> None:
        super().check()
        breaks = threading.Thread(target=self.cancel, args=(ZeroDivisionError(),))
        breaks.start()
        breaks.join(0.2)  # under the lock it has to wait until the job is in


def test_a_job_submitted_while_the_queue_breaks_is_not_waited_for_in_vain():
    queue, hold = FailsInBetween(), threading.Event()
    TrafficQueue.check(queue)
    queue._jobs.append(busy := Ticket(lambda: hold.wait(60)))  # the thread has something else to do
    with queue._changed:
        queue._changed.notify()
    while queue._jobs:
        time.sleep(0.001)
    ticket = queue.submit(lambda: 1)
    deadline = time.monotonic() + 20
    while not ticket.done and time.monotonic() < deadline:
        time.sleep(0.001)
    hold.set()
    assert busy.wait() is True
    assert ticket.done
    with pytest.raises(ZeroDivisionError):
        ticket.wait()


def test_cancel_ends_what_has_not_begun():
    queue, hold = TrafficQueue(), threading.Event()
    running, waiting = queue.submit(lambda: hold.wait(60)), queue.submit(lambda: 1)
    while not queue._jobs or len(queue._jobs) > 1:
        time.sleep(0.001)
    queue.cancel(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        waiting.wait()
    hold.set()
    assert running.wait() is True


def test_a_finished_job_lets_go_of_what_it_held():
    queue, big = TrafficQueue(), torch.zeros(10)
    ticket = queue.submit(lambda t=big: t.sum())
    ticket.wait()
    assert ticket._job is None
    queue.close()


def test_bulk_waits_at_the_gate_while_something_urgent_is_under_way():
    gate, passed = Gate(fairness_s=30), []
    gate.shut(Deadline.OL_ROWS)
    gate.shut(Deadline.OL_ROWS)
    thread = threading.Thread(target=lambda: (gate.wait(Deadline.NOL_ROWS), passed.append(time.monotonic())))
    thread.start()
    time.sleep(0.05)
    gate.open(Deadline.OL_ROWS)
    time.sleep(0.05)
    assert not passed, "one urgent transfer is still under way"
    gate.open(Deadline.OL_ROWS)
    thread.join(5)
    assert passed


def test_only_what_is_more_urgent_is_waited_for():
    gate, began = Gate(fairness_s=30), time.monotonic()
    with gate.urgent(Deadline.NOL_ROWS):
        for deadline in (
            Deadline.OL_GRADIENTS,
            Deadline.OL_ROWS,
            Deadline.DENSE_GRADIENTS,
            Deadline.NOL_ROWS,
        ):
            gate.wait(deadline)
    assert time.monotonic() - began < 20


def test_the_gate_never_holds_a_chunk_up_for_long():
    gate = Gate(fairness_s=0.03)
    began = time.monotonic()
    with gate.urgent(Deadline.OL_GRADIENTS):
        gate.wait(Deadline.NOL_ROWS)
    assert 0.03 <= time.monotonic() - began < 20


def test_the_gate_opens_after_an_error():
    gate = Gate(fairness_s=30)
    with pytest.raises(ValueError, match="x"), gate.urgent(Deadline.OL_GRADIENTS):
        raise ValueError("x")
    gate.wait(Deadline.NOL_ROWS)


def same_in_chunks(rank: int, num_ranks: int, sockets: bool) -> int:
    make = SocketTransport if sockets else CollectiveTransport
    bulk, rng, most_chunks = make(dist.group.WORLD), random.Random(5), 0
    for _ in range(25):
        width = rng.choice([(), (3,), (2, 2)])
        most = rng.choice([0, 1, 7, 40])
        counts = [[rng.randint(0, most) for _ in range(num_ranks)] for _ in range(num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.randint(-99, 99, (sum(send), *width))
        wanted = bulk.start(rows, send=send, receive=receive).wait()
        row_bytes = 8 * torch.Size(width).numel()
        per_chunk = rng.choice([1, 3, 100])
        queue = TrafficQueue(chunk_bytes=per_chunk * row_bytes * num_ranks)
        largest = max(map(max, counts))
        most_chunks = max(most_chunks, -(-largest // per_chunk))
        job = queue.submit(
            lambda q=queue, t=rows, s=send, r=receive, m=largest: q.send(
                bulk, t, deadline=Deadline.IDS, send=s, receive=r, largest=m
            )
        )
        assert torch.equal(job.wait(), wanted)
        queue.close()
    return most_chunks


@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_chunks_deliver_what_one_piece_delivers(num_ranks, sockets):
    assert run_on_ranks(same_in_chunks, num_ranks, num_ranks, sockets)[0] > 10


class Slow(AloneTransport):
    """Takes 10 ms a transfer, one after the other: a link of one rank."""

    num_ranks = 2

    def __init__(self) -> None:
        self.link = Link(gb_per_s=1e9, latency_us=10_000)
        self.started: list[float] = []

    def start(self, tensor, *, send, receive):
        self.started.append(time.monotonic())
        return ThrottledTransport(AloneTransport(), self.link).start(tensor, send=[0], receive=[0])


def test_something_urgent_waits_for_a_chunk_or_two_and_not_for_the_whole():
    transport, queue = Slow(), TrafficQueue(chunk_bytes=16, gate=Gate(fairness_s=30))
    rows = torch.arange(100)
    whole = queue.submit(
        lambda: queue.send(
            transport, rows, deadline=Deadline.NOL_ROWS, send=[100, 0], receive=[100, 0], largest=100
        )
    )
    while len(transport.started) < 10:
        time.sleep(0.001)
    with queue.gate.urgent(Deadline.OL_GRADIENTS):
        time.sleep(0.02)
        under_way = len(transport.started)
        time.sleep(0.2)
        assert len(transport.started) - under_way <= 1, "bulk went on beside the urgent transfer"
    assert torch.equal(whole.wait(), rows)
    assert len(transport.started) == 100
    queue.close()


def use_all_lanes(rank: int, num_ranks: int) -> list[str]:
    channels = open_channels(dist.group.WORLD)
    ones = [1] * num_ranks
    mine = torch.full((num_ranks,), rank)
    results = []
    # Each lane is a connection of its own: ranks may use them in different orders.
    order = [channels.express, channels.bulk] if rank % 2 else [channels.bulk, channels.express]
    pending = [channel.start(mine, send=ones, receive=ones) for channel in order]
    for each in pending[::-1]:
        assert each.wait().tolist() == list(range(num_ranks))
    return [*results, channels.express.name, str(channels.ids is channels.bulk)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lanes_do_not_wait_for_each_other(num_ranks):
    assert run_on_ranks(use_all_lanes, num_ranks, num_ranks)[0] == ["collective", "True"]


def test_one_rank_needs_no_connections():
    channels = open_channels(None)
    assert channels.express.num_ranks == channels.bulk.num_ranks == channels.ids.num_ranks == 1
