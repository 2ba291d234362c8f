"""Transports: row blocks arrive whole, in order, at the rank they were meant for."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.transport import AloneTransport, Transport
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.registry import make_transport
from tests.ranks import run_on_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def rows_for(
    source: int, target: int, count: int, width: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """What `source` sends to `target`: numbers that name both."""
    size = count * (torch.Size(width).numel())
    return (torch.arange(size) % 7 + 20 * source + 100 * target % 97).view(count, *width).to(dtype)


def exchange_many(rank: int, num_ranks: int) -> None:
    transport = make_transport(dist.group.WORLD)
    assert isinstance(transport, CollectiveTransport)
    exchange_cases(transport, rank, num_ranks)


def exchange_cases(transport: Transport, rank: int, num_ranks: int) -> None:
    """Random splits, types and widths, waited for in another order than they were started in."""
    assert (transport.rank, transport.num_ranks) == (rank, num_ranks)
    rng = random.Random(5)
    on_the_way = []
    for case in range(40):
        dtype, width = rng.choice(DTYPES), rng.choice([(), (1,), (3,), (2, 2)])
        most = rng.choice([0, 1, 5])
        counts = [[rng.randint(0, most) for _ in range(num_ranks)] for _ in range(num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        assert exchange_counts(transport, torch.tensor(send)).tolist() == receive
        blocks = [rows_for(rank, target, send[target], width, dtype) for target in range(num_ranks)]
        wanted = torch.cat(
            [rows_for(source, rank, receive[source], width, dtype) for source in range(num_ranks)]
        )
        on_the_way.append((case, transport.start(torch.cat(blocks), send=send, receive=receive), wanted))
        if rng.random() < 0.5:
            check(on_the_way)
    check(on_the_way)


def check(on_the_way: list) -> None:
    """Wait for everything that was started, the last first."""
    while on_the_way:
        case, pending, wanted = on_the_way.pop()
        got = pending.wait()
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted), f"case {case}"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rows_arrive_by_source_rank_whatever_the_splits(num_ranks):
    run_on_ranks(exchange_many, num_ranks, num_ranks)


def send_a_view(rank: int) -> list[list[float]]:
    transport = make_transport(dist.group.WORLD)
    everything = torch.arange(12.0).view(2, 6) + 100 * rank
    return transport.start(everything.T[::3], send=[1, 1], receive=[1, 1]).wait().tolist()


def test_views_are_sent_as_the_values_they_show():
    assert run_on_ranks(send_a_view, 2) == [[[0, 6], [100, 106]], [[3, 9], [103, 109]]]


def test_alone_what_is_sent_arrives():
    transport = make_transport(None)
    assert isinstance(transport, AloneTransport)
    rows = torch.arange(6).view(3, 2)
    assert torch.equal(transport.start(rows, send=[3], receive=[3]).wait(), rows)
    assert exchange_counts(transport, torch.tensor([3])).tolist() == [3]
    assert (transport.rank, transport.num_ranks) == (0, 1)
