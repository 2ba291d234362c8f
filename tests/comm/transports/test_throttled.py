"""The emulated link: the same bytes, at the speed asked for."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.transport import AloneTransport
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.throttled import Link, ThrottledTransport
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed


def timed(rank: int, megabytes: float) -> tuple[float, bool]:
    link = Link(gb_per_s=0.02, latency_us=1000)
    transports = [ThrottledTransport(CollectiveTransport(dist.group.WORLD), link) for _ in range(2)]
    num_rows = int(megabytes * 1e6 / 8)
    rows = torch.full((2 * num_rows,), rank)
    counts = [num_rows, num_rows]
    dist.barrier()
    began = time.monotonic()
    # Two lanes share the link: one half each, one after the other.
    pending = [each.start(rows, send=counts, receive=counts) for each in transports]
    received = [each.wait() for each in pending]
    right = all(torch.equal(each, torch.tensor([0, 1]).repeat_interleave(num_rows)) for each in received)
    return time.monotonic() - began, right and exchange_counts(
        transports[0], torch.tensor([rank, 5])
    ).tolist()[0] == [0, 5][rank]


def test_bytes_take_the_time_of_the_link_and_arrive():
    for seconds, right in run_on_ranks(timed, 2, 1.0):
        assert right
        # Two times 1 MB leave the rank at 0.02 GB/s, and a latency.
        assert 0.1 <= seconds < 10


def test_it_says_what_moves_the_bytes_and_that_it_is_slowed_down():
    slowed = ThrottledTransport(AloneTransport(), Link(gb_per_s=1, latency_us=0))
    assert (slowed.engine, slowed.sm_free) == ("none", True)
    assert "emulated link" in slowed.reason


@pytest.mark.parametrize("num_bytes", [0, 2_000_000])
def test_the_link_is_first_come_first_served(num_bytes):
    link = Link(gb_per_s=1.0, latency_us=500)
    now = time.monotonic()
    first, second = link.take(num_bytes), link.take(num_bytes)
    assert first - now >= num_bytes / 1e9 + 500e-6
    assert second - first >= num_bytes / 1e9 - 1e-9
