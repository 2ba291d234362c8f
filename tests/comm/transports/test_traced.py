"""A watched transport moves the same bytes and says when this rank was ready and how long it stood."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.traced import TracedTransport
from freescale.trace.spans import Recorder
from freescale.trace.stages import record_into, stage
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed


def exchange(rank: int, sockets: bool) -> tuple[list[float], list[int], list[tuple[str, str, float, float]]]:
    transport = TracedTransport((SocketTransport if sockets else CollectiveTransport)(dist.group.WORLD))
    recorder = Recorder()
    recorder.begin(1)
    record_into(recorder)
    with stage("exchange rows", step=3):
        pending = transport.start(torch.tensor([10.0 * rank, 10.0 * rank + 1]), send=[1, 1], receive=[1, 1])
        time.sleep(0.02 if rank == 0 else 0.0)
        arrived = pending.wait()
    with stage("exchange counts", step=3):
        counts = exchange_counts(transport, torch.tensor([rank, rank + 5]))
    record_into(None)
    waits = [span for span in recorder.take() if span.kind == "wait"]
    # The recorder is off: nothing is recorded, everything still moves.
    transport.start(torch.zeros(2), send=[1, 1], receive=[1, 1]).wait()
    assert recorder.take() == []
    return arrived.tolist(), counts.tolist(), [(s.name, s.arrival.name, s.start, s.end) for s in waits]


def check(sockets: bool) -> None:
    for rank, (arrived, counts, waits) in enumerate(run_on_ranks(exchange, 2, sockets)):
        assert arrived == [float(rank), 10.0 + rank]
        assert counts == [5 * rank, 1 + 5 * rank]
        assert [name for name, _, _, _ in waits] == ["exchange rows", "exchange rows", "exchange counts"]
        started, waited, _ = waits
        # What the rank does between starting and waiting is no part of the wait.
        assert waited[2] - started[3] >= (0.02 if rank == 0 else 0.0)


def test_over_sockets() -> None:
    check(True)


def test_over_a_group() -> None:
    check(False)


def test_other_offers_of_a_transport_pass_through() -> None:
    class Odd:
        name, rank, num_ranks = "odd", 0, 1
        engine, sm_free, reason = "pigeons", True, "they fly"
        colour = "grey"

    watched = TracedTransport(Odd())
    assert (watched.name, watched.sm_free, watched.num_ranks) == ("odd", True, 1)
    assert (watched.engine, watched.reason, watched.colour) == ("pigeons", "they fly", "grey")
